"""Efficiency against granularity, a chart for each pattern, in the look of the reports."""

from __future__ import annotations

from collections.abc import Sequence

from ..train.reporting.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ChartScale
from ..train.reporting.picture import GAP, axes, dot, edge_scale, moved, picture
from ..train.reporting.svg import duration, element, path_of, text
from .metg import HALF, Curve

COLOURS = (
    "#0b6aa8", "#0f8a6d", "#5fb2f2", "#4fd1ae", "#d1495b", "#ff7f8f", "#7a55c7", "#2c8f74", "#e0942f", "#8b6b4a",
    "#5d6878",
)  # fmt: skip
_STYLE = ".half{stroke:#c0203a;stroke-width:1.5;stroke-dasharray:5 4}.metg{fill:none;stroke-width:2}" + "".join(
    f".line{n}{{fill:none;stroke:{c};stroke-width:2;stroke-linejoin:round}}.point{n}{{fill:{c}}}"
    for n, c in enumerate(COLOURS)
)
_ROW = 20  # of the legend


def draw_curves(title: str, curves: Sequence[Curve]) -> str:
    """An SVG file: two charts side by side, and a legend with the METG of each runtime."""
    names = list(dict.fromkeys(each.runtime for each in curves))
    patterns = list(dict.fromkeys(each.pattern for each in curves))
    place = {name: number % len(COLOURS) for number, name in enumerate(names)}
    grains = [point.granularity for each in curves for point in each.points]
    across = edge_scale(grains, LEFT, WIDTH - RIGHT)
    high = max(point.efficiency for each in curves for point in each.points)
    up = ChartScale(0.0, max(1.0, high) * 1.05, HEIGHT - BOTTOM, TOP)
    parts = []
    for number, pattern in enumerate(patterns):
        drawn = _chart([each for each in curves if each.pattern == pattern], place, across, up)
        x, y = number % 2 * (WIDTH + 20), GAP + number // 2 * (HEIGHT + GAP)
        parts.append(moved(drawn, x, y, f"{pattern}: efficiency against the granularity of a task"))
    legend = -(-len(patterns) // 2) * (HEIGHT + GAP)
    for number, name in enumerate(names):
        parts.append(_legend_entry(name, place[name], LEFT + number % 4 * 220, legend + 24 + number // 4 * _ROW))
    width = WIDTH if len(patterns) == 1 else 2 * WIDTH + 20
    return picture(title, parts, max(width, 940), legend + 24 + -(-len(names) // 4) * _ROW, _STYLE)


def _chart(curves: Sequence[Curve], place: dict[str, int], across: ChartScale, up: ChartScale) -> str:
    """Curves of one pattern, a larger dot at METG, where each crosses half of the best rate."""
    drawn = [axes(across, up, duration, lambda value: f"{value:.0%}", "granularity: wall time x cores / tasks")]
    y = up(HALF)
    drawn.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="half"))
    for each in curves:
        number = place[each.runtime]
        points = sorted(each.points, key=lambda point: point.iterations)
        line = [(across(point.granularity), up(point.efficiency)) for point in points]
        drawn.append(element("path", d=path_of(line), class_=f"line{number}"))
        for point, (x, height) in zip(points, line, strict=True):
            told = f"{each.runtime}: {duration(point.granularity)} a task, {point.efficiency:.0%}"
            drawn.append(dot(x, height, 2.4, f"point{number}", told))
        if each.metg is not None:
            told = f"{each.runtime}: METG {duration(each.metg)}"
            drawn.append(dot(across(each.metg), y, 4.6, f"point{number}", told))
    return "".join(drawn)


def _legend_entry(name: str, number: int, x: float, y: float) -> str:
    return dot(x, y - 4, 4.6, f"point{number}", name) + element("text", text(name), x=x + 12, y=y, class_="label")
