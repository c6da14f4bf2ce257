"""A few steps of a run as a trace for https://ui.perfetto.dev: what each thread and GPU stream of each rank did.

Each rank writes a file of its own; :func:`merge` joins them on one clock, with a process for each rank.
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
from .log import write_whole

TRACE, FOLDER = "trace.json", "trace"
STEPS = range(2, 5)  # the first steps warm up
_NOTHING = nullcontext()
_WAITS = {"moves": "halo wait", "control": "sum wait", "gradients": "gradient wait"}
_STREAMS = 1 << 30  # thread numbers of GPU streams begin here, above those of the system
_THREADS = {"autograd::engine": (1, "autograd"), "gloo:": (4, "transport")}  # torch's own, by what they do
Entry = dict[str, Any]  # of a trace, as https://perfetto.dev reads it
T = TypeVar("T")


class Tracer:
    """Traces some steps of one rank with torch's profiler and the world's events.

    ``steps`` count from the first step of this process, so that a resumed run is traced too; ``range(0)`` switches
    tracing off. Outside these steps it does nothing.
    """

    def __init__(self, folder: Path, rank: int, steps: range = STEPS, world: World | None = None) -> None:
        self._path, self._rank, self._steps, self._world = rank_file(folder, rank), rank, steps, world
        self._first: int | None = None
        self._profile: profile | None = None
        self._names: dict[int, str] = {}
        self._waits: list[tuple[int, Waited]] = []  # with the thread that waited
        self._steps_began: dict[str, float] = {}

    def step(self, number: int) -> AbstractContextManager[object]:
        """A context around one step. The first traced step starts the profiler, the last one writes the file."""
        if not self._steps:
            return _NOTHING
        if self._first is None:
            self._first = number
        made = number - self._first
        return self._traced(number, made == self._steps[-1]) if made in self._steps else _NOTHING

    def span(self, name: str) -> AbstractContextManager[object]:
        """A context that shows as a span with this name, in the row of the thread that enters it."""
        return record_function(name) if self._profile is not None else _NOTHING

    def waits(self, items: Iterable[T]) -> Iterator[T]:
        """The items, with a span around the wait for each."""
        stream = iter(items)
        while True:
            with self.span("data wait"):
                try:
                    item = next(stream)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def _traced(self, number: int, last: bool) -> Iterator[None]:
        """One traced step, as a span with its name."""
        if self._profile is None:
            self._begin()
        self._steps_began[step_name(number)] = time.perf_counter()
        with record_function(step_name(number)):
            yield
        self._names |= {thread.native_id or 0: thread.name for thread in threading.enumerate()}
        # After a fork Python 3.11 still gives the main thread's number in the parent.
        self._names[threading.get_native_id()] = threading.current_thread().name
        if last:
            self.close()

    def _begin(self) -> None:
        """Start the profiler, and listen to the world's events."""
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=kinds, experimental_config=profile_every_thread())
        self._profile.start()
        if self._world is not None:
            self._world.events.add(self._hear)

    def _hear(self, event: Event) -> None:
        """Note a wait and the thread that waited. Called in that thread."""
        if isinstance(event, Waited):
            self._waits.append((threading.get_native_id(), event))

    def close(self) -> None:
        """End tracing, and write what was traced so far, if anything."""
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
        write_whole(self._path, json.dumps(as_rank(told, self._rank, os.getpid(), self._names)))


def spans_of(waits: list[tuple[int, Waited]], entries: list[Entry], steps_began: dict[str, float]) -> list[Entry]:
    """Spans for the waits, in the rows of their threads and on the profiler's clock.

    ``entries`` include spans of steps; ``steps_began`` says when those began by ``time.perf_counter``.
    """
    steps = [entry for entry in entries if entry.get("ph") == "X" and entry["name"] in steps_began]
    if not steps:
        return []
    # Each span begins a little after its time was taken: the least difference is nearest to that of the clocks.
    offset = min(step["ts"] - 1e6 * steps_began[step["name"]] for step in steps)
    same = {"ph": "X", "cat": "user_annotation", "pid": os.getpid()}
    spans = []
    for thread, wait in waits:
        kind = wait.label.channel.partition(" ")[0]  # channels of gradients have numbers: "gradients 2"
        span = {"tid": thread, "ts": 1e6 * wait.time + offset, "dur": 1e6 * wait.seconds}
        spans.append({**same, **span, "name": f"{_WAITS.get(kind, kind)}: {wait.label}"})
    return spans


