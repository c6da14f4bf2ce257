"""A sweep on one page: its trials as lines through their settings, a table, and the speed-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..sweeps.runner import TrialRecord
from ..sweeps.spec import SweepSpec
from .charts import ChartScale, svg, ticks
from .svg import document, element, path_of, short, text, tooltip

WIDTH, HEIGHT, EDGE = 900.0, 320.0, 60.0


def sweep_page(spec: SweepSpec, records: Sequence[TrialRecord], speedups: Mapping[str, float], mix: str = "") -> str:
    """The report of a sweep as HTML. ``mix``: how the planner shared the ranks, in words."""
    done = [record for record in records if record.value is not None]
    parts = [element("h1", text(f"Sweep of {spec.target}")), element("p", text(summary(spec, records)))]
    if speedups:
        words = "; ".join(f"{name}: {value:.2f} times" for name, value in speedups.items())
        parts.append(element("p", text(f"Speed-up over one trial after another on one rank: {words}.")))
    if mix:
        parts.append(element("p", text(f"{mix[0].upper()}{mix[1:]}.")))
    if done:
        parts.append(element("h2", "Settings and result of each trial") + parallel_coordinates(spec, done))
    parts.append(element("h2", "Trials") + _table(spec, records))
    return document(f"Sweep of {spec.target}", element("main", *parts))


def summary(spec: SweepSpec, records: Sequence[TrialRecord]) -> str:
    """How many trials ended how, and the best of them."""
    counts = {state: sum(record.state == state for record in records) for state in ("complete", "pruned", "failed")}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    found = best(spec, records)
    if found is None:
        return f"{told}; none has a {spec.metric}"
    values = ", ".join(f"{key} = {_shown(value)}" for key, value in found.values.items())
    return f"{told}; best: trial {found.number}, {spec.metric} {short(found.value or 0.0)} with {values}"


def best(spec: SweepSpec, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial with the best value."""
    sign = 1 if spec.direction == "minimize" else -1
    return min((r for r in records if r.value is not None), key=lambda r: sign * (r.value or 0.0), default=None)


def parallel_coordinates(spec: SweepSpec, records: Sequence[TrialRecord]) -> str:
    """One axis for each setting and one for the result; each trial is a line, the best one stands out."""
    axes = [*spec.space, spec.metric]
    places = [EDGE + (WIDTH - 2 * EDGE) * at / max(1, len(axes) - 1) for at in range(len(axes))]
    scales = [_Axis(axis, spec.space.get(axis, {}), records, spec.metric) for axis in axes]
    found = best(spec, records)
    parts = [axis.drawn(place) for axis, place in zip(scales, places, strict=True)]
    for record in sorted(records, key=lambda each: each is found):
        points = [(place, axis.height(record)) for axis, place in zip(scales, places, strict=True)]
        told = tooltip(f"trial {record.number}: {spec.metric} {short(record.value or 0.0)}")
        class_ = "curve validation" if record is found else "curve faint loss"
        parts.append(element("path", told, d=path_of(points), class_=class_))
    return svg("trials", *parts, width=WIDTH, height=HEIGHT, class_="chart")


class _Axis:
    """One axis: numbers from below, on a logarithmic scale if they were drawn so, or choices one above the other."""

    def __init__(self, name: str, told: Mapping[str, Any], records: Sequence[TrialRecord], metric: str) -> None:
        self.name, self._metric, self._log = name, metric, bool(told.get("log"))
        self._choices = [str(choice) for choice in told.get("choices", [])]
        numbers = [self._number(record) for record in records]
        low, high = min(numbers), max(numbers)
        margin = 0.05 * (high - low) or 0.5
        self._scale = ChartScale(low - margin, high + margin, HEIGHT - 40, 30)

    def _number(self, record: TrialRecord) -> float:
        value = record.value if self.name == self._metric else record.values[self.name]
        if self._choices:
            return float(self._choices.index(str(value)))
        return math.log10(float(value or 0.0)) if self._log else float(value or 0.0)

    def height(self, record: TrialRecord) -> float:
        """Where a trial's line crosses the axis."""
        return self._scale(self._number(record))

    def drawn(self, x: float) -> str:
        """The axis with its name and ticks."""
        parts = [element("line", x1=x, x2=x, y1=30, y2=HEIGHT - 40, class_="diagonal")]
        parts.append(element("text", text(self.name), x=x, y=HEIGHT - 14, class_="label mid"))
        marks = list(enumerate(self._choices)) if self._choices else []
        for value in ticks(self._scale.low, self._scale.high, 4) if not marks else ():
            shown = short(10**value if self._log else value)
            parts.append(element("text", text(shown), x=x - 6, y=self._scale(value) + 4, class_="tick end"))
        for value, choice in marks:
            parts.append(element("text", text(choice), x=x - 6, y=self._scale(float(value)) + 4, class_="tick end"))
        return "".join(parts)


def _shown(value: Any) -> str:
    return short(value) if isinstance(value, float) else str(value)


def _table(spec: SweepSpec, records: Sequence[TrialRecord]) -> str:
    heads = ["trial", "state", *spec.space, spec.metric, "seconds", "ranks"]
    rows = [element("tr", *(element("th", text(head)) for head in heads))]
    for record in records:
        value = "" if record.value is None else short(record.value)
        cells = [record.number, record.state, *(_shown(record.values.get(key, "")) for key in spec.space), value]
        cells += [f"{record.seconds:.1f}", record.ranks]
        rows.append(element("tr", *(element("td", text(cell)) for cell in cells)))
    return element("table", *rows)
