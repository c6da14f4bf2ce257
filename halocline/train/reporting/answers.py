"""The network's predictions beside the truth: numbers, classes, or slices of validation samples, as HTML.

What a run wrote (``Examples``) decides the form: few numbers per sample become scatter charts or a confusion table,
maps become rows of pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...workloads.metrics import RocCurve
from .charts import ChartScale, svg, ticks
from .images import (
    BOTH_SIDES,
    RAMP,
    WRONG,
    Picture,
    class_code,
    grey,
    image,
    limits,
    overlaid,
    painted,
    ramped,
    thin,
)
from .run import Array
from .svg import element, path_of, short, text, tooltip

EDGE, PAD = 230.0, 38.0  # of a small square chart: its edge, and the margin for labels
NUMBERS = 12  # charts of numbers at most
DOTS = 400  # points of a chart at most
FEW = 40  # classes at most
EARLIER = 3  # earlier predictions that are shown


def answers(
    arrays: dict[str, Array], progress: Mapping[int, Array] | None = None, class_names: Sequence[str] = ()
) -> str | None:
    """HTML of the examples, or None for arrays that no form fits; ``progress`` are earlier predictions by step."""
    if not all(name in arrays and arrays[name].size and arrays[name].ndim for name in ("y", "p")):
        return None
    y, p = arrays["y"], arrays["p"]
    if p.ndim <= 2:
        return _numbers(y, p)
    kept = {name: array for name, array in arrays.items() if name in ("x", "y", "p")}
    planes = {name: array[:, 0] if array.ndim == 4 else array for name, array in kept.items()}  # of the first channel
    if any(plane.ndim != 3 for plane in planes.values()) or planes["y"].shape != planes["p"].shape:
        return None
    fits = "x" not in planes or planes["x"].shape == planes["y"].shape
    if not fits or not _whole(planes["y"], planes["p"]):
        return _fields(planes)
    return _classes(planes, class_names) + _learning(planes, progress or {})


def _whole(*arrays: Array) -> bool:
    """Are all values class numbers: whole, and less than 1000?"""
    return all(bool((array == np.round(array)).all()) for array in arrays) and max(a.max() for a in arrays) < 1000


# -- a few numbers a sample


def _numbers(y: Array, p: Array) -> str | None:
    """Scatter charts of a few numbers per sample, or a confusion table of classes."""
    if y.shape == p.shape or y.size == p.size:
        y, p = y.reshape(len(p), -1), p.reshape(len(p), -1)
        if np.array_equal(np.unique(y), [0, 1]):
            return roc(y, p)
        charts = [scatter(y[:, index], p[:, index], index) for index in range(min(NUMBERS, y.shape[1]))]
        more = f" The first {NUMBERS} of {y.shape[1]} numbers." if y.shape[1] > NUMBERS else ""
        words = f"{len(y)} validation samples: predicted against true; on the line the two are equal.{more}"
        return element("p", text(words)) + element("div", *charts, class_="small")
    if y.size == len(p) and _whole(y):
        return confusion(y.reshape(-1).astype(int), p.argmax(1))
    return None


def correlation(y: Array, p: Array) -> float:
    """Pearson's correlation of truth and prediction."""
    good = np.isfinite(y) & np.isfinite(p)
    y, p = y[good], p[good]
    if len(y) < 2 or y.std() == 0 or p.std() == 0:
        return math.nan
    return float(np.corrcoef(y, p)[0, 1])


