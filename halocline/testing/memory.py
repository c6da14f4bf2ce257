"""Tensor bytes that a piece of code held, from the allocator's own events: temporaries inside operations count too.

On CPU the events come from torch's profiler through the trace it exports, the one public form that has each
block's address. They tell of the calling thread and of threads torch runs for it (autograd), not of threads
the code starts itself: the profiler does not see those.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, dropwhile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from halocline.errors import HaloclineError

PROBE = 12_347  # bytes: an allocation of ours that marks the start, and proves that events are being reported
FREED = "halocline: freed bytes "
CPU = 0  # the device type in the trace


@dataclass(frozen=True)
class PeakMemory:
    """Bytes above those live at the start: the most at any moment, and those left, the returned value included.

    `end` is below 0 when the code freed more than it left behind; `peak` is never below 0.
    """

    peak: int
    end: int


def peak_bytes(function: Callable[[], object], device: torch.device | str = "cpu") -> PeakMemory:
    """Run `function()` and say what tensor memory it took.

    >>> peak_bytes(lambda: torch.zeros(1000).exp())  # zeros and exp are live together; exp is returned
    PeakMemory(peak=8000, end=4000)
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _peak_on_cuda(function, device)
    if device.type != "cpu":
        raise HaloclineError(f"peak_bytes on {device}: only cpu and cuda report what they allocate; use one of these")
    return _running_total(_changes(_trace(function)))


def _peak_on_cuda(function: Callable[[], object], device: torch.device) -> PeakMemory:
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    kept = function()
    peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del kept
    return PeakMemory(peak - start, end - start)


def _trace(function: Callable[[], object]) -> list[dict[str, Any]]:
    """The profiler's events of one run, in the order of time."""
    gc.collect()  # or garbage from before could be collected, and counted as freed, inside
    watches = [_watch(storage) for storage in _live_storages()]
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(PROBE, dtype=torch.uint8)
        kept = function()
    del kept, watches
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Else the profiler writes lines to stderr at each start and stop. It reads the variable once, at its first use."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"  # 99 is above every level it has
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _live_storages() -> Iterable[torch.UntypedStorage]:
    """Blocks of the CPU allocator that Python can see, each once.

    The allocator reports no free of a block that is older than the profile, so these are watched from here.
    Subclasses are left out: a tile has its plain tensor beside it, and others keep theirs inside.
    """
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    plain = [one for one in tensors if one.device.type == "cpu" and one.layout is torch.strided]
    storages = {storage.data_ptr(): storage for storage in (one.untyped_storage() for one in plain)}
    return [storage for storage in storages.values() if storage.resizable()]  # not a view of numpy's memory, say


def _watch(storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
    """Put a mark in the trace at the moment the block goes."""
    return weakref.ref(storage, partial(_mark_freed, storage.nbytes()))


def _mark_freed(size: int, _: object) -> None:
    with record_function(f"{FREED}{size}"):
        pass


def _changes(events: list[dict[str, Any]]) -> Iterator[int]:
    """By how many bytes each event after the probe changed what is live."""
    live: dict[int, int] = {}
    for event in _after_probe(events):
        size, address = _allocated(event), event.get("args", {}).get("Addr")
        if event["name"].startswith(FREED):
            yield -int(event["name"].removeprefix(FREED))
        elif size > 0:
            yield size - live.get(address, 0)  # an address given out twice was freed out of the profiler's sight
            live[address] = size
        elif size < 0:
            yield -live.pop(address, 0)  # not -size: for a block from before, that may be a former tenant's size


def _after_probe(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    rest = dropwhile(lambda event: _allocated(event) != -PROBE, events)
    if next(rest, None) is None:
        raise HaloclineError(
            f"peak_bytes with torch {torch.__version__}: its profiler did not report a known allocation, so no figure "
            "would be right; is another profiler running, or does this torch write its trace in another form?"
        )
    return rest


def _allocated(event: dict[str, Any]) -> int:
    args = event.get("args", {})
    return int(args["Bytes"]) if event["name"] == "[memory]" and args["Device Type"] == CPU else 0


def _running_total(changes: Iterable[int]) -> PeakMemory:
    totals = list(accumulate(changes, initial=0))
    return PeakMemory(max(totals), totals[-1])
