"""What ranks that share a node take from each other, and what a link between two gives, measured.

The functions named ``*_on_ranks`` run on every rank of a group that the caller has started.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arrangement import Arrangement
from ..distribute import distribute
from ..program import record
from ..world import Label, Mesh, Receive, Send, World
from .calibrate import describe, measured
from .cost import BOUNDS, Key, Prices, key_of
from .machine import Machine
from .measure import Catalogue, measure
from .probes import probes
from .recording import STEADY, Subject, busiest_rank, record_step
from .replay import Replay, replay

LABEL, SUM_LABEL = Label("calibration", "halocline calibrate"), Label("calibration", "halocline calibrate", "gradients")
STEP_PROBES, STEP_SEED = range(15), 1  # networks whose whole steps are timed
STEP_TERMS = (*BOUNDS, "host_us", "waiting")
HOLD = 0.3  # how much the factors of a step's terms are held to each other
DOUBTFUL = 0.15  # relative error from which on a step counts less
TURN = 0.1  # seconds in which a kernel is called again and again
_MEGABYTE = 1 << 20


LEAST_FACTOR = 0.5  # of kernels at work over kernels alone, as a machine file takes it


class Ranks(Protocol):
    """Processes that run one function each, such as :class:`halocline.testing.RankPool`."""

    def run(self, fn: Any, /, *args: Any, deadline: float = ...) -> list[Any]: ...


def measure_load(ranks: Ranks, count: int, device: dict[str, Any], link: dict[str, float]) -> dict[str, Any]:
    """The entry of ``loads`` for ``count`` ranks at work.

    Kernels, messages and the program are measured by themselves first. Then whole steps of a few networks correct them:
    inside a step memory is fresh, caches hold other things, and on a shared core one rank computes while others wait.
    """
    crowding = _typical(ranks.run(crowding_on_ranks, deadline=240))
    host = statistics.median(ranks.run(host_seconds_on_ranks, deadline=240))
    loaded = {"exchange": 1e-6, "sum": 1e-6}
    if count > 1:
        loaded = _typical(ranks.run(loaded_latency_on_ranks, deadline=120))
    entry: dict[str, Any] = {
        "ranks": count,
        **{name: measured(factor) for name, factor in crowding.items()},
        "host_us": measured(max(host * 1e6, 0.01)),
        "latency_us": measured(max(loaded["exchange"] * 1e6, 0.01)),
        "sum_latency_us": measured(max(loaded["sum"] * 1e6, 0.01)),
        "waiting": measured(1.0),
    }
    terms, seconds = _probe_steps(ranks, count, device, link, entry)
    factors = fitted_factors(terms, seconds)
    for name, factor in zip(STEP_TERMS, factors, strict=True):
        value = entry[name]["value"] * float(factor)
        # Kernels are not twice as fast inside a step: so small a factor means that few of them were timed.
        entry[name] = measured(max(LEAST_FACTOR, value) if name in BOUNDS else value)
    return entry


def _probe_steps(
    ranks: Ranks, count: int, device: dict[str, Any], link: dict[str, float], load: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """For each probe network: what the terms of its step are expected to take, and what the step takes, in seconds."""
    machine = Machine.model_validate(describe(device, link, [load], 1e9, nodes=1, ranks=count))
    prices = Prices(machine.device).on(machine, count)
    terms, seconds = [], []
    for number in STEP_PROBES:
        subject, sizes, batch = step_probe(number, count)
        rank = busiest_rank(Arrangement(sizes), subject.volume)
        recorded = record_step(subject, sizes, batch, rank, pricing=Replay(rank, machine, prices))
        line = replay(recorded.record.events, rank, machine, prices)
        host = len(recorded.record.operations) * load["host_us"]["value"] * 1e-6
        kernels = prices.by_bound(recorded.record.operations)
        terms.append([*(kernels[name] for name in BOUNDS), host, line.exposed_seconds])
        seconds.append(max(ranks.run(probe_step_on_ranks, number, count, deadline=240)))
    return np.array(terms), np.array(seconds)


def fitted_factors(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """By which factors the terms of steps add up to the measured seconds.

    Least squares of relative errors, in which one common factor is free and the differences between terms are held
    small; steps that others disturbed (far too long) lose their weight.
    """
    common = float(np.median(seconds / terms.sum(1)))
    count = terms.shape[1]
    relative = common * terms / seconds[:, None]
    weights = np.ones(len(seconds))
    factors = np.ones(count)
    for _ in range(10):
        rows = np.vstack([weights[:, None] * relative, HOLD * np.eye(count)])
        wanted = np.concatenate([weights, HOLD * np.ones(count)])
        factors = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], 0.2, 4.0)
        off = np.abs(relative @ factors - 1)
        weights = np.sqrt(np.minimum(1.0, DOUBTFUL / np.maximum(off, 1e-9)))
    return common * factors


def step_probe(number: int, count: int) -> tuple[Subject, dict[str, int], int]:
    """A network for whole steps, cut over ``count`` ranks: its first dim, its last, or the batch; samples a rank."""
    subject, _, batch = next(islice(probes(number + 1, torch.float32, seed=STEP_SEED), number, None))
    axes = list(subject.volume)
    axis = (axes[0], axes[-1], "data")[number % 3]
    return subject, {"data": 1} | dict.fromkeys(axes, 1) | {axis: count}, batch


def probe_step_on_ranks(number: int, count: int) -> float:
    """Seconds of a training step of that network."""
    subject, sizes, batch = step_probe(number, count)
    arrangement = Arrangement(sizes)
    model = distribute(subject.make_model(), plan=arrangement)
    optimizer = torch.optim.Adam(model.parameters())
    volume = arrangement.shard(torch.ones(batch * sizes["data"], *subject.shapes[0][1:]), subject.letters)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        subject.loss(model(volume)).backward()
        optimizer.step()

    seconds = []
    for turn in range(STEADY + 5):
        started = time.perf_counter()
        step()
        if turn >= STEADY:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _typical(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over ranks of each figure."""
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def crowding_on_ranks() -> dict[str, float]:
    """How many times longer kernels take while all ranks run them than while rank 0 does alone, by their bound."""
    world = Mesh(data=-1).world
    large = torch.ones(_MEGABYTE)
    ratios: dict[str, list[float]] = {name: [] for name in BOUNDS}
    for side, channels in ((24, 16), (32, 24), (12, 64)):
        volumes = torch.ones(2, channels, side, side, side)
        weight = torch.ones(channels, channels, 3, 3, 3)
        calls: dict[str, Callable[[], object]] = {
            "arithmetic": lambda v=volumes, w=weight: F.conv3d(v, w, padding=1),  # type: ignore[misc]
            "unfolding": lambda v=volumes[:1], w=weight: F.conv3d(v, w, padding=1),  # type: ignore[misc]
            "memory": lambda: large.add_(1.0),
        }
        for name, call in calls.items():
            ratios[name] += [_crowding(world, call) for _ in range(3)]
    return {name: max(1.0, statistics.median(found)) for name, found in ratios.items()}


