"""A plan as one picture: time against memory, time against devices, and the memory of a rank over a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from ...plan.candidate import Candidate
from ...plan.front import FrontPoint, pareto
from ...plan.machine import Machine
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ChartScale, log_ticks, thinned, ticks
from .style import STYLE
from .svg import duration, element, path_of, polygon, text, tooltip

Words = Callable[[float], str]
GIB = float(1 << 30)  # memory is drawn in these
GAP = 44  # above each chart, for its heading
EXTRA = """
.limit{stroke:#c0203a;stroke-width:1.5;stroke-dasharray:5 4}.limit-label{font-size:11.5px;fill:#c0203a!important}
.front{fill:none;stroke:#0b6aa8;stroke-width:1.5}.heading{font-size:14px;font-weight:600}
.recorded{fill:#0b6aa8}.estimated{fill:none;stroke:#5d6878;stroke-width:1.3}.taken{fill:#d1495b}
.memory-area{fill:#5b7fa6;opacity:.55}
svg{font-family:system-ui,sans-serif;color:#1c2430}
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
        _moved(_against_memory(best, candidates, points, room), 0, GAP, "Time for a sample against memory of a device"),
        _moved(_against_devices(best, points), WIDTH + 20, GAP, "Time for a sample against devices (estimates)"),
        _moved(_over_step(memory, room), 0, HEIGHT + 2 * GAP, f"Memory of a rank over a step: {best}"),
        _moved(_legend(title, machine, best), WIDTH + 20, HEIGHT + 2 * GAP, ""),
    ]
    width, height = 2 * WIDTH + 20, 2 * (HEIGHT + GAP)
    sheet = element("rect", width=width, height=height, fill="#ffffff")
    style = element("style", plain_colours(STYLE) + EXTRA)
    return element(
        "svg",
        style,
        sheet,
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=f"Plan of {title}",
    )


def plain_colours(style: str) -> str:
    """The light colours in place of variables, which few viewers of pictures know; rules for dark screens go."""
    colours = dict(re.findall(r"--(\w+):(#\w+)", style.split("@media")[0]))
    rules = [line for line in style.splitlines() if line.startswith((".tick", ".label", ".mid", ".grid", ".axis"))]
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], "\n".join(rules))


def _moved(chart: str, x: float, y: float, heading: str) -> str:
    named = element("text", text(heading), x=LEFT - 44, y=-14, class_="heading") if heading else ""
    return element("g", named, chart, transform=f"translate({x:g},{y:g})")


def _against_memory(best: Candidate, candidates: Sequence[Candidate], points: Sequence[FrontPoint], room: float) -> str:
    here = [each for each in points if each.devices == best.arrangement.ranks]
    recorded = [(each.recorded.memory / GIB, each.seconds_per_sample, each is best, str(each)) for each in candidates]
    sizes = [*(each.memory / GIB for each in here), *(each[0] for each in recorded)]
    times = [*(each.seconds for each in here), *(each[1] for each in recorded)]
    across, up = _edge(sizes, LEFT, WIDTH - RIGHT), _edge(times, HEIGHT - BOTTOM, TOP)
    drawn = [_axes(across, up, size_words, duration, "memory of a device")]
    line = pareto([(memory, seconds) for memory, seconds, *_ in recorded] + [(e.memory / GIB, e.seconds) for e in here])
    drawn.append(element("path", d=path_of((across(x), up(y)) for x, y in line), class_="front"))
    if across.low <= room <= across.high:
        x = across(room)
        drawn.append(element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="limit"))
        drawn.append(element("text", "limit", x=x - 4, y=TOP + 10, class_="limit-label end"))
    for each in here:
        drawn.append(
            _dot(across(each.memory / GIB), up(each.seconds), 3.2, "estimated", f"{each.arrangement} (estimated)")
        )
    for memory, seconds, taken, name in recorded:
        told = f"{name}: {duration(seconds)} a sample, {size_words(memory)}"
        drawn.append(_dot(across(memory), up(seconds), 4.6, "taken" if taken else "recorded", told))
    return "".join(drawn)


def _against_devices(best: Candidate, points: Sequence[FrontPoint]) -> str:
    fitting = [each for each in points if each.fits]
    if not fitting:
        return ""
    counts = sorted({each.devices for each in fitting})
    front = [min((e for e in fitting if e.devices == count), key=lambda e: e.seconds) for count in counts]
    across = _edge([float(count) for count in counts], LEFT, WIDTH - RIGHT)
    up = _edge([each.seconds for each in fitting], HEIGHT - BOTTOM, TOP)
    labels = ChartScale(across.low, across.high, across.start, across.end, True)
    drawn = [_axes(labels, up, lambda value: f"{value:g}", duration, "devices", [float(count) for count in counts])]
    drawn.append(element("path", d=path_of((across(e.devices), up(e.seconds)) for e in front), class_="front"))
    for each in fitting:
        told = f"{each.arrangement}: {duration(each.seconds)} a sample, {size_words(each.memory / GIB)}"
        drawn.append(_dot(across(each.devices), up(each.seconds), 3.2, "estimated", told))
    drawn.append(_dot(across(best.arrangement.ranks), up(best.seconds_per_sample), 4.6, "taken", str(best)))
    return "".join(drawn)


def _over_step(memory: Sequence[int], room: float) -> str:
    values = np.asarray(memory, float) / GIB
    steps, values = thinned(np.arange(len(values), dtype=float), values)
    limited = room <= 2.5 * values.max()
    across = ChartScale(0, max(1.0, float(steps[-1])), LEFT, WIDTH - RIGHT)
    up = ChartScale(0, 1.08 * (max(room, values.max()) if limited else values.max()), HEIGHT - BOTTOM, TOP)
    edge = [(across(x), up(y)) for x, y in zip(steps.tolist(), values.tolist(), strict=True)]
    area = polygon([(across(0), up(0)), *edge, (edge[-1][0], up(0))], "memory-area", tooltip("bytes alive"))
    drawn = [_axes(across, up, lambda value: f"{value:g}", size_words, "operations of forward, backward, optimizer")]
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
        drawn.append(_dot(LEFT - 38, y - 4, 4.6, class_, words) if class_ else "")
        drawn.append(element("text", text(words), x=LEFT - 26 if class_ else LEFT - 44, y=y, class_="label"))
    return "".join(drawn)


def _edge(values: Sequence[float], start: float, end: float) -> ChartScale:
    low, high = min(values), max(values)
    log = low > 0 and high / low >= 4
    if log:
        return ChartScale(low / 1.2, high * 1.2, start, end, True)
    margin = 0.08 * (high - low) or 0.1 * high or 1.0
    return ChartScale(max(0.0, low - margin), high + margin, start, end)


def _axes(
    across: ChartScale,
    up: ChartScale,
    x_words: Words,
    y_words: Words,
    label: str,
    marks: Sequence[float] = (),
) -> str:
    parts = []
    for value in log_ticks(up.low, up.high) if up.log else ticks(up.low, up.high):
        y = up(value)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", text(y_words(value)), x=LEFT - 7, y=y + 4, class_="tick end"))
    for value in marks or across.ticks():
        words = text(x_words(value))
        parts.append(element("text", words, x=across(value), y=HEIGHT - BOTTOM + 17, class_="tick mid"))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    parts.append(element("text", text(label), x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="label mid"))
    return "".join(parts)


def _dot(x: float, y: float, radius: float, class_: str, told: str) -> str:
    return element("circle", tooltip(told), cx=x, cy=y, r=radius, class_=class_)


def size_words(value: float) -> str:
    """Of a number of GiB."""
    return f"{value:.3g} GiB"
