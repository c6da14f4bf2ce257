"""What ranks that share a node take from each other, and what a link between two gives, measured.

The functions named ``*_on_ranks`` run on every rank of a group that the caller has started.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arrangement import Arrangement
from ..distribute import distribute
from ..program import record
from ..world import Label, Mesh, Receive, Send, World
from .calibrate import describe, measured
from .cost import Key, Prices, key_of
from .machine import Machine
from .measure import Catalogue, measure
from .probes import probes
from .recording import STEADY, Subject, busiest_rank, record_step
from .replay import Replay, replay

LABEL, SUM_LABEL = Label("calibration", "halocline calibrate"), Label("calibration", "halocline calibrate", "gradients")
STEP_PROBES, STEP_SEED = range(12), 1  # networks whose whole steps are timed
TURN = 0.3  # seconds in which a kernel is called again and again
_MEGABYTE = 1 << 20


class Ranks(Protocol):
    """Processes that run one function each, such as :class:`halocline.testing.RankPool`."""

    def run(self, fn: Any, /, *args: Any, deadline: float = ...) -> list[Any]: ...


def measure_load(
    ranks: Ranks, count: int, device: dict[str, Any], link: dict[str, float], alone: dict[str, float] | None = None
) -> tuple[dict[str, Any], Any]:
    """The entry of ``loads`` for ``count`` ranks at work, and the kernel times to compare larger counts with.

    Kernels, messages and the program are measured by themselves. Then whole steps of a few networks say how much longer
    operations take inside a step, where memory is fresh and caches hold other things.
    """
    kernels = _typical(ranks.run(kernels_on_ranks, deadline=120))
    alone = alone or kernels
    host = statistics.median(ranks.run(host_seconds_on_ranks, deadline=240))
    latency = sums = 1e-6
    if count > 1:
        loaded = _typical(ranks.run(loaded_latency_on_ranks, deadline=120))
        latency, sums = loaded["exchange"], loaded["sum"]
    entry: dict[str, Any] = {
        "ranks": count,
        "arithmetic": measured(max(0.9, kernels["arithmetic"] / alone["arithmetic"])),
        "memory": measured(max(0.9, kernels["memory"] / alone["memory"])),
        "host_us": measured(max(host * 1e6, 0.01)),
        "latency_us": measured(max(latency * 1e6, 0.01)),
        "sum_latency_us": measured(max(sums * 1e6, 0.01)),
    }
    inside = _inside_a_step(ranks, count, device, link, entry)
    for term in ("arithmetic", "memory"):
        entry[term] = measured(entry[term]["value"] * inside)
    entry["host_us"] = measured(max(entry["host_us"]["value"] / inside, 0.01))  # prices multiply it by arithmetic
    return entry, alone


def _inside_a_step(
    ranks: Ranks, count: int, device: dict[str, Any], link: dict[str, float], load: dict[str, Any]
) -> float:
    """Seconds that operations take in steps, over those that they take by themselves; large networks count most."""
    nodes = {"nodes": 1, "ranks": count}
    machine = Machine.model_validate(describe(device, link, [load], 1e9, **nodes))
    prices = Prices(machine.device).on(machine, count)
    inside = expected = 0.0
    for number in STEP_PROBES:
        subject, sizes = step_probe(number, count)
        rank = busiest_rank(Arrangement(sizes), subject.volume)
        recorded = record_step(subject, sizes, 1, rank, pricing=Replay(rank, machine, prices))
        line = replay(recorded.record.events, rank, machine, prices)
        host = len(recorded.record.operations) * load["host_us"]["value"] * 1e-6 * load["arithmetic"]["value"]
        took = max(ranks.run(probe_step_on_ranks, number, count, deadline=240))
        inside += took - line.exposed_seconds - host
        expected += line.compute - host
    return min(3.0, max(0.7, inside / expected))


def step_probe(number: int, count: int) -> tuple[Subject, dict[str, int]]:
    """A network for whole steps, cut over ``count`` ranks along its first dim."""
    subject = next(islice(probes(number + 1, torch.float32, seed=STEP_SEED), number, None))[0]
    return subject, {axis: count if n == 0 else 1 for n, axis in enumerate(subject.volume)} | {"data": 1}


def probe_step_on_ranks(number: int, count: int) -> float:
    """Seconds of a training step of that network."""
    subject, sizes = step_probe(number, count)
    arrangement = Arrangement(sizes)
    model = distribute(subject.make_model(), plan=arrangement)
    optimizer = torch.optim.Adam(model.parameters())
    volume = arrangement.shard(torch.ones(subject.shapes[0]), subject.letters)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        subject.loss(model(volume)).backward()
        optimizer.step()

    seconds = []
    for number in range(8):
        started = time.perf_counter()
        step()
        if number >= STEADY:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _typical(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def kernels_on_ranks() -> dict[str, float]:
    """Seconds of a convolution and of a large addition while all ranks do the same."""
    world = Mesh(data=-1).world
    volume, weight = torch.ones(1, 16, 24, 24, 24), torch.ones(16, 16, 3, 3, 3)
    large = torch.ones(_MEGABYTE)
    calls: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: F.conv3d(volume, weight, padding=1),
        "memory": lambda: large.add_(1.0),
    }
    found = {}
    for name, call in calls.items():
        times = []
        call()
        for _ in range(5):
            _meet(world)
            started, calls_made = time.perf_counter(), 0
            while time.perf_counter() - started < TURN:  # long, so that ranks that share a core all have their turns
                call()
                calls_made += 1
            times.append((time.perf_counter() - started) / calls_made)
        found[name] = statistics.median(times)
    return found


def _meet(world: World) -> None:
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