def _crowding(world: World, call: Callable[[], object]) -> float:
    """Seconds of a call on all ranks at once over those on rank 0 alone, one after the other so that neither drifts."""
    call()
    _meet(world)
    alone = torch.tensor([_seconds_of(call, TURN) if world.rank == 0 else 0.0])
    alone = world.sum(alone, tuple(range(world.size)), LABEL)
    return _seconds_of(call, TURN * max(1, world.size // 2)) / float(alone)


def _seconds_of(call: Callable[[], object], least: float) -> float:
    """Of one call, on average over at least so long: ranks that share a core all have their turns."""
    started, calls_made = time.perf_counter(), 0
    while time.perf_counter() - started < least:
        call()
        calls_made += 1
    return (time.perf_counter() - started) / calls_made


def _meet(world: World) -> None:
    """A barrier, so that ranks begin to time together."""
    world.sum(torch.zeros(1), tuple(range(world.size)), LABEL)


class _Chain(nn.Module):
    """Small layers, so that the program itself takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv3d(2, 2, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm3d(2) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x


def host_seconds_on_ranks() -> float:
    """Seconds of the program for each local operation, beside the operation itself, in a small cut network's step."""
    world = Mesh(data=-1).world
    arrangement = Arrangement({"data": 1, "depth": world.size})
    model = distribute(_Chain(), plan=arrangement)
    optimizer = torch.optim.Adam(model.parameters())
    volume = arrangement.shard(torch.ones(1, 2, 4 * world.size, 4, 4), "NCDHW")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(volume).square().mean().backward()
        optimizer.step()

    for _ in range(5):
        step()
    # Processor time of all threads: waiting for others is not the program's.
    seconds = []
    for _ in range(15):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    recorded = record(step, arrangement.mesh())
    with Catalogue() as catalogue:
        step()
    known: dict[Key, float] = {}
    measure(catalogue.calls, known, torch.device("cpu"))
    kernels = sum(known.get(key_of(event), 0.0) for event in recorded.operations)
    return max(0.0, statistics.median(seconds) - kernels) / len(recorded.operations)


def loaded_latency_on_ranks() -> dict[str, float]:
    """Seconds that a small exchange, and a small sum, add to ranks that compute a few milliseconds before each."""
    world = Mesh(data=-1).world
    everyone, small = tuple(range(world.size)), torch.zeros(256)
    peers = sorted({(world.rank + 1) % world.size, (world.rank - 1) % world.size})
    matrix = torch.ones(384, 384)

    def exchange() -> None:
        sends, receives = [Send(peer, small) for peer in peers], [Receive(peer, small.numel()) for peer in peers]
        world.begin(sends, receives, small, everyone, LABEL).wait()

    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "exchange": exchange,
        "sum": lambda: world.begin_sum(small, everyone, SUM_LABEL).wait(),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(5):
        for way, call in ways.items():
            _meet(world)
            started = time.perf_counter()
            for _ in range(40):
                torch.mm(matrix, matrix)
                call()
            found[way].append((time.perf_counter() - started) / 40)
    medians = {way: statistics.median(times) for way, times in found.items()}
    return {way: max(1e-6, medians[way] - medians["nothing"]) for way in ("exchange", "sum")}


def link_on_ranks() -> dict[str, float]:
    """Seconds of a small message each way at once, and bytes a second of a large one; between ranks 0 and 1."""
    world = Mesh(data=-1).world
    small, large = torch.zeros(1), torch.zeros(2 * _MEGABYTE)
    latency = statistics.median(_swap_seconds(world, small) for _ in range(200))
    rate = large.nbytes / statistics.median(_swap_seconds(world, large) for _ in range(9))
    return {"latency_us": latency * 1e6, "gb_per_s": rate / 1e9, "overlap_loss": _overlap_loss(world, large)}


def _swap_seconds(world: World, value: Tensor) -> float:
    """Ranks 0 and 1 send and receive at once; others do nothing."""
    start = time.perf_counter()
    if world.rank < 2:
        peer = 1 - world.rank
        world.begin([Send(peer, value)], [Receive(peer, value.numel())], value, (0, 1), LABEL).wait()
    return time.perf_counter() - start


def _overlap_loss(world: World, value: Tensor) -> float:
    """Of the time of an exchange: what it takes from work that runs beside it."""
    matrix = torch.ones(512, 512)
    alone, beside = [], []
    travel = statistics.median(_swap_seconds(world, value) for _ in range(5))
    repeat = 1
    for _ in range(7):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        repeat = max(repeat, int(1.5 * travel / (time.perf_counter() - started)))
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(repeat):
            torch.mm(matrix, matrix)
        alone.append(time.perf_counter() - started)
        if world.rank < 2:
            peer = 1 - world.rank
            started = time.perf_counter()
            pending = world.begin([Send(peer, value)], [Receive(peer, value.numel())], value, (0, 1), LABEL)
            for _ in range(repeat):
                torch.mm(matrix, matrix)
            pending.wait()
            beside.append(time.perf_counter() - started)
    lost = statistics.median(beside or alone) - statistics.median(alone)
    return min(1.0, max(1e-3, lost / travel))
