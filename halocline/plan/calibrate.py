"""Measure the machine at hand and describe it in the form of a machine file. Needs torch and numpy alone.

The functions named ``*_on_ranks`` run on every rank of a group that the caller has started.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arrangement import Arrangement
from ..distribute import distribute
from ..program import dry, record
from ..world import Label, Mesh, Receive, Send, World
from .cost import Key, dtype_name, key_of
from .curves import placed
from .measure import Call, Catalogue, measure, return_memory_at_once, spread_over_kinds, time_call, workspace_of
from .probes import probes
from .recording import record_step

DTYPES = ("float64", "float32", "bfloat16")
LABEL, SUM_LABEL = Label("calibration", "halocline calibrate"), Label("calibration", "halocline calibrate", "gradients")
MOST = {True: 360, False: 24}  # operations of a kind that are timed: of those that multiply, and of others
PROBES = 240
TURN = 0.3  # seconds in which a kernel is called again and again
LARGE = 1 << 18  # bytes of an operation from which on its workspace is measured
_MEGABYTE = 1 << 20

Tell = Callable[[str, float], None]  # what is measured, and the share of it that is done


class Ranks(Protocol):
    """Processes that run one function each, such as :class:`halocline.testing.RankPool`."""

    def run(self, fn: Any, /, *args: Any, deadline: float = ...) -> list[Any]: ...


def measured(value: float) -> dict[str, Any]:
    """A quantity of a machine file."""
    return {"value": float(f"{value:.4g}"), "source": "measured"}


# ---- one device ----


def measure_device(
    device: torch.device,
    tell: Tell,
    dtypes: Sequence[str] = ("float32",),
    without: Collection[Key] = (),
    seconds: float = 200.0,
) -> dict[str, Any]:
    """The ``device`` part of a machine file. Operations of ``without`` are not timed; ``seconds`` limits the timing.

    Peaks are those of a matrix product, so that an efficiency of 1 means as fast as that.
    """
    tell("matrix products", 0.0)
    peaks = {name: _peak(getattr(torch, name), device) for name in DTYPES}
    tell("memory", 0.0)
    large = torch.empty(64 * _MEGABYTE, dtype=torch.float32, device=device)
    bandwidth = 2 * large.nbytes / time_call(torch.ops.aten.copy_.default, (large, large.clone()), {}, device)
    launch = time_call(torch.ops.aten.add.Tensor, (torch.ones(8, device=device), 1.0), {}, device)
    efficiency, half = _curve(device, peaks["float32"])
    timed = [each for name in dtypes for each in time_operations(device, name, tell, without, seconds / len(dtypes))]
    return_memory_at_once()  # last, for it changes times
    operations = []
    for number, (call, us) in enumerate(timed):
        tell("memory of operations", number / len(timed))
        operations.append(_row(call, us, device))
    return {
        "name": _device_name(device),
        "kind": "gpu" if device.type == "cuda" else "cpu",
        "memory_gb": measured(_memory(device) / 1e9),
        "memory_gb_per_s": measured(bandwidth / 1e9),
        "peak_tflops": {name: measured(peak / 1e12) for name, peak in peaks.items()},
        "efficiency": measured(efficiency),
        "half_work_gflop": measured(half / 1e9),
        "memory_efficiency": measured(1.0),  # the bandwidth above is what a copy reaches
        "launch_us": measured(max(launch * 1e6, 0.01)),
        "operations": operations,
    }


def time_operations(
    device: torch.device, dtype: str, tell: Tell, without: Collection[Key], seconds: float
) -> list[tuple[Call, float]]:
    """Microseconds of what random networks consist of, in turns over kinds of operations."""
    with dry(0, 1):
        catalogue = Catalogue()
    for number, (subject, mesh, batch) in enumerate(probes(PROBES, getattr(torch, dtype))):
        record_step(subject, mesh, batch, beside=catalogue, warm=0)
        tell("shapes of operations", (number + 1) / PROBES)
    wanted = [call for key, call in catalogue.calls.items() if key not in without and "::" not in call.event.name]
    random.Random(0).shuffle(wanted)
    wanted = spread_over_kinds(wanted, MOST, lambda event: placed(event).kind)
    timed, end = [], time.monotonic() + seconds
    for number, call in enumerate(wanted):
        if time.monotonic() > end:
            break
        timed.append((call, time_call(call.function, call.args, call.kwargs, device) * 1e6))
        tell(f"{dtype} operations", number / len(wanted))
    return timed


def _row(call: Call, us: float, device: torch.device) -> dict[str, Any]:
    """One entry of the machine file's operations."""
    event = call.event
    return {
        "name": event.name,
        "dtype": dtype_name(event),
        "shapes": event.shapes,
        "options": event.options,
        "flops": event.flops,
        "bytes": event.bytes,
        "us": float(f"{us:.4g}"),
        "workspace_bytes": workspace_of(call, device) if event.bytes >= LARGE else 0,
    }


