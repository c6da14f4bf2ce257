"""Times of a network's own operations at its own local shapes, measured on the device at hand.

A step is run on meta tensors; every operation that differs in name, dtype, shapes or work is then run on real tensors
of these shapes. Needs torch and numpy alone.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import schema_of
from ..program.record import OperationWatch
from ..program.work import size_of
from ..tree import map_leaves
from ..world import this_world
from ..world.events import Computed
from .cost import Key, key_of

LEAST = 0.02  # seconds that an operation is timed for, at least
REPEATS = 5
MMAP_THRESHOLD = -3  # the C library's number of this setting
STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class OperationCall(NamedTuple):
    """One operation with its arguments on meta tensors, and the event that a record has of it."""

    event: Computed
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Catalogue(OperationWatch):
    """Collects one call of every kind of operation that runs inside."""

    def __init__(self) -> None:
        super().__init__(this_world(), self._keep)
        self.calls: dict[Key, OperationCall] = {}

    def _keep(self, event: Computed, function: Any, args: Any, kwargs: Any) -> None:
        """The first call of each kind counts."""
        self.calls.setdefault(key_of(event), OperationCall(event, function, args, dict(kwargs)))


def measure(calls: Mapping[Key, OperationCall], known: dict[Key, float], device: torch.device) -> None:
    """Add to ``known`` the seconds of each call that it lacks: the median of a few timings."""
    for key, call in calls.items():
        if key not in known:
            known[key] = time_call(call.function, call.args, call.kwargs, device)


def time_call(function: Any, args: Any, kwargs: Any, device: torch.device) -> float:
    """Seconds of one call: the median of a few timings, after one that is not counted."""
    real_args, real_kwargs = materialized(args, device), materialized(kwargs, device)
    with torch.no_grad():
        function(*real_args, **real_kwargs)
        once = _timed(function, real_args, real_kwargs, device, 1)
        repeat = max(1, int(LEAST / max(once, 1e-7) / REPEATS))
        repeats = REPEATS if once < LEAST else 3
        return statistics.median(_timed(function, real_args, real_kwargs, device, repeat) for _ in range(repeats))


def _timed(function: Any, args: Any, kwargs: Any, device: torch.device, repeat: int) -> float:
    """Seconds of a call, the mean of ``repeat`` in a row; a GPU is waited for once at the end."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeat):
        function(*args, **kwargs)
    _synchronize(device)
    return (time.perf_counter() - start) / repeat


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def workspace_of(call: OperationCall, device: torch.device) -> int:
    """Bytes that one call takes at its peak beside its operands and results; 0 where the system does not tell.

    On a CPU it wants :func:`return_memory_at_once`.
    """
    if device.type != "cuda" and not PEAK_RESET.exists():
        return 0
    args, kwargs = materialized(call.args, device), materialized(call.kwargs, device)
    with torch.no_grad():
        call.function(*args, **kwargs)  # the first finds its kernels
        _start_peak(device)
        before = memory_in_use(device)
        result = call.function(*args, **kwargs)
        own = 0 if _writes_in_place(call) else size_of(result)
        return max(0, memory_peak(device) - before - own)


def _writes_in_place(call: OperationCall) -> bool:
    """Does the operation write into its operands? Then its results take no new memory."""
    return any(result.alias_info is not None for result in schema_of(call.function).returns)


def _start_peak(device: torch.device) -> None:
    """From here on the peak of memory is counted anew, by the driver or by the kernel."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        return_free_memory()
        PEAK_RESET.write_text("5")  # the kernel's word for: the peak begins here


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device, or of this process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _process_memory("VmRSS")


def memory_peak(device: torch.device) -> int:
    """The most bytes in use since the peak was last reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _process_memory("VmHWM")


def return_memory_at_once() -> None:
    """From here on, tensors that are let go of are no longer memory of this process; asking for memory takes longer.

    The C library keeps freed memory for later. What it keeps follows from the order of calls, not from what is needed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, 1 << 16)


def return_free_memory() -> None:
    """Return unused memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _process_memory(label: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(label))
    return int(line.split()[1]) * 1024


def materialized(value: Any, device: torch.device) -> Any:
    """The same arguments with real tensors in the places of those without values."""
    leaves = (Tensor, torch.device)
    return map_leaves(leaves, lambda leaf: _real(leaf, device) if isinstance(leaf, Tensor) else device, value)


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    """Of the same shape, dtype and strides. Integers are zeros, so that they are legal indices."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(extent, dtype=tensor.dtype, device=device)
    if memory.is_floating_point():
        memory.uniform_(0.1, 1.0)
    return memory.as_strided(tensor.shape, tensor.stride())


def spread_over_kinds(calls: Iterable[OperationCall], most: Mapping[bool, int], kind_of: Any) -> list[OperationCall]:
    """At most so many calls of each kind, in turns, so that a measurement that is cut short has some of every kind.

    ``most`` is by whether the kind multiplies: convolutions and products have more to tell.
    """
    by_kind: dict[object, list[OperationCall]] = {}
    for call in calls:
        kind = kind_of(call.event)
        kept = by_kind.setdefault(kind, [])
        if len(kept) < most[len(kind) > 2]:
            kept.append(call)
    turns = max(map(len, by_kind.values()), default=0)
    return [kept[turn] for turn in range(turns) for kept in by_kind.values() if turn < len(kept)]