def scatter(y: Array, p: Array, index: int) -> str:
    """A chart of predictions over truth, for one output."""
    both = np.concatenate([y, p])
    finite = both[np.isfinite(both)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.5
    across = ChartScale(low - margin, high + margin, PAD, EDGE - 8)
    up = ChartScale(low - margin, high + margin, EDGE - PAD, 8)
    ends = {"x1": across(across.low), "y1": up(up.low), "x2": across(across.high), "y2": up(up.high)}
    parts = [_square(across, up, ("true", "predicted")), element("line", **ends, class_="diagonal")]
    picked = np.unique(np.linspace(0, len(y) - 1, min(DOTS, len(y))).astype(int)).tolist()
    for true, predicted in ((float(y[i]), float(p[i])) for i in picked if math.isfinite(y[i] + p[i])):
        told = tooltip(f"true {short(true)}, predicted {short(predicted)}")
        parts.append(element("circle", told, cx=across(true), cy=up(predicted), r=2.6, class_="point"))
    r = correlation(y, p)
    words = f"number {index + 1}" + (f": correlation {r:.3f}" if math.isfinite(r) else "")
    drawing = svg(words, *parts, width=EDGE, height=EDGE, class_="chart")
    return element("figure", element("figcaption", text(words)), drawing)


def _square(across: ChartScale, up: ChartScale, labels: tuple[str, str]) -> str:
    """Frame, ticks and labels of a square chart."""
    parts = [element("rect", x=PAD, y=8, width=EDGE - 8 - PAD, height=EDGE - PAD - 8, class_="frame")]
    for value in ticks(across.low, across.high, 3):
        parts.append(element("text", text(short(value)), x=across(value), y=EDGE - PAD + 15, class_="tick mid"))
        parts.append(element("text", text(short(value)), x=PAD - 5, y=up(value) + 4, class_="tick end"))
    parts.append(element("text", labels[0], x=(PAD + EDGE - 8) / 2, y=EDGE - 6, class_="label mid"))
    turned = f"translate(10 {(EDGE - PAD) / 2:.0f}) rotate(-90)"
    parts.append(element("text", labels[1], transform=turned, class_="label mid"))
    return "".join(parts)


def roc(y: Array, p: Array) -> str:
    """True over false alarms for every threshold; several numbers of a sample count by their largest."""
    meter = RocCurve()
    meter.add(torch.from_numpy(p.max(1)), torch.from_numpy(y.max(1)))
    false, true = (part.tolist() for part in meter.curve())
    across, up = ChartScale(0, 1, PAD, EDGE - 8), ChartScale(0, 1, EDGE - PAD, 8)
    ends = {"x1": across(0), "y1": up(0), "x2": across(1), "y2": up(1)}
    points = [(across(x), up(y)) for x, y in zip(false, true, strict=True)]
    curve = element("path", d=path_of(points), class_="curve validation")
    parts = [_square(across, up, ("false alarms", "true alarms")), element("line", **ends, class_="diagonal"), curve]
    words = f"ROC curve: area {meter.result()['auc']:.4f}"
    drawing = svg(words, *parts, width=EDGE, height=EDGE, class_="chart")
    told = f"{len(y)} validation samples: the share of true over that of false alarms, for every threshold."
    figure = element("figure", element("figcaption", text(words)), drawing)
    return element("p", text(told)) + element("div", figure, class_="small")


def confusion(y: Array, p: Array) -> str | None:
    """A table of counts, rows by true and columns by predicted class; None for too many classes."""
    count = int(max(y.max(), p.max())) + 1
    if count > FEW or y.min() < 0:
        return None
    table = np.zeros((count, count), int)
    np.add.at(table, (y.astype(int), p.astype(int)), 1)
    side = min(34.0, 340.0 / count)
    cells = [_cell(table, row, column, side) for row in range(count) for column in range(count)]
    names = [element("text", text(n), x=28, y=(n + 0.65) * side, class_="tick end") for n in range(count)]
    names += [
        element("text", text(n), x=34 + (n + 0.5) * side, y=count * side + 16, class_="tick mid") for n in range(count)
    ]
    drawing = svg("true and predicted classes", *cells, *names, width=40 + count * side, height=count * side + 24)
    words = f"{len(y)} validation samples: rows are the true class, columns the predicted; {np.trace(table)} are right."
    return element("p", text(words)) + element("div", drawing, class_="small")


def _cell(table: Array, row: int, column: int, side: float) -> str:
    """One count as a square whose opacity is its share of the largest."""
    share = table[row, column] / max(1, table.max())
    told = tooltip(f"true {row}, predicted {column}: {table[row, column]}")
    place = {"x": 34 + column * side, "y": row * side, "width": side - 1, "height": side - 1}
    return element("rect", told, **place, fill_opacity=0.06 + 0.9 * float(share), class_="cell")


# -- slices


def _classes(planes: dict[str, Array], names: Sequence[str]) -> str:
    """Rows of pictures: input, true and predicted classes laid over it, and where they differ."""
    rows = []
    for number in range(len(planes["y"])):
        y, p = planes["y"][number], planes["p"][number]
        under = planes["x"][number] if "x" in planes else np.zeros_like(y)
        base = grey(thin(under))
        wrong = thin(((y != p) & (y >= 0)).astype(np.float64)) > 0
        panels = {
            "input": base,
            "true": overlaid(base, thin(y)),
            "predicted": overlaid(base, thin(p)),
            f"wrong: {_wrong(y, p):.2g} %": painted(base, wrong, WRONG, 0.9),
        }
        rows.append(_row(panels, f"sample {number + 1}"))
    grey_one = names[0] if names else "class 0"
    words = f"Slices of validation samples, with the classes laid over; {grey_one} is left grey."
    numbers = np.unique(np.concatenate([planes["y"].ravel(), planes["p"].ravel()])).astype(int).tolist()
    shown = [number for number in numbers if number > 0]
    codes = [(names[one] if one < len(names) else f"class {one}", class_code(one)) for one in shown]
    codes.append(("wrong", WRONG))
    swatches = [element("span", element("i", style=f"background:{code}"), text(name)) for name, code in codes]
    return element("p", text(words)) + element("p", *swatches, class_="legend") + "".join(rows)


def _learning(planes: dict[str, Array], progress: Mapping[int, Array]) -> str:
    """Rows of pictures: what was predicted after some of the earlier validations, and at the end."""
    truth = planes["y"]
    earlier = {step: p[:, 0] if p.ndim == 4 else p for step, p in sorted(progress.items())}
    fitting = [(step, p) for step, p in earlier.items() if p.shape == truth.shape and _whole(p)]
    if not fitting:
        return ""
    picked = np.unique(np.linspace(0, len(fitting) - 1, min(EARLIER, len(fitting))).astype(int)).tolist()
    shown = [(f"after step {fitting[i][0]}", fitting[i][1]) for i in picked] + [("at the end", planes["p"])]
    rows = []
    for number in range(min(2, len(truth))):
        base = grey(thin(planes["x"][number] if "x" in planes else np.zeros_like(truth[number])))
        panels = {f"{words}: {_wrong(truth[number], p[number]):.2g} % wrong": overlaid(base, thin(p[number]))
                  for words, p in shown}  # fmt: skip
        rows.append(_row(panels, f"sample {number + 1}"))
    return element("h3", "How predictions improve") + "".join(rows)


def _wrong(y: Array, p: Array) -> float:
    """Per cent of the pixels of known class that are wrong; negative numbers mark pixels without a known class."""
    known = y >= 0
    return float(100 * (known & (y != p)).sum() / max(1, known.sum()))


def _row(panels: dict[str, Picture], sample: str) -> str:
    """Pictures of one sample side by side, each with its caption."""
    figures = [
        element("figure", image(picture, f"{sample}: {words}"), element("figcaption", text(words)))
        for words, picture in panels.items()
    ]
    return element("div", *figures, class_="panels")


def _fields(planes: dict[str, Array]) -> str:
    """Rows of pictures of values: input, true and predicted on one colour scale, and their difference."""
    low, high = limits(planes["y"], planes["p"])
    difference = planes["p"] - planes["y"]
    most = max(abs(end) for end in limits(difference)) or 1.0
    rows = []
    for number in range(len(planes["y"])):
        panels = {"input": grey(thin(planes["x"][number]))} if "x" in planes else {}
        panels["true"] = ramped(thin(planes["y"][number]), low, high)
        panels["predicted"] = ramped(thin(planes["p"][number]), low, high)
        finite = difference[number][np.isfinite(difference[number])]
        off = float(np.sqrt((finite**2).mean())) if finite.size else math.nan
        panels[f"difference: rms {short(off)}"] = ramped(thin(difference[number]), -most, most, BOTH_SIDES)
        rows.append(_row(panels, f"sample {number + 1}"))
    words = "Slices of validation samples. True and predicted have one colour scale; the difference has its own."
    bars = _scale_bar("true, predicted", RAMP, low, high) + _scale_bar("difference", BOTH_SIDES, -most, most)
    return element("p", text(words)) + element("p", bars, class_="legend") + "".join(rows)


def _scale_bar(words: str, ramp: tuple[str, ...], low: float, high: float) -> str:
    """A legend of a colour scale with its ends."""
    colours = element("b", style=f"background:linear-gradient(to right,{','.join(ramp)})")
    return element("span", text(f"{words} {short(low)}"), colours, text(short(high)))
