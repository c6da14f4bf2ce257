"""A few steps of a run as a trace for https://ui.perfetto.dev: what each thread and GPU stream of each rank did, when.

Each rank writes a file of its own; :func:`merge` joins them on one clock, a process row a rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .._torch_private import profile_every_thread
from ..world import Event, Waited, World

TRACE, FOLDER = "trace.json", "trace"
STEPS = range(2, 5)  # the first steps warm up
_NOTHING = nullcontext()
_WAITS = {"moves": "halo wait", "control": "sum wait", "gradients": "gradient wait"}
_STREAMS = 1 << 30  # thread numbers of GPU streams begin here, above those of the system
_THREADS = {"autograd::engine": (1, "autograd"), "gloo:": (4, "transport")}  # torch's own, by what they do
Entry = dict[str, Any]  # of a trace, as https://perfetto.dev reads it
T = TypeVar("T")


class Tracer:
    """One rank's. ``steps`` count from the first that is made, so that a run which is gone on with is traced too.

    Outside them it does nothing; ``range(0)`` switches it off.
    """

    def __init__(self, folder: Path, rank: int, steps: range = STEPS, world: World | None = None) -> None:
        self._path, self._rank, self._steps, self._world = rank_file(folder, rank), rank, steps, world
        self._first: int | None = None
        self._profile: profile | None = None
        self._names: dict[int, str] = {}
        self._waits: list[tuple[int, Waited]] = []  # with the thread that waited
        self._steps_began: dict[str, float] = {}

    def step(self, number: int) -> AbstractContextManager[object]:
        """Round one step. The first of those wanted starts the trace, the last ends and writes it."""
        if not self._steps:
            return _NOTHING
        if self._first is None:
            self._first = number
        made = number - self._first
        return self._traced(number, made == self._steps[-1]) if made in self._steps else _NOTHING

    def span(self, name: str) -> AbstractContextManager[object]:
        """A stretch of time with a name, in whatever thread it is."""
        return record_function(name) if self._profile is not None else _NOTHING

    def waits(self, items: Iterable[T], name: str = "data wait") -> Iterator[T]:
        """The items, with a span where the next is waited for."""
        stream = iter(items)
        while True:
            with self.span(name):
                try:
                    item = next(stream)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def _traced(self, number: int, last: bool) -> Iterator[None]:
        if self._profile is None:
            self._begin()
        self._steps_began[step_name(number)] = time.perf_counter()
        with record_function(step_name(number)):
            yield
        self._names |= {thread.native_id or 0: thread.name for thread in threading.enumerate()}
        if last:
            self.close()

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=kinds, experimental_config=profile_every_thread())
        self._profile.start()
        if self._world is not None:
            self._world.events.add(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Waited):
            self._waits.append((threading.get_native_id(), event))

    def close(self) -> None:
        """Write what was traced so far, if anything; tracing is over."""
        done, self._profile, self._steps = self._profile, None, range(0)
        if done is None:
            return
        if self._world is not None:
            self._world.events.remove(self._hear)
        done.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(self._path))
        told = json.loads(self._path.read_text())
        told["traceEvents"] += spans_of(self._waits, told["traceEvents"], self._steps_began)
        _replace(self._path, as_rank(told, self._rank, os.getpid(), self._names))


def spans_of(waits: list[tuple[int, Waited]], entries: list[Entry], steps_began: dict[str, float]) -> list[Entry]:
    """Waits as spans in the rows of their threads, on the profiler's clock.

    ``steps_began`` says when the spans of steps, which are among the entries, began by ``time.perf_counter``.
    """
    steps = [entry for entry in entries if entry.get("ph") == "X" and entry["name"] in steps_began]
    if not steps:
        return []
    # Each span begins a little after its time was taken: the least difference is the nearest to that of the clocks.
    offset = min(step["ts"] - 1e6 * steps_began[step["name"]] for step in steps)
    same = {"ph": "X", "cat": "user_annotation", "pid": os.getpid()}
    return [
        {**same, "tid": thread, "ts": 1e6 * wait.time + offset, "dur": 1e6 * wait.seconds, "name": _wait_name(wait)}
        for thread, wait in waits
    ]


def _wait_name(wait: Waited) -> str:
    kind = wait.label.channel.partition(" ")[0]  # each engine of gradients has a channel with a number
    return f"{_WAITS.get(kind, kind)}: {wait.label}"


def step_name(number: int) -> str:
    """How the trace names a step."""
    return f"step {number}"


def rank_file(folder: Path, rank: int) -> Path:
    """The trace file of one rank."""
    return folder / FOLDER / f"rank-{rank}.json"


def _replace(path: Path, told: Entry) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(told))
    beside.replace(path)


# -- a rank's rows


def as_rank(told: Entry, rank: int, process: int, names: dict[int, str]) -> Entry:
    """What the profiler wrote, with the rank as process, and rows with names that explain."""
    events = [_placed(event, rank, process) for event in told["traceEvents"] if _is_wanted(event)]
    first = {event["tid"]: str(event["name"]) for event in reversed(events)}
    named = {row: _row_name(row, names.get(row, ""), work) for row, work in first.items()}
    base = int(told.get("baseTimeNanoseconds", 0))
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": [*_metadata(rank, named), *events]}


def _is_wanted(event: Entry) -> bool:
    """Rows of the profiler's own have words for numbers; what rows are called is told anew."""
    numbers = isinstance(event.get("pid"), int) and isinstance(event.get("tid"), int)
    return numbers and event.get("ph") != "M" and "ts" in event