def _peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best of a few matrix products."""
    sizes = (512, 1024) if device.type == "cpu" else (4096, 8192)
    rates = []
    for size in sizes:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        rates.append(2 * size**3 / time_call(torch.ops.aten.mm.default, (matrix, matrix), {}, device))
    return max(rates)


def _curve(device: torch.device, peak: float) -> tuple[float, float]:
    """``efficiency`` and ``half_work`` of time = (work + half_work) / (peak * efficiency), in FLOP.

    The efficiency is that of the best convolution, the half work that of the smallest.
    """
    sides = (8, 12, 16, 24, 32, 40) if device.type == "cpu" else (16, 32, 48, 64, 96, 128)
    works, times = [], []
    for side in sides:
        volume = torch.ones(1, 16, side, side, side, device=device)
        weight = torch.ones(16, 16, 3, 3, 3, device=device)
        works.append(2.0 * 16 * 16 * 27 * side**3)
        times.append(time_call(_convolve, (volume, weight), {}, device))
    rate = max(work / seconds for work, seconds in zip(works, times, strict=True))
    return min(1.0, max(1e-3, rate / peak)), max(1e3, times[0] * rate - works[0])


def _convolve(volume: Tensor, weight: Tensor) -> Tensor:
    return F.conv3d(volume, weight, padding=1)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"one thread of {names[0] if names else 'a CPU'}"


def _memory(device: torch.device) -> float:
    """Bytes of the device; of a CPU, an even share of the machine's for each core."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (os.cpu_count() or 1)


# ---- ranks that share a node ----


def measure_load(ranks: Ranks, count: int, alone: dict[str, float] | None = None) -> tuple[dict[str, Any], Any]:
    """The entry of ``loads`` for ``count`` ranks at work, and the kernel times to compare larger counts with."""
    kernels = _typical(ranks.run(kernels_on_ranks, deadline=120))
    alone = alone or kernels
    host = statistics.median(ranks.run(host_seconds_on_ranks, deadline=240))
    latency = sums = 1e-6
    if count > 1:
        loaded = _typical(ranks.run(loaded_latency_on_ranks, deadline=120))
        latency, sums = loaded["exchange"], loaded["sum"]
    entry = {
        "ranks": count,
        "arithmetic": measured(max(0.9, kernels["arithmetic"] / alone["arithmetic"])),
        "memory": measured(max(0.9, kernels["memory"] / alone["memory"])),
        "host_us": measured(max(host * 1e6, 0.01)),
        "latency_us": measured(max(latency * 1e6, 0.01)),
        "sum_latency_us": measured(max(sums * 1e6, 0.01)),
    }
    return entry, alone


def _typical(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def kernels_on_ranks() -> dict[str, float]:
    """Seconds of a convolution and of a large addition while all ranks do the same."""
    world = Mesh(data=-1).world
    volume, weight = torch.ones(1, 16, 24, 24, 24), torch.ones(16, 16, 3, 3, 3)
    large = torch.ones(_MEGABYTE)
    calls: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: _convolve(volume, weight),
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


# ---- links and storage ----


def link_on_ranks() -> dict[str, float]:
    """Seconds of an empty message there and back, halved, and bytes a second of a large one; between ranks 0 and 1."""
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


def measure_storage(folder: Path) -> float:
    """Bytes a second of reading a file that is not in memory."""
    size = 256 * _MEGABYTE
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(_MEGABYTE) * (size // _MEGABYTE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(_MEGABYTE):
            pass
        return size / (time.perf_counter() - start)


def describe(
    device: dict[str, Any],
    link: dict[str, float],
    loads: Sequence[dict[str, Any]],
    storage: float,
    nodes: int = 1,
    ranks: int = 1,
) -> dict[str, Any]:
    """A machine file: nodes of ``ranks`` devices each, all joined by one level of links."""
    level = {
        "name": "between processes",
        "kind": "socket",
        "devices": None,
        "gb_per_s": measured(link["gb_per_s"]),
        "latency_us": measured(link["latency_us"]),
        "shared_by": 1,
    }
    return {
        "name": "here",
        "about": f"measured by halocline calibrate with torch {torch.__version__}",
        "nodes": nodes,
        "devices_per_node": ranks,
        "device": device,
        "links": [level],
        "storage": {"name": "the folder that was measured", "gb_per_s_per_node": measured(storage / 1e9)},
        "collectives": "halocline",
        "overlap_loss": measured(link["overlap_loss"]),
        "loads": list(loads),
    }
