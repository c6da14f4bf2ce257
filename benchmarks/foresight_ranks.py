"""On the ranks of ``bench foresight``: a training step as a plan arranges it, its seconds and its peak of memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from halocline.arrangement import Arrangement
from halocline.distribute import distribute
from halocline.plan.api import mean_square
from halocline.plan.measure import PEAK_RESET, memory_in_use, memory_peak, return_free_memory, return_memory_at_once
from halocline.world import Mesh

from .foresight_cases import LETTERS, Case, make_network

WARM = 3  # steps until gradients have their buckets and memory is had
CPU = torch.device("cpu")

_steps: dict[str, Callable[[], None]] = {}


def warm_up() -> None:
    """Let torch and the transport have what they keep for good, so that no case is charged for it."""
    shape = (1, 1, 16, 16, 16)
    ranks = Mesh(data=-1).world.size
    for arguments in ({"width": 2}, {"width": 16}):
        case = Case("unet3d", arguments, shape, {"data": 1, "depth": ranks, "height": 1, "width": 1})
        prepare(case)
        forget(case.name)


def prepare(case: Case, name: str | None = None) -> None:
    """Build the case on this rank and run it warm; ``timed_steps`` finds it by ``name``, or its own."""
    step = _steps[name or case.name] = _make_step(case)
    for _ in range(WARM):
        step()


def memory_peak_of(case: Case) -> int:
    """Bytes that the case takes at its peak on this rank, weights and optimizer included.

    Memory that is let go of does not count, whether the C library keeps it or not; so times are not measured here.
    """
    return_memory_at_once()
    peaks = []
    for _ in range(2):  # the first pays for what torch and the transport keep for good
        _release()
        before = memory_in_use(CPU)
        PEAK_RESET.write_text("5")
        prepare(case)
        peaks.append(memory_peak(CPU) - before)
        forget(case.name)
    return peaks[-1]


def timed_steps(name: str, count: int) -> float:
    """The median of ``count`` steps, in seconds."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        _steps[name]()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def forget(name: str) -> None:
    """Release the case's memory."""
    _steps.pop(name, None)
    _release()


def _make_step(case: Case) -> Callable[[], None]:
    torch.manual_seed(0)
    arrangement = Arrangement(case.sizes, case.points)
    model = distribute(make_network(case), plan=arrangement)
    optimizer = torch.optim.Adam(model.parameters())
    volume = arrangement.shard(torch.randn(case.batch, *case.shape[1:]), LETTERS[len(case.shape)])

    def step() -> None:
        model.zero_grad(set_to_none=True)
        mean_square(model(volume)).backward()
        optimizer.step()

    return step


def _release() -> None:
    """Give memory that nobody uses back to the system, so that the next peak is this case's own."""
    gc.collect()
    return_free_memory()
