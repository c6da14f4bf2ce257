"""Measures the tensor memory that a piece of code takes, from the allocator's own events, temporaries included.

On CPU each event in the trace of torch's profiler carries the allocator's running total; this module reads that total.
Events come from the calling thread and from the threads that torch runs for it (autograd). Memory that other threads
take or free shows in the total at the next event; a gloo thread, for example, is often the last to release a tensor
that it has sent.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from halocline.errors import HaloclineError

from .place import environment

PROBE = 12_347  # bytes of the allocations that mark start and end, and prove that all is being counted
FREED = "halocline: freed bytes "
CPU = 0  # the device type in the trace
SETTLE = 0.01  # seconds for torch's own threads to free what they have just finished with


@dataclass(frozen=True)
class PeakMemory:
    """Bytes above those live at the start: the most at any moment, and those left, the returned value included.

    `end` is below 0 when the code freed more than it left behind; `peak` is never below 0.
    """

    peak: int
    end: int


def peak_bytes(function: Callable[[], object], device: torch.device | str = "cpu") -> PeakMemory:
    """Run `function()` and say what tensor memory it took, on top of what was live before.

    >>> peak_bytes(lambda: torch.zeros(1000).exp())  # zeros and exp are live together; exp is returned
    PeakMemory(peak=8000, end=4000)

    Other threads should be idle meanwhile, as their allocations count too.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _peak_on_cuda(function, device)
    if device.type != "cpu":
        raise HaloclineError(f"peak_bytes on {device}: only cpu and cuda report what they allocate; use one of these")
    count_every_thread()
    return _levels(_trace(function))


def _peak_on_cuda(function: Callable[[], object], device: torch.device) -> PeakMemory:
    """From the counters of torch's caching allocator."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    kept = function()
    peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del kept
    return PeakMemory(peak - start, end - start)


_from_before: list[weakref.ref[torch.UntypedStorage]] = []


def count_every_thread() -> None:
    """From now on the allocator adds up all threads' blocks; by itself it does so for profiled threads only.

    torch has no public name for this switch. It stays on: blocks taken while it is off would be freed uncounted.
    Those there are now are watched from Python instead, which can see all but what only C++ has ever held.
    """
    try:
        library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
        switch = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    except (StopIteration, OSError, ValueError) as error:
        raise _cannot_count() from error
    if not switch.value:
        _from_before.extend(_watch(storage) for storage in _live_storages())
        switch.value = True


def _live_storages() -> list[torch.UntypedStorage]:
    """Blocks of the CPU allocator that Python can see, each once.

    Subclasses are left out: a tile has its plain tensor beside it, and others keep theirs inside.
    """
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    plain = [one for one in tensors if one.device.type == "cpu" and one.layout is torch.strided]
    storages = {storage.data_ptr(): storage for storage in map(_storage_of, plain) if storage is not None}
    return [storage for storage in storages.values() if storage.resizable()]  # not a view of numpy's memory, say


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's memory; None where it has none."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # what vmap and its kin leave behind has none
        return None


def _watch(storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
    """Put a mark in the trace at the moment the block goes."""
    return weakref.ref(storage, partial(_mark_freed, storage.nbytes()))


def _mark_freed(size: int, _: object) -> None:
    with record_function(f"{FREED}{size}"):
        pass


def _trace(function: Callable[[], object]) -> list[dict[str, Any]]:
    """The profiler's events of one run, in the order of time."""
    gc.collect()  # or garbage from before could be collected, and counted as freed, inside
    with (
        _quiet_profiler(),
        profile(use_device=None, profile_memory=True) as profiler,  # torch.profiler's loads the compiler: 1.5 s
    ):
        _probe_from_another_thread()
        kept = function()
        time.sleep(SETTLE)
        torch.empty(PROBE, dtype=torch.uint8)
    del kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


def _probe_from_another_thread() -> None:
    """Taken there, given back here: the free is reported only if the other thread's blocks are counted."""
    held: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: held.append(torch.empty(PROBE, dtype=torch.uint8)))
    thread.start()
    thread.join()
    held.clear()


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Else the profiler writes lines to stderr at each start and stop. It reads the variable once, at its first use."""
    level = os.environ.get("KINETO_LOG_LEVEL") or "99"  # 99 is above every level it has
    with environment({"KINETO_LOG_LEVEL": level}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")  # one cycle is all there is
        yield


def _levels(events: list[dict[str, Any]]) -> PeakMemory:
    """Peak and end of the allocator's total, between the free of the first probe and the taking of the last."""
    levels, sizes, freed = [], [], 0
    for event in events:
        if event["name"].startswith(FREED):
            freed += int(event["name"].removeprefix(FREED))
        elif event["name"] == "[memory]" and event["args"]["Device Type"] == CPU:
            levels.append(event["args"]["Total Allocated"] - freed)
            sizes.append(event["args"]["Bytes"])
    if -PROBE not in sizes or sizes[-2:] != [PROBE, -PROBE]:
        raise _cannot_count()
    first = sizes.index(-PROBE)
    start, end = levels[first], levels[-1]
    return PeakMemory(max(start, end, *levels[first:-2]) - start, end - start)


def _cannot_count() -> HaloclineError:
    """The error where torch's allocator does not report what is needed."""
    return HaloclineError(
        f"peak_bytes with torch {torch.__version__}: a known allocation was not reported, so no figure would be right; "
        "is another profiler running, or is this a build of torch that counts in another way?"
    )
