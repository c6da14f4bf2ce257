"""Charts as SVG that take their colours from the page, with a tooltip wherever the pointer rests. No scripts.

Coordinates are in units of the drawing, ``WIDTH`` by ``HEIGHT``, with y downwards; a :class:`ChartScale` maps values to
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .run import Array
from .svg import element, path_of, polygon, short, text, tooltip

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 40
POINTS = 600  # of a curve at most
STRIPS = 150  # columns that show a tooltip, at most
Words = Callable[[float], str]


@dataclass(frozen=True)
class ChartScale:
    """Maps values to coordinates along one edge of a chart, linearly or in logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            if not value > 0:
                return math.nan
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return float(self.start + share * (self.end - self.start))

    def ticks(self) -> list[float]:
        """Values at which the edge is labelled."""
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between two values, about as many as ``wanted``.

    >>> ticks(0, 9.3), ticks(0.9, 1.02)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.9, 0.95, 1.0])
    """
    rough = (high - low) / wanted
    if not 1e-200 < rough < 1e200:  # the ends cannot be told apart
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 of each where there are few; every other where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [float(f"{factor * 10.0**power:.6g}") for power in powers for factor in factors]
    inside = [value for value in ticks if low * 0.999 <= value <= high * 1.001]
    return inside[:: max(1, math.ceil(len(inside) / 7))]


def value_scale(values: Array, zero: bool = False, log: bool | None = None) -> ChartScale:
    """The vertical scale of finite values: in logarithms where they span a decade or more, unless told otherwise."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if log is None:
        log = not zero and low > 0 and high / low >= 10
    if log:
        return ChartScale(low / 1.15, high * 1.15, HEIGHT - BOTTOM, TOP, True)
    low = min(0.0, low) if zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return ChartScale(low if zero else low - margin, high + margin, HEIGHT - BOTTOM, TOP)


def step_scale(steps: Array) -> ChartScale:
    """The horizontal scale of a chart over steps."""
    low, high = (float(steps.min()), float(steps.max())) if steps.size else (0.0, 1.0)
    if high == low:
        low, high = low - 1, low + 1
    return ChartScale(low, high, LEFT, WIDTH - RIGHT)