def _placed(event: Entry, rank: int, process: int) -> Entry:
    on_gpu = event["pid"] != process  # the profiler gives a card's number there, and a stream's as thread
    row = _STREAMS + 1000 * event["pid"] + event["tid"] if on_gpu else event["tid"]
    moved = {**event, "pid": rank, "tid": row}
    if isinstance(moved.get("id"), int):  # arrows from forward to backward: numbers are a rank's own
        moved["id"] += rank << 32
    return moved


def _row_name(row: int, thread: str, work: str) -> tuple[int, str]:
    """Where a row stands and what it is called, by the name that Python gave the thread, or by what it does first."""
    if row >= _STREAMS:
        card, stream = divmod(row - _STREAMS, 1000)
        return 10 + row - _STREAMS, f"GPU {card} stream {stream}"
    if thread == "MainThread":
        return 0, "main"
    if "prefetcher" in thread:
        return 2, "prefetcher"
    if thread and not thread.startswith("Dummy"):  # so Python calls threads that torch started
        return 3, thread
    known = (kind for start, kind in _THREADS.items() if work.startswith(start))
    return next(known, (3, f"thread {row}"))


def _metadata(rank: int, rows: dict[int, tuple[int, str]]) -> Iterator[Entry]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for row, (place, name) in sorted(rows.items()):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": row, "args": {"sort_index": place}}


# -- all ranks


def merge(folder: Path, ranks: int | None = None) -> Path | None:
    """Join what the ranks wrote into ``trace.json``, from 0 on; None where there is nothing. By one rank, last.

    ``ranks``: how many there are, where the folder may hold files of an earlier run with more.
    """
    paths = [path for number, path in _rank_files(folder) if ranks is None or number < ranks]
    if not paths:
        return None
    told = _joined([json.loads(path.read_text()) for path in paths])
    _replace(folder / TRACE, told)
    return folder / TRACE


def _rank_files(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.stem.partition("-")[2]), path) for path in (folder / FOLDER).glob("rank-*.json"))


def _joined(ranks: list[Entry]) -> Entry:
    """All on the clock of the first."""
    base = ranks[0]["baseTimeNanoseconds"]
    for told in ranks:
        _shift(told, (told["baseTimeNanoseconds"] - base) / 1e3)
    shifts = [_skew(ranks[0], told) for told in ranks]
    for told, shift in zip(ranks, shifts, strict=True):
        _shift(told, shift)
    first = min((event["ts"] for told in ranks for event in told["traceEvents"] if "ts" in event), default=0.0)
    for told in ranks:
        _shift(told, -first)
    events = [event for told in ranks for event in told["traceEvents"]]
    return {"displayTimeUnit": "ms", "otherData": {"clocks_moved_by_us": shifts}, "traceEvents": events}


def _shift(told: Entry, micros: float) -> None:
    for event in told["traceEvents"] if micros else ():
        if "ts" in event:
            event["ts"] += micros


def _skew(one: Entry, other: Entry) -> float:
    """How far the other rank's clock is off, in microseconds; 0 where nothing tells.

    Ranks end a step together, when gradients are averaged. Clocks of one machine agree far better than that tells, so
    only a difference of half a step and more is taken for one of clocks.
    """
    ours, theirs = _steps_of(one), _steps_of(other)
    common = [name for name in ours if name in theirs]
    if not common:
        return 0.0
    mine, its = ours[common[0]], theirs[common[0]]
    off = (mine["ts"] + mine["dur"]) - (its["ts"] + its["dur"])
    return float(off) if abs(off) > 0.5 * mine["dur"] else 0.0


def _steps_of(told: Entry) -> dict[str, Entry]:
    spans = (event for event in told["traceEvents"] if event.get("ph") == "X" and event.get("cat") == "user_annotation")
    return {event["name"]: event for event in spans if event["name"].startswith("step ")}
