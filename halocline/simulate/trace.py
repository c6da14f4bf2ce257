"""A simulated step as a Chrome trace: one process a class of ranks, one row a stream. Perfetto shows it."""

from __future__ import annotations

import json
from typing import Any

from .step import Simulation

STREAMS = ("compute", "waiting", "agreement", "halo", "statistics", "gradients")


def chrome_trace(found: Simulation) -> str:
    """JSON. Simulate with ``trace=True``."""
    events: list[dict[str, Any]] = []
    for number, each in enumerate(found.classes):
        name = f"{each.name}: {each.count:,} ranks, such as {each.rank:,}"
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
        for row, stream in enumerate(STREAMS):
            events.append({"ph": "M", "pid": number, "tid": row, "name": "thread_name", "args": {"name": stream}})
        for span in each.spans:
            times = {"ts": round(span.starts * 1e6, 3), "dur": round((span.ends - span.starts) * 1e6, 3)}
            where = {"pid": number, "tid": STREAMS.index(span.stream), "cat": span.stream}
            events.append({"ph": "X", "name": span.name, **where, **times, "args": {"place": span.place}})
        late = {"ts": round(each.timeline.seconds * 1e6, 3), "dur": round(found.delays.mean * 1e6, 3)}
        if late["dur"] > 0:
            row = STREAMS.index("waiting")
            events.append({"ph": "X", "name": "the slowest rank", "pid": number, "tid": row, "cat": "waiting", **late})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
