"""Measure on this card how large chunks should be, and from which size on.

For each family one operation that is typical of it. Above 2^31 elements it is timed in chunks of several sizes; of
those within a fiftieth of the best the largest is taken. Below, it is timed whole and in chunks: should chunks be
faster already there, they begin there. For norms it is the other way round: from which size on do they gain?
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked import chunked
from .sizes import DEFAULTS, LARGEST, NEVER, Sizes, forced

CLOSE = 1.02  # times that differ by less are the same
GAIN = 1.05  # what chunks must gain where torch has a fast path
CHUNKS = (1 << 30, 1 << 29, 1 << 28, 1 << 27)  # none larger: what is made beside a chunk grows with it
NORMS = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)

Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Trial:
    """One operation to time: ``make(elements, device)`` builds it with a largest operand of about so many elements."""

    family: str
    make: Callable[[int, torch.device], Callable[[], object]]


def _volume(channels: int, elements: int, device: torch.device, last: bool = True) -> Tensor:
    """A random volume with about so many elements."""
    side = min(256, max(4, round((elements / channels) ** (1 / 3))))
    depth = max(2, -(-elements // (channels * side * side)))
    layout = torch.channels_last_3d if last else torch.contiguous_format
    shape = (1, channels, depth, side, side)
    return torch.empty(shape, dtype=torch.bfloat16, device=device, memory_format=layout).normal_()


def _convolution(elements: int, device: torch.device) -> Callable[[], object]:
    x, weight = _volume(32, elements, device), torch.ones(32, 32, 3, 3, 3, dtype=torch.bfloat16, device=device)
    return lambda: F.conv3d(x, weight, padding=1)


def _transposed(elements: int, device: torch.device) -> Callable[[], object]:
    x, weight = _volume(32, elements // 8, device), torch.ones(32, 32, 2, 2, 2, dtype=torch.bfloat16, device=device)
    return lambda: F.conv_transpose3d(x, weight, stride=2)


def _weight_gradient(elements: int, device: torch.device) -> Callable[[], object]:
    x, weight = _volume(32, elements, device), torch.ones(32, 32, 3, 3, 3, dtype=torch.bfloat16, device=device)
    settings = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [False, True, False])
    return lambda: torch.ops.aten.convolution_backward(x, x, weight, None, *settings)


def _channels(elements: int, device: torch.device) -> Callable[[], object]:
    x = _volume(32, elements, device, last=False)
    return lambda: F.max_pool3d(x, 2)


def _norm(elements: int, device: torch.device) -> Callable[[], object]:
    x = _volume(32, elements, device, last=False)
    return lambda: F.batch_norm(x, None, None, training=True)


def _norm_backward(elements: int, device: torch.device) -> Callable[[], object]:
    x, one = _volume(32, elements, device), torch.ones(32, device=device)
    settings = (None, None, one, one, True, 1e-5, [True] * 3)
    return lambda: torch.ops.aten.native_batch_norm_backward(x, x, one, *settings)


TRIALS = (
    Trial("convolution", _convolution),
    Trial("transposed", _transposed),
    Trial("weight gradient", _weight_gradient),
    Trial("channels", _channels),
    Trial("norm backward", _norm_backward),
)


def tune(
    device: torch.device, seconds: Seconds, limit: int = LARGEST, sizes: tuple[int, ...] = CHUNKS
) -> Iterator[tuple[str, Sizes]]:
    """The sizes of each family, one after the other. ``sizes`` are those of chunks, from the largest."""
    with chunked(None):
        for trial in TRIALS:
            allowed = tuple(size for size in sizes if size <= DEFAULTS[trial.family].chunk)
            yield trial.family, _sizes_of(trial, device, seconds, limit, allowed)
        yield "norm", _norm_sizes(device, seconds)


def _sizes_of(trial: Trial, device: torch.device, seconds: Seconds, limit: int, sizes: tuple[int, ...]) -> Sizes:
    """The best chunk above the limit, and from which size on chunks gain below it."""
    above = _timed(trial, limit + limit // 8, device, seconds, [Sizes(chunk, chunk) for chunk in sizes])
    best = min(above.values())
    chunk = next(choice.chunk for choice in above if above[choice] <= CLOSE * best)
    whole = limit
    for elements in (limit // 2, limit // 4):
        small = min(chunk, elements // 2)
        below = _timed(trial, elements, device, seconds, [NEVER, Sizes(small, small)])
        plain, cut = below.values()
        # Torch's fast path is as good at this size, and so at all smaller ones.
        if cut * GAIN > plain:
            break
        whole, chunk = elements // 2, small
    return Sizes(whole, min(chunk, whole))


def _norm_sizes(device: torch.device, seconds: Seconds) -> Sizes:
    """The largest size at which torch's way is still as good."""
    whole = NORMS[0]
    for elements in NORMS:
        plain, ours = _timed(Trial("norm", _norm), elements, device, seconds, [NEVER, Sizes(1, 1)]).values()
        if plain > GAIN * ours:
            break
        whole = elements
    return Sizes(whole, whole)


def _timed(
    trial: Trial, elements: int, device: torch.device, seconds: Seconds, choices: list[Sizes]
) -> dict[Sizes, float]:
    """Seconds of one operation under each choice of sizes."""
    operation = trial.make(elements, device)
    timings = {}
    for choice in choices:
        with forced(choice):
            timings[choice] = seconds(operation)
    return timings


def gpu_seconds(operation: Callable[[], object], repeat: int = 5) -> float:
    """Median; the first calls choose kernels and do not count."""
    times = []
    for _ in range(repeat + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        operation()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
