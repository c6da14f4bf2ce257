"""Charts in a picture file of its own, for documents and viewers that know no style sheet of the report."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .charts import LEFT, ChartScale, Words, frame
from .style import STYLE
from .svg import element, text, tooltip

GAP = 44  # above each chart, for its heading
_OWN = """
.heading{font-size:14px;font-weight:600}
svg{font-family:system-ui,sans-serif;color:#1c2430}
"""


def picture(title: str, parts: Sequence[str], width: float, height: float, style: str = "") -> str:
    """An SVG file of its own, with the colours of the report and further rules of ``style``."""
    sheet = element("rect", width=width, height=height, fill="#ffffff")
    return element(
        "svg",
        element("style", _plain_colours(STYLE) + style + _OWN),
        sheet,
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def _plain_colours(style: str) -> str:
    """The light colours in place of variables, which few viewers of pictures know; rules for dark screens go."""
    colours = dict(re.findall(r"--(\w+):(#\w+)", style.split("@media")[0]))
    rules = [line for line in style.splitlines() if line.startswith((".tick", ".label", ".mid", ".grid", ".axis"))]
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], "\n".join(rules))


def moved(chart: str, x: float, y: float, heading: str) -> str:
    """A chart at its place in a picture, below its heading."""
    named = element("text", text(heading), x=LEFT - 44, y=-14, class_="heading") if heading else ""
    return element("g", named, chart, transform=f"translate({x:g},{y:g})")


def edge_scale(values: Sequence[float], start: float, end: float) -> ChartScale:
    """A scale with a margin around values: in logarithms where they span a factor of four or more."""
    low, high = min(values), max(values)
    log = low > 0 and high / low >= 4
    if log:
        return ChartScale(low / 1.2, high * 1.2, start, end, True)
    margin = 0.08 * (high - low) or 0.1 * high or 1.0
    return ChartScale(max(0.0, low - margin), high + margin, start, end)


def axes(
    across: ChartScale,
    up: ChartScale,
    x_words: Words,
    y_words: Words,
    label: str,
    marks: Sequence[float] = (),
) -> str:
    """Grid, ticks at ``marks`` or at round numbers, and the label of the horizontal axis."""
    return frame(None, up, label, y_words, [(across(value), x_words(value)) for value in marks or across.ticks()])


def dot(x: float, y: float, radius: float, class_: str, told: str) -> str:
    """A point with a tooltip."""
    return element("circle", tooltip(told), cx=x, cy=y, r=radius, class_=class_)