def frame(
    across: ChartScale | None,
    up: ChartScale,
    x_label: str,
    words: Words = short,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Grid, ticks and the label of the horizontal axis; the vertical one is named in the heading.

    Ticks of the horizontal axis are ``marks`` (a coordinate and its text) and the whole numbers of ``across``.
    """
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", text(words(value)), x=LEFT - 7, y=y + 4, class_="tick end"))
    whole = [(across(value), short(value)) for value in across.ticks() if value == int(value)] if across else []
    for x, mark in [*marks, *whole]:
        parts.append(element("text", text(mark), x=x, y=HEIGHT - BOTTOM + 17, class_="tick mid"))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    parts.append(element("text", text(x_label), x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="label mid"))
    return "".join(parts)


def svg(title: str, *parts: str, width: float = WIDTH, height: float = HEIGHT, class_: str = "chart") -> str:
    """A whole chart from its parts."""
    return element("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title, class_=class_)


@dataclass(frozen=True)
class Series:
    """One line of a chart, with its name and colour.

    ``raw``: drawn faintly, since another series is its running mean. ``dots``: drawn as points that have tooltips of
    their own. ``words`` formats values.
    """

    name: str
    steps: Array
    values: Array
    class_: str  # CSS class of its colour
    raw: bool = False  # drawn faintly
    dots: bool = False
    words: Words = field(default=short)


def curve_chart(title: str, series: Sequence[Series], log: bool | None = None, zero: bool = False) -> str:
    """A chart of series over steps. Values that are not finite are crosses at the upper edge."""
    everything = np.concatenate([each.values for each in series])
    across = step_scale(np.concatenate([each.steps for each in series]))
    up = value_scale(everything, zero, log)
    drawn = [_curve(each, across, up) for each in series]
    crosses = [_crosses(each, across) for each in series if each.raw or each.dots]
    strips = _strips(next((each for each in series if not each.dots), series[0]), across, up)
    dots = [_dots(each, across, up) for each in series if each.dots]
    return svg(title, frame(across, up, "step", short), *drawn, *crosses, strips, *dots)


def _curve(series: Series, across: ChartScale, up: ChartScale) -> str:
    """A series as a line, or as a point if only one value is finite."""
    steps, values = thinned(series.steps, series.values)
    points = [(across(float(x)), up(float(y))) for x, y in zip(steps, values, strict=True)]
    if sum(math.isfinite(y) for _, y in points) == 1 and not series.dots:  # no line goes through one point
        x, y = next(point for point in points if math.isfinite(point[1]))
        return element("circle", cx=x, cy=y, r=3, class_=f"dot {series.class_}")
    return element("path", d=path_of(points), class_=f"curve {'faint ' if series.raw else ''}{series.class_}")


def _dots(series: Series, across: ChartScale, up: ChartScale) -> str:
    """The points of a series, each with a tooltip."""
    parts = []
    for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
        if math.isfinite(up(value)):
            told = tooltip(f"step {step:g}: {series.name} {series.words(value)}")
            parts.append(element("circle", told, cx=across(step), cy=up(value), r=3.2, class_=f"dot {series.class_}"))
    return "".join(parts)


def _crosses(series: Series, across: ChartScale) -> str:
    """Marks at steps whose value is not finite."""
    parts = []
    for step in series.steps[~np.isfinite(series.values)][:100].tolist():
        x, y = across(step), TOP + 4
        told = tooltip(f"step {step:g}: {series.name} is not finite")
        d = f"M{x - 4:.1f},{y - 4}l8,8m0,-8l-8,8"
        parts.append(element("path", told, d=d, class_="cross"))
    return "".join(parts)


def _strips(series: Series, across: ChartScale, up: ChartScale) -> str:
    """Invisible columns over the chart; the one under the pointer shows a line, a dot and its values."""
    picked = np.unique(np.linspace(0, len(series.steps) - 1, min(STRIPS, len(series.steps))).round().astype(int))
    width = max(1.0, (WIDTH - LEFT - RIGHT) / max(1, len(picked)))
    strips = []
    for step, value in zip(series.steps[picked].tolist(), series.values[picked].tolist(), strict=True):
        x, y = across(step), up(value)
        area = element("rect", x=x - width / 2, y=TOP, width=width, height=HEIGHT - TOP - BOTTOM, class_="area")
        line = element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="hair")
        dot = element("circle", cx=x, cy=y, r=3, class_="spot") if math.isfinite(y) else ""
        told = tooltip(f"step {step:g}: {series.name} {series.words(value)}")
        strips.append(element("g", told, area, line, dot, class_="strip"))
    return "".join(strips)


def thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """At most ``POINTS`` points: the least and the greatest value of each stretch, so that spikes are kept."""
    if len(steps) <= POINTS:
        return steps, values
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(steps)), POINTS // 2):
        finite = stretch[np.isfinite(values[stretch])]
        ends = {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])} if finite.size else set()
        kept += sorted(ends or {int(stretch[0])})
    return steps[kept], values[kept]


def smoothed(values: Array, window: int) -> Array:
    """The running mean over ``window`` finite values; NaN where there are none."""
    finite = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), kernel, "same")[: len(values)]
    counts = np.convolve(finite.astype(float), kernel, "same")[: len(values)]
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)


def stacked_areas(title: str, steps: Array, layers: Sequence[tuple[str, Array]], top: float, words: Words) -> str:
    """Areas stacked on each other over steps; ``top`` is the upper end of the scale, and cuts off what is higher."""
    across = step_scale(steps)
    up = ChartScale(0.0, top, HEIGHT - BOTTOM, TOP)
    below, parts = np.zeros(len(steps)), []
    for class_, values in layers:
        above = below + values
        edge = [(across(float(x)), up(min(float(y), top))) for x, y in zip(steps, above, strict=True)]
        base = [(across(float(x)), up(min(float(y), top))) for x, y in zip(steps, below, strict=True)]
        parts.append(polygon([*edge, *reversed(base)], f"area-of {class_}"))
        below = above
    total = Series("the step took", steps, np.minimum(below, top), "", words=words)
    return svg(title, *parts, frame(across, up, "step", words), _strips(total, across, up))


def columns(title: str, labels: Sequence[str], values: Array, words: Words, x_label: str) -> str:
    """A bar chart, with values on top where there is room."""
    up = ChartScale(0.0, float(values.max()) * 1.15 or 1.0, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(labels)
    bars = []
    for index, (label, value) in enumerate(zip(labels, values.tolist(), strict=True)):
        middle, width = LEFT + (index + 0.5) * room, min(56.0, 0.72 * room)
        told = tooltip(f"{x_label} {label}: {words(value)}")
        bar = {"x": middle - width / 2, "y": up(value), "width": width, "height": up(0) - up(value)}
        bars.append(element("rect", told, **bar, rx=2, class_="bar memory"))
        if len(labels) <= 6:
            bars.append(element("text", text(words(value)), x=middle, y=up(value) - 5, class_="tick mid"))
        if len(labels) <= 16 or index % math.ceil(len(labels) / 16) == 0:
            bars.append(element("text", text(label), x=middle, y=HEIGHT - BOTTOM + 17, class_="tick mid"))
    return svg(title, frame(None, up, x_label, words), *bars)
