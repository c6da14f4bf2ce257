"""A plan as one picture: time against memory, time against devices, and the memory of a rank over a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...plan.candidate import Candidate
from ...plan.front import FrontPoint, pareto
from ...plan.machine import Machine
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ChartScale, thinned
from .picture import GAP, axes, dot, edge_scale, moved, picture
from .svg import duration, element, path_of, polygon, text, tooltip

GIB = float(1 << 30)  # memory is drawn in these
EXTRA = """
.limit{stroke:#c0203a;stroke-width:1.5;stroke-dasharray:5 4}.limit-label{font-size:11.5px;fill:#c0203a!important}
.front{fill:none;stroke:#0b6aa8;stroke-width:1.5}
.recorded{fill:#0b6aa8}.estimated{fill:none;stroke:#5d6878;stroke-width:1.3}.taken{fill:#d1495b}
.memory-area{fill:#5b7fa6;opacity:.55}
"""


def draw_plan(
    title: str,
    machine: Machine,
    best: Candidate,
    candidates: Sequence[Candidate],
    points: Sequence[FrontPoint],
    memory: Sequence[int],
) -> str:
    """An SVG file of its own. ``points`` are estimates; ``memory`` is bytes after each operation."""
    room = machine.device.memory_gb.value * 1e9 / GIB
    parts = [
        moved(_against_memory(best, candidates, points, room), 0, GAP, "Time for a sample against memory of a device"),
        moved(_against_devices(best, points), WIDTH + 20, GAP, "Time for a sample against devices (estimates)"),
        moved(_over_step(memory, room), 0, HEIGHT + 2 * GAP, f"Memory of a rank over a step: {best}"),
        moved(_legend(title, machine, best), WIDTH + 20, HEIGHT + 2 * GAP, ""),
    ]
    return picture(f"Plan of {title}", parts, 2 * WIDTH + 20, 2 * (HEIGHT + GAP), EXTRA)


def _against_memory(best: Candidate, candidates: Sequence[Candidate], points: Sequence[FrontPoint], room: float) -> str:
    here = [each for each in points if each.devices == best.arrangement.ranks]
    recorded = [(each.recorded.memory / GIB, each.seconds_per_sample, each is best, str(each)) for each in candidates]
    sizes = [*(each.memory / GIB for each in here), *(each[0] for each in recorded)]
    times = [*(each.seconds for each in here), *(each[1] for each in recorded)]
    across, up = edge_scale(sizes, LEFT, WIDTH - RIGHT), edge_scale(times, HEIGHT - BOTTOM, TOP)
    drawn = [axes(across, up, size_words, duration, "memory of a device")]
    line = pareto([(memory, seconds) for memory, seconds, *_ in recorded] + [(e.memory / GIB, e.seconds) for e in here])
    drawn.append(element("path", d=path_of((across(x), up(y)) for x, y in line), class_="front"))
    if across.low <= room <= across.high:
        x = across(room)
        drawn.append(element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="limit"))
        drawn.append(element("text", "limit", x=x - 4, y=TOP + 10, class_="limit-label end"))
    for each in here:
        drawn.append(
            dot(across(each.memory / GIB), up(each.seconds), 3.2, "estimated", f"{each.arrangement} (estimated)")
        )
    for memory, seconds, taken, name in recorded:
        told = f"{name}: {duration(seconds)} a sample, {size_words(memory)}"
        drawn.append(dot(across(memory), up(seconds), 4.6, "taken" if taken else "recorded", told))
    return "".join(drawn)


def _against_devices(best: Candidate, points: Sequence[FrontPoint]) -> str:
    fitting = [each for each in points if each.fits]
    if not fitting:
        return ""
    counts = sorted({each.devices for each in fitting})
    front = [min((e for e in fitting if e.devices == count), key=lambda e: e.seconds) for count in counts]
    across = edge_scale([float(count) for count in counts], LEFT, WIDTH - RIGHT)
    up = edge_scale([each.seconds for each in fitting], HEIGHT - BOTTOM, TOP)
    labels = ChartScale(across.low, across.high, across.start, across.end, True)
    drawn = [axes(labels, up, lambda value: f"{value:g}", duration, "devices", [float(count) for count in counts])]
    drawn.append(element("path", d=path_of((across(e.devices), up(e.seconds)) for e in front), class_="front"))
    for each in fitting:
        told = f"{each.arrangement}: {duration(each.seconds)} a sample, {size_words(each.memory / GIB)}"
        drawn.append(dot(across(each.devices), up(each.seconds), 3.2, "estimated", told))
    drawn.append(dot(across(best.arrangement.ranks), up(best.seconds_per_sample), 4.6, "taken", str(best)))
    return "".join(drawn)


def _over_step(memory: Sequence[int], room: float) -> str:
    values = np.asarray(memory, float) / GIB
    steps, values = thinned(np.arange(len(values), dtype=float), values)
    limited = room <= 2.5 * values.max()
    across = ChartScale(0, max(1.0, float(steps[-1])), LEFT, WIDTH - RIGHT)
    up = ChartScale(0, 1.08 * (max(room, values.max()) if limited else values.max()), HEIGHT - BOTTOM, TOP)
    edge = [(across(x), up(y)) for x, y in zip(steps.tolist(), values.tolist(), strict=True)]
    area = polygon([(across(0), up(0)), *edge, (edge[-1][0], up(0))], "memory-area", tooltip("bytes alive"))
    drawn = [axes(across, up, lambda value: f"{value:g}", size_words, "operations of forward, backward, optimizer")]
    if limited:
        drawn.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(room), y2=up(room), class_="limit"))
        drawn.append(element("text", "limit", x=WIDTH - RIGHT, y=up(room) - 4, class_="limit-label end"))
    return "".join([*drawn, area])


def _legend(title: str, machine: Machine, best: Candidate) -> str:
    low, high = duration(best.low_seconds), duration(best.high_seconds)
    lines = [
        ("taken", f"taken: {best}"),
        ("recorded", "recorded and replayed"),
        ("estimated", "estimated from the uncut step"),
        ("", f"{title} on {best.arrangement.ranks:,} devices of {machine.name}"),
        ("", f"a step of {best.samples:,} samples: {duration(best.seconds)} ({low} to {high})"),
        ("", f"bound by {best.binds}; {size_words(best.recorded.memory / GIB)} a device"),
    ]
    drawn = []
    for number, (class_, words) in enumerate(lines):
        y = TOP + 20 + 24 * number
        drawn.append(dot(LEFT - 38, y - 4, 4.6, class_, words) if class_ else "")
        drawn.append(element("text", text(words), x=LEFT - 26 if class_ else LEFT - 44, y=y, class_="label"))
    return "".join(drawn)


def size_words(value: float) -> str:
    """Of a number of GiB."""
    return f"{value:.3g} GiB"
