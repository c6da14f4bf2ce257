"""A step as a trace for https://ui.perfetto.dev (or chrome://tracing): what each rank computed, and sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from halocline.world import Averaged

from .gradients_ranks import StepRecord

MICRO = 1e6
COMPUTING, READY, SENDING = 0, 1, 2  # a rank's lines
LINES = {COMPUTING: "step", READY: "groups become ready", SENDING: "groups on the wire"}
Event = dict[str, Any]


def trace_events(label: str, ranks: Sequence[StepRecord], first: int = 0) -> list[Event]:
    """One process a rank, numbered from ``first`` so that cases do not mix; all begin at 0."""
    return [
        event for rank, told in enumerate(ranks) for event in rank_events(f"{label} rank {rank}", told, first + rank)
    ]


def rank_events(name: str, told: StepRecord, process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for line, words in LINES.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": line, "args": {"name": words}}
    step = told.step
    lengths = {"forward": step.forward, "backward and waiting": step.backward, "optimizer": step.optimizer}
    begins = accumulate(lengths.values(), initial=0.0)
    for (words, seconds), begin in zip(lengths.items(), begins, strict=False):
        place = {"pid": process, "tid": COMPUTING}
        yield {"ph": "X", "name": words, **place, "ts": begin * MICRO, "dur": seconds * MICRO}
    for group in told.groups or []:
        yield from group_events(group, process, step.begun)


def group_events(group: Averaged, process: int, begun: float) -> Iterator[Event]:
    """Times are of this rank's clock."""
    name, facts = f"group {group.bucket}", {"parameters": list(group.parameters), "bytes": group.bytes}
    ready, sent, done = (moment - begun for moment in (group.ready, group.sent, group.time))
    yield {"ph": "i", "s": "t", "name": name, "pid": process, "tid": READY, "ts": ready * MICRO, "args": facts}
    same = {"cat": "wire", "id": group.bucket, "name": name, "pid": process, "tid": SENDING}
    yield {"ph": "b", **same, "ts": sent * MICRO, "args": facts}  # several may be on their way at once
    yield {"ph": "e", **same, "ts": done * MICRO}
