"""A simulated run as a picture: efficiency and waits over devices, or one lever after another."""

from __future__ import annotations

from collections.abc import Sequence

from ...simulate.step import Simulation
from ...simulate.what_if import Stage
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ChartScale, frame
from .picture import GAP, dot, moved, picture
from .plan_picture import EXTRA
from .svg import duration, element, path_of, polygon, text, tooltip

ROW = 30  # of a waterfall
COLOURS = {
    "compute": "#5b7fa6",
    "gradients": "#d1495b",
    "agreement": "#8a5cc0",
    "halo": "#2c8f74",
    "statistics": "#2b8ba3",
    "stragglers": "#c2862d",
    "input": "#6d7f2a",
}
BAND = ".band{fill:#0b6aa8;opacity:.15}.ideal{stroke:#5d6878;stroke-dasharray:4 4}.key{font-size:12px}"


def draw_sweep(title: str, points: Sequence[Simulation], strong: bool) -> str:
    """Efficiency with its band, and the parts of a step, over the number of devices."""
    kind = "Strong" if strong else "Weak"
    machine = points[0].scenario.machine.name
    parts = [
        moved(_efficiency(points), 0, GAP, f"{kind} scaling of {title} on {machine}: efficiency"),
        moved(_parts(points), WIDTH + 20, GAP, "Where a step goes"),
    ]
    return picture(f"Scaling of {title}", parts, 2 * WIDTH + 20, HEIGHT + GAP + 30, EXTRA + BAND)


def _efficiency(points: Sequence[Simulation]) -> str:
    across = _across(points)
    bands = [each.efficiency_band for each in points]
    up = ChartScale(0.0, max(1.05, *(high for _, high in bands)), HEIGHT - BOTTOM, TOP)
    places = [across(each.scenario.devices) for each in points]
    edge = [(x, up(high)) for x, (_, high) in zip(places, bands, strict=True)]
    back = [(x, up(low)) for x, (low, _) in zip(places, bands, strict=True)]
    dots = [
        dot(x, up(each.efficiency), 3.2, "recorded", f"{each.scenario.devices:,} devices: {each.efficiency:.3f}")
        for x, each in zip(places, points, strict=True)
    ]
    line = path_of((x, up(each.efficiency)) for x, each in zip(places, points, strict=True))
    ideal = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(1.0), y2=up(1.0), class_="ideal")
    front = element("path", d=line, class_="front")
    return "".join([_frame(across, up, points), ideal, polygon([*edge, *reversed(back)], "band"), front, *dots])


def _parts(points: Sequence[Simulation]) -> str:
    """A column a size, of computing and each wait, as shares of the step."""
    up = ChartScale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(points)
    drawn = []
    for number, each in enumerate(points):
        left, below = LEFT + (number + 0.14) * room, 0.0
        for cause, seconds in {"compute": each.slowest_class.timeline.compute, **each.exposed}.items():
            share = seconds / each.seconds
            told = tooltip(f"{each.scenario.devices:,} devices: {cause} {duration(seconds)}")
            box = {"x": left, "y": up(below + share), "width": 0.72 * room, "height": up(below) - up(below + share)}
            drawn.append(element("rect", told, **box, fill=COLOURS.get(cause, "#5d6878")))
            below += share
        label = {"x": left + 0.36 * room, "y": HEIGHT - BOTTOM + 17}
        drawn.append(element("text", text(f"{each.scenario.devices:,}"), **label, class_="tick mid"))
    for value in up.ticks():
        drawn.append(element("text", text(f"{value:g}"), x=LEFT - 7, y=up(value) + 4, class_="tick end"))
    causes = dict.fromkeys(["compute", *(cause for each in points for cause in each.exposed)])
    return "".join([*drawn, _legend(list(causes), HEIGHT + 6)])


def _across(points: Sequence[Simulation]) -> ChartScale:
    sizes = [each.scenario.devices for each in points]
    low, high = min(sizes), max(sizes)
    return ChartScale(low / 1.2, max(high, low + 1) * 1.2, LEFT, WIDTH - RIGHT, log=True)


def _frame(across: ChartScale, up: ChartScale, points: Sequence[Simulation]) -> str:
    """Axes with a mark at each number of devices, but for those too near to the one before."""
    marks: list[tuple[float, str]] = []
    for each in points:
        x = across(each.scenario.devices)
        if not marks or x - marks[-1][0] > 44:
            marks.append((x, f"{each.scenario.devices:,}"))
    return frame(None, up, "devices", lambda value: f"{value:g}", marks)


def draw_waterfall(title: str, stages: Sequence[Stage]) -> str:
    """A bar a lever: the efficiency with it and all above; the darker end is what it adds."""
    left, width = 225, 2 * WIDTH + 20
    scale = ChartScale(0.0, 1.0, left, width - 90)
    parts, before = [], 0.0
    for number, each in enumerate(stages):
        y, now = 8 + number * ROW, each.found.efficiency
        told = tooltip(f"{each.name}: {now:.3f}, a step of {duration(each.found.seconds)}")
        kept = max(0.0, min(before, now))
        parts.append(element("text", text(each.name), x=left - 8, y=y + 16, class_="tick end"))
        old = {"x": scale(0), "y": y, "width": scale(kept) - scale(0), "height": ROW - 8}
        parts.append(element("rect", told, **old, fill="#b9c9da"))
        new = {"x": scale(kept), "y": y, "width": scale(now) - scale(kept), "height": ROW - 8}
        parts.append(element("rect", told, **new, fill="#0b6aa8"))
        gain = f"{now:.3f}" + (f" ({now - before:+.3f})" if number else "")
        parts.append(element("text", text(gain), x=scale(max(now, 0)) + 6, y=y + 16, class_="tick"))
        before = now
    run = stages[0].found.scenario
    heading = f"{title} on {run.devices:,} devices of {run.machine.name}: efficiency, one lever after another"
    return picture(heading, [moved("".join(parts), 0, GAP, heading)], width, len(stages) * ROW + GAP + 20, EXTRA + BAND)


def _legend(names: Sequence[str], y: float) -> str:
    parts, x = [], float(LEFT)
    for name in names:
        parts.append(element("rect", x=x, y=y, width=11, height=11, fill=COLOURS.get(name, "#5d6878")))
        parts.append(element("text", text(name), x=x + 15, y=y + 10, class_="tick"))
        x += 28 + 6.4 * len(name)
    return "".join(parts)
