"""Measure the machine at hand and describe it in the form of a machine file. Needs torch and numpy alone."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..world import Label, Mesh, Receive, Send, World
from .measure import time_call

DTYPES = ("float64", "float32", "bfloat16")
LABEL = Label("calibration", "halocline calibrate")
_MEGABYTE = 1 << 20


def measured(value: float) -> dict[str, Any]:
    return {"value": float(f"{value:.4g}"), "source": "measured"}


def measure_device(device: torch.device, tell: Callable[[str], None]) -> dict[str, Any]:
    """The ``device`` part of a machine file.

    Peaks are those of a matrix product, so that an efficiency of 1 means as fast as that.
    """
    tell("matrix products")
    peaks = {name: _peak(getattr(torch, name), device) for name in DTYPES}
    tell("memory")
    large = torch.empty(64 * _MEGABYTE, dtype=torch.float32, device=device)
    bandwidth = 2 * large.nbytes / _seconds(torch.ops.aten.copy_.default, (large, large.clone()), device)
    launch = _seconds(torch.ops.aten.add.Tensor, (torch.ones(8, device=device), 1.0), device)
    tell("convolutions of growing size")
    efficiency, half = _curve(device, peaks["float32"])
    return {
        "name": _device_name(device),
        "memory_gb": measured(_memory(device) / 1e9),
        "memory_gb_per_s": measured(bandwidth / 1e9),
        "peak_tflops": {name: measured(peak / 1e12) for name, peak in peaks.items()},
        "efficiency": measured(efficiency),
        "half_work_gflop": measured(half / 1e9),
        "memory_efficiency": measured(1.0),  # the bandwidth above is what a copy reaches
        "launch_us": measured(max(launch * 1e6, 0.01)),
    }


def _seconds(function: Any, args: tuple[Any, ...], device: torch.device) -> float:
    return time_call(function, args, {}, device)


def _peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best of a few matrix products."""
    sizes = (512, 1024) if device.type == "cpu" else (4096, 8192)
    rates = []
    for size in sizes:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        rates.append(2 * size**3 / _seconds(torch.ops.aten.mm.default, (matrix, matrix), device))
    return max(rates)


def _curve(device: torch.device, peak: float) -> tuple[float, float]:
    """``efficiency`` and ``half_work`` of time = (work + half_work) / (peak * efficiency): a line through the times."""
    sides = (8, 12, 16, 24, 32, 40) if device.type == "cpu" else (16, 32, 48, 64, 96, 128)
    works, times = [], []
    for side in sides:
        volume = torch.ones(1, 16, side, side, side, device=device)
        weight = torch.ones(16, 16, 3, 3, 3, device=device)
        works.append(2.0 * 16 * 16 * 27 * side**3)
        times.append(_seconds(_convolve, (volume, weight), device))
    slope, intercept = statistics.linear_regression(works, times)
    efficiency = min(1.0, max(1e-3, 1 / (slope * peak)))
    return efficiency, max(1e3, intercept / slope)


def _convolve(volume: Tensor, weight: Tensor) -> Tensor:
    return F.conv3d(volume, weight, padding=1)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} thread(s) a rank"


def _memory(device: torch.device) -> float:
    """Bytes of the device; of a CPU, an even share of the machine's for each core."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (os.cpu_count() or 1)


def measure_link() -> dict[str, float]:
    """On each of two ranks: seconds of an empty message there and back, halved, and bytes a second of a large one."""
    world = Mesh(pair=2).world
    small, large = torch.zeros(1), torch.zeros(8 * _MEGABYTE)
    latency = statistics.median(_swap_seconds(world, small) for _ in range(200))
    rate = large.nbytes / statistics.median(_swap_seconds(world, large) for _ in range(7))
    return {"latency_us": latency * 1e6, "gb_per_s": rate / 1e9}


def _swap_seconds(world: World, value: Tensor) -> float:
    """Both ranks send and receive at once."""
    start = time.perf_counter()
    peer = 1 - world.rank
    world.begin([Send(peer, value)], [Receive(peer, value.numel())], value, (0, 1), LABEL).wait()
    return time.perf_counter() - start


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


def describe(device: dict[str, Any], link: dict[str, float], storage: float, ranks: int) -> dict[str, Any]:
    """A machine file of one node."""
    level = {
        "name": "between processes of this machine",
        "kind": "socket",
        "devices": None,
        "gb_per_s": measured(link["gb_per_s"]),
        "latency_us": measured(link["latency_us"]),
        "shared_by": 1,
    }
    return {
        "name": "here",
        "about": f"measured by halocline calibrate with torch {torch.__version__}",
        "nodes": 1,
        "devices_per_node": ranks,
        "device": device,
        "links": [level],
        "storage": {"name": "the folder that was measured", "gb_per_s_per_node": measured(storage / 1e9)},
        "collectives": "halocline",
    }
