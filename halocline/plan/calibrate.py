"""Measure the machine at hand and describe it in the form of a machine file. Needs torch and numpy alone."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..program import dry
from .cost import Key, dtype_name
from .curves import MAPPED, placed
from .measure import (
    Catalogue,
    OperationCall,
    return_memory_at_once,
    spread_over_kinds,
    time_call,
    workspace_of,
)
from .probes import probes
from .recording import record_step

DTYPES = ("float64", "float32", "bfloat16")
MOST = {True: 360, False: 24}  # operations of a kind that are timed: of those that multiply, and of others
PROBES = 240
LARGE = 1 << 18  # bytes of an operation from which on its workspace is measured
_MEGABYTE = 1 << 20

Tell = Callable[[str, float], None]  # what is measured, and the share of it that is done


def measured(value: float) -> dict[str, Any]:
    """A quantity of a machine file."""
    return {"value": float(f"{value:.4g}"), "source": "measured"}


def guessed(value: float) -> dict[str, Any]:
    """A quantity that was measured on something else, with a range of ten times each way."""
    return {**measured(value), "source": "assumed", "low": value / 10, "high": value * 10}


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
    peaks = {name: _peak(getattr(torch, name), device) for name in dict.fromkeys((*DTYPES, *dtypes))}
    tell("memory", 0.0)
    large = torch.empty(64 * _MEGABYTE, dtype=torch.float32, device=device)
    bandwidth = 2 * large.nbytes / time_call(torch.ops.aten.copy_.default, (large, large.clone()), {}, device)
    launch = time_call(torch.ops.aten.add.Tensor, (torch.ones(8, device=device), 1.0), {}, device)
    fresh = _fresh_bandwidth(device)
    efficiency, half = _curve(device, peaks["float32"])
    timed = [each for name in dtypes for each in time_operations(device, name, tell, without, seconds / len(dtypes))]
    return_memory_at_once()  # last, for it changes times
    operations = []
    for number, (call, us) in enumerate(timed):
        tell("memory of operations", number / len(timed))
        operations.append(_row(call, us, device))
    return {
        "name": device_name(device),
        "kind": "gpu" if device.type == "cuda" else "cpu",
        "memory_gb": measured(_memory(device) / 1e9),
        "memory_gb_per_s": measured(bandwidth / 1e9),
        "peak_tflops": {name: measured(peak / 1e12) for name, peak in peaks.items()},
        "efficiency": measured(efficiency),
        "half_work_gflop": measured(half / 1e9),
        "memory_efficiency": measured(1.0),  # the bandwidth above is what a copy reaches
        "launch_us": measured(max(launch * 1e6, 0.01)),
        **({"fresh_gb_per_s": measured(fresh / 1e9)} if device.type == "cpu" else {}),
        "operations": operations,
    }


def time_operations(
    device: torch.device, dtype: str, tell: Tell, without: Collection[Key], seconds: float
) -> list[tuple[OperationCall, float]]:
    """Microseconds of what random networks consist of, in turns over kinds of operations."""
    with dry(0, 1):
        catalogue = Catalogue()
    count = max(16, min(PROBES, int(2 * seconds)))
    for number, (subject, mesh, batch) in enumerate(probes(count, getattr(torch, dtype))):
        record_step(subject, mesh, batch, beside=catalogue, warm=0)
        tell("shapes of operations", (number + 1) / count)
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


def _row(call: OperationCall, us: float, device: torch.device) -> dict[str, Any]:
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


def _fresh_bandwidth(device: torch.device) -> float:
    """Bytes a second of touching a new block for the first time, beyond the time of writing it."""
    block = torch.empty(2 * MAPPED, dtype=torch.uint8, device=device)
    old = time_call(torch.ops.aten.fill_.Scalar, (block, 0), {}, device)
    new = time_call(torch.ops.aten.zeros_like.default, (block,), {}, device)
    return block.nbytes / max(new - old, 1e-6)


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
        times.append(time_call(F.conv3d, (volume, weight), {"padding": 1}, device))
    rate = max(work / seconds for work, seconds in zip(works, times, strict=True))
    return min(1.0, max(1e-3, rate / peak)), max(1e3, times[0] * rate - works[0])


def device_name(device: torch.device) -> str:
    """As a machine file names it."""
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
    """A machine file: nodes of ``ranks`` devices each, all joined by one level of links.

    ``link`` is that between processes; for GPUs, which have links of their own, it is no more than an assumption.
    """
    quantity = guessed if device["kind"] == "gpu" else measured
    level = {
        "name": "between processes",
        "kind": "socket",
        "devices": None,
        "gb_per_s": quantity(link["gb_per_s"]),
        "latency_us": quantity(link["latency_us"]),
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