def step_name(number: int) -> str:
    """How the trace names a step."""
    return f"step {number}"


def rank_file(folder: Path, rank: int) -> Path:
    """The trace file of one rank."""
    return folder / FOLDER / f"rank-{rank}.json"


# -- a rank's rows


def as_rank(told: Entry, rank: int, process: int, names: dict[int, str]) -> Entry:
    """The profiler's trace, with the rank as process and readable names of rows."""
    # Rows of the profiler itself have words for numbers, and its names of rows ("M") are replaced.
    numbered = [e for e in told["traceEvents"] if isinstance(e.get("pid"), int) and isinstance(e.get("tid"), int)]
    events = [_placed(e, rank, process) for e in numbered if e.get("ph") != "M" and "ts" in e]
    first = {event["tid"]: str(event["name"]) for event in reversed(events)}
    named = {row: _row_name(row, names.get(row, ""), work) for row, work in first.items()}
    base = int(told.get("baseTimeNanoseconds", 0))
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": [*_metadata(rank, named), *events]}


def _placed(event: Entry, rank: int, process: int) -> Entry:
    """An event in the rows of its rank."""
    on_gpu = event["pid"] != process  # then the profiler gives the card as process, and the stream as thread
    row = _STREAMS + 1000 * event["pid"] + event["tid"] if on_gpu else event["tid"]
    moved = {**event, "pid": rank, "tid": row}
    if isinstance(moved.get("id"), int):  # arrows from forward to backward, numbered by each rank for itself
        moved["id"] += rank << 32
    return moved


def _row_name(row: int, thread: str, work: str) -> tuple[int, str]:
    """The place and name of a row, by Python's name of the thread, or by the first work that it does."""
    if row >= _STREAMS:
        card, stream = divmod(row - _STREAMS, 1000)
        return 10 + row - _STREAMS, f"GPU {card} stream {stream}"
    if thread == "MainThread":
        return 0, "main"
    if "prefetcher" in thread:
        return 2, "prefetcher"
    if thread and not thread.startswith("Dummy"):  # Python's name for threads that torch started
        return 3, thread
    known = (kind for start, kind in _THREADS.items() if work.startswith(start))
    return next(known, (3, f"thread {row}"))


def _metadata(rank: int, rows: dict[int, tuple[int, str]]) -> Iterator[Entry]:
    """Entries that name and order the process of a rank and its rows."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for row, (place, name) in sorted(rows.items()):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": row, "args": {"sort_index": place}}


# -- all ranks


def merge(folder: Path, ranks: int | None = None) -> Path | None:
    """Join the ranks' files into ``trace.json``, with time from 0 on; None where there are none. By one rank, last.

    ``ranks``: how many there are, where the folder may hold files of an earlier run with more.
    """
    files = sorted((int(path.stem.partition("-")[2]), path) for path in (folder / FOLDER).glob("rank-*.json"))
    paths = [path for number, path in files if ranks is None or number < ranks]
    if not paths:
        return None
    write_whole(folder / TRACE, json.dumps(_joined([json.loads(path.read_text()) for path in paths])))
    return folder / TRACE


def _joined(ranks: list[Entry]) -> Entry:
    """All ranks' events on the clock of the first."""
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
    """Move all events of a rank in time."""
    for event in told["traceEvents"] if micros else ():
        if "ts" in event:
            event["ts"] += micros


def _skew(one: Entry, other: Entry) -> float:
    """How far the other rank's clock is off, in microseconds; 0 where nothing shows that.

    Ranks end a step together, when gradients are averaged. Clocks of one machine agree far better than that, so only a
    difference of more than half a step counts as one of clocks.
    """
    ours, theirs = _steps_of(one), _steps_of(other)
    common = [name for name in ours if name in theirs]
    if not common:
        return 0.0
    mine, its = ours[common[0]], theirs[common[0]]
    off = (mine["ts"] + mine["dur"]) - (its["ts"] + its["dur"])
    return float(off) if abs(off) > 0.5 * mine["dur"] else 0.0


def _steps_of(told: Entry) -> dict[str, Entry]:
    """The spans of steps, by name."""
    spans = (event for event in told["traceEvents"] if event.get("ph") == "X" and event.get("cat") == "user_annotation")
    return {event["name"]: event for event in spans if event["name"].startswith("step ")}
