"""A game of physics-informed GANs on one page: fields, where they are wrong, and covariance over distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...workloads.pigan.evaluate import FieldMoments
from .charts import ChartScale, svg, ticks
from .images import BOTH_SIDES, image, limits, ramped
from .svg import document, element, path_of, short, text

Array = np.ndarray[Any, Any]
EDGE, PAD = 280.0, 46.0


def pigan_page(title: str, truth: FieldMoments, found: FieldMoments, errors: Mapping[str, float], points: int) -> str:
    """The report as HTML. ``points`` of the grid along each dim."""
    rows = [
        element("tr", element("th", text(name)), element("td", text(short(value)))) for name, value in errors.items()
    ]
    parts = [element("h1", text(title)), element("table", *rows)]
    for name, words in (("u_mean", "mean of u"), ("u_std", "deviation of u"), ("k_std", "deviation of log K")):
        true, mine = getattr(truth, name), getattr(found, name)
        shown = _lines(words, true, mine) if true.size == points else _maps(words, true, mine, points)
        parts.append(element("section", element("h2", text(words)), shown))
    over = _chart("covariance of log K over distance", truth.lags, [truth.covariance, found.covariance])
    parts.append(element("section", element("h2", "covariance over distance"), over))
    return document(title, element("main", *parts))


def _lines(words: str, true: Array, mine: Array) -> str:
    """Both over the interval, and their difference."""
    place = np.linspace(0, 1, len(true))
    charts = _chart(words, place, [true, mine]), _chart("difference", place, [mine - true])
    return element("div", *charts, class_="small")


def _maps(words: str, true: Array, mine: Array, points: int) -> str:
    """Both over the square on one colour scale, and their difference."""
    low, high = limits(true, mine)
    most = max(abs(end) for end in limits(mine - true)) or 1.0
    pictures = {
        "Monte Carlo": ramped(true.reshape(points, points), low, high),
        "generated": ramped(mine.reshape(points, points), low, high),
        "difference": ramped((mine - true).reshape(points, points), -most, most, BOTH_SIDES),
    }
    figures = [
        element("figure", image(picture, f"{words}: {name}"), element("figcaption", text(name)))
        for name, picture in pictures.items()
    ]
    return element("div", *figures, class_="panels")


def _chart(words: str, across: Array, curves: Sequence[Array]) -> str:
    """Curves over one axis: Monte Carlo first, then generated."""
    both = np.concatenate(curves)
    margin = 0.06 * float(both.max() - both.min()) or 0.5
    x = ChartScale(float(across.min()), float(across.max()), PAD, EDGE - 8)
    y = ChartScale(float(both.min()) - margin, float(both.max()) + margin, EDGE - PAD, 8)
    parts = [element("rect", x=PAD, y=8, width=EDGE - 8 - PAD, height=EDGE - PAD - 8, class_="frame")]
    for value in ticks(x.low, x.high, 3):
        parts.append(element("text", text(short(value)), x=x(value), y=EDGE - PAD + 15, class_="tick mid"))
    for value in ticks(y.low, y.high, 3):
        parts.append(element("text", text(short(value)), x=PAD - 5, y=y(value) + 4, class_="tick end"))
    for curve, class_ in zip(curves, ("curve validation", "curve loss"), strict=False):
        points = [(x(float(a)), y(float(b))) for a, b in zip(across, curve, strict=True)]
        parts.append(element("path", d=path_of(points), class_=class_))
    drawing = svg(words, *parts, width=EDGE, height=EDGE, class_="chart")
    return element("figure", element("figcaption", text(words)), drawing)
