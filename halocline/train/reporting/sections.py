"""The sections of a report. A section that cannot be shown gives the reason in its place.

Each section is a function from a recorded run to a :class:`Section` or a :class:`Missing`; ``_MAKERS`` at the end is
their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from ...choices import Choices
from ...sizes import size_text
from ..trace import TRACE
from .answers import answers
from .charts import POINTS, Series, columns, curve_chart, smoothed, stacked_areas
from .mesh import mesh_figures
from .run import Array, Entry, RecordedRun, column, is_number
from .svg import duration, element, short, text

#: Parts of a step's time, from below; computing is what the waits leave.
PARTS = {
    "compute": "computing",
    "halo": "waiting for halos and sums",
    "gradients": "waiting for gradients",
    "data": "waiting for data",
}
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


@dataclass(frozen=True)
class Section:
    """A section of the page, as HTML."""

    name: str  # in links and JSON
    title: str
    body: str


@dataclass(frozen=True)
class Missing:
    """A section that cannot be shown, and why."""

    name: str
    why: str


Part = Section | Missing


def parts_of(run: RecordedRun) -> list[Part]:
    """All parts of the page, in order. Of a run without a plan, none is missed."""
    return [make(run) for make in _MAKERS if make is not plan or run.plan is not None]


def _card(heading: str, *content: str, class_: str = "card") -> str:
    """A titled box."""
    return element("article", element("h3", text(heading)), *content, class_=class_)


def _grid(*cards: str, class_: str = "cards") -> str:
    """Boxes side by side, as many as the screen's width allows."""
    return element("div", *cards, class_=class_)


def _note(words: str) -> str:
    return element("p", text(words), class_="note")


# -- loss and validation


def loss(run: RecordedRun) -> Part:
    """The loss by step."""
    if not run.steps:
        return Missing("loss", run.troubles.get("log", "the log has no steps"))
    steps, values = run.column("step"), run.column("loss")
    drawn = smooth_series("loss", steps, values, "loss")
    told = [entry for entry in run.validations if is_number(entry.get("loss"))]
    if told:
        drawn.append(Series("validation loss", column(told, "step"), column(told, "loss"), "validation", dots=True))
    keys = [("loss", "each step")] + [("loss strong", "smoothed")] * (len(drawn) > 1 and drawn[0].raw)
    keys += [("validation", "validation")] * bool(told)
    cards = [_card("Loss", curve_chart("loss over steps", drawn), _keys(keys), _not_finite(steps, values))]
    rates = run.column("lr")
    if np.isfinite(rates).sum() > 1:
        chart = curve_chart("learning rate", [Series("learning rate", steps, rates, "rate")], log=False, zero=True)
        cards.append(_card("Learning rate", chart))
    return Section("loss", "Training", _grid(*cards))


def smooth_series(name: str, steps: Array, values: Array, class_: str) -> list[Series]:
    """A series with its running mean over it; where there are few values, the values alone."""
    if len(steps) < 20:
        return [Series(name, steps, values, class_, dots=True)]
    window = max(3, len(steps) // 25)
    mean = smoothed(values, window)
    return [Series(name, steps, values, class_, raw=True), Series(f"smoothed {name}", steps, mean, class_)]


def _not_finite(steps: Array, values: Array) -> str:
    """A warning about steps whose loss is not finite; "" if there are none."""
    bad = steps[~np.isfinite(values)]
    first = ", ".join(f"{step:g}" for step in bad[:5]) + (" ..." if bad.size > 5 else "")
    words = f"{bad.size} of {len(steps)} steps have a loss that is not finite: {first}"
    return element("p", text(words), class_="bad") if bad.size else ""


def _keys(entries: list[tuple[str, str]]) -> str:
    """A legend: a swatch and a name for each class of colours."""
    swatches = [element("span", element("i", class_=f"key {class_}"), text(words)) for class_, words in entries]
    return element("p", *swatches, class_="legend")


def validation(run: RecordedRun) -> Part:
    """The metrics by step, the last ones by class, and which samples were held out.

    With one validation a table says all; with several, each metric has a chart and the table is folded.
    """
    entries = run.validations
    if not entries:
        data = run.settings.get("data")
        kept = data.get("validation") if isinstance(data, dict) else None
        why = "no samples were kept for it (data.validation = 0)" if kept == 0 else "the run ended before it"
        return Missing("validation", f"the log has none: {why}")
    known = [name for name in entries[-1] if name not in ("kind", "time", "step") and is_number(entries[-1][name])]
    names = [name for name in known if "/" not in name]
    held_out = _note(run.split) if run.split else ""
    by_class = held_out + _class_table(entries[-1], [name for name in known if "/" in name])
    rows = [[f"{entry['step']}", *_cells(entry, *names)] for entry in entries]
    table = _table([[_words(name) for name in ["step", *names]], *rows])
    charts = []
    for name in (each for each in names if each != "loss"):
        series = Series(_words(name), column(entries, "step"), column(entries, name), "validation", dots=True)
        last = f"{_words(name)}: {short(float(series.values[-1]))}"
        charts.append(_card(last, curve_chart(_words(name), [series], log=False)))
    if len(entries) == 1:
        intro = _note(f"Once, at step {entries[0]['step']}. Set validate_every to see how it comes about.")
        body = intro + table + by_class
    elif charts:
        body = _grid(*charts, class_="cards three") + by_class + _folded("All validations", table)
    else:
        body = _note("Its loss is drawn above.") + table + by_class
    return Section("validation", "Validation", body)


def _class_table(entry: Entry, names: list[str]) -> str:
    """Metrics by class, such as ``dice/liver``: a row for each class, from the last validation."""
    if not names:
        return ""
    metrics = list(dict.fromkeys(name.partition("/")[0] for name in names))
    classes = list(dict.fromkeys(name.partition("/")[2] for name in names))
    rows = [[each, *_cells(entry, *(f"{name}/{each}" for name in metrics))] for each in classes]
    title = element("h3", text(f"By class, at step {entry['step']}"))
    return title + _table([[_words(name) for name in ["class", *metrics]], *rows])


def _words(name: str) -> str:
    """A metric's name in words."""
    return name.replace("_", " ")


def _folded(summary: str, content: str) -> str:
    """Content that a click unfolds."""
    return element("details", element("summary", text(summary)), content)


def _cells(entry: Entry, *names: str) -> list[str]:
    """The numbers of these names as a table shows them; empty where the entry has none."""
    return [short(float(entry[name])) if is_number(entry.get(name)) else "" for name in names]


def _table(rows: list[list[str]]) -> str:
    """Rows of text, of which the first is the heading."""
    heads, *rest = [[text(cell) for cell in row] for row in rows]
    lines = [element("tr", *(element("td", cell) for cell in row)) for row in rest]
    head = element("tr", *(element("th", cell) for cell in heads))
    return element("div", element("table", head, *lines), class_="scroll")


# -- time


def split(run: RecordedRun) -> dict[str, Array]:
    """Seconds of every step by what they were spent on; they add up to the step's."""
    waits = {name: np.nan_to_num(run.column(name), posinf=0.0) for name in ("halo", "gradients", "data")}
    compute = np.maximum(0.0, run.column("seconds") - sum(waits.values()))
    return {"compute": compute, **waits}


def median_split(run: RecordedRun) -> dict[str, float]:
    """Medians of the waits; computing is the rest of the median step, so that all add up to it."""
    waits = {name: float(np.median(values)) for name, values in split(run).items() if name != "compute"}
    total = float(np.nanmedian(run.column("seconds")))
    return {"compute": max(0.0, total - sum(waits.values())), **waits}


def time(run: RecordedRun) -> Part:
    """Where the time of a step goes."""
    timed = np.isfinite(run.column("seconds"))
    if not timed.any():
        return Missing("time", "the log tells of no step how long it took")
    run = replace(run, steps=[entry for entry, good in zip(run.steps, timed, strict=True) if good])
    seconds = run.column("seconds")
    cards = [_card(f"The median step: {duration(float(np.nanmedian(seconds)))}", *_bar(median_split(run)))]
    if len(seconds) > 1:
        cards.append(_over_time(run, seconds))
        series = smooth_series("samples a second", run.column("step"), run.column("samples_per_second"), "speed")
        cards.append(_card("Samples a second", curve_chart("samples a second", series, log=False, zero=True)))
    words = f"{TRACE} beside this page tells what every thread of every rank did in a few steps: open it in "
    trace = _note(f"{words}ui.perfetto.dev.") if run.traced else ""
    return Section("time", "Where the time goes", _grid(*cards, class_="cards three") + trace)


def _bar(parts: dict[str, float]) -> list[str]:
    """The parts of a step as a bar and a table."""
    total = sum(parts.values()) or 1.0
    pieces, rows = [], []
    for name, seconds in parts.items():
        share = f"{100 * seconds / total:.1f} %"
        told = f"{PARTS[name]}: {duration(seconds)}, {share}"
        pieces.append(element("span", class_=f"part {name}", style=f"flex:{seconds / total:.4f}", title=told))
        first = element("td", element("i", class_=f"key {name}"), text(PARTS[name]))
        rows.append(element("tr", first, element("td", text(duration(seconds))), element("td", share)))
    bar = element("div", *pieces, class_="stack", role="img", aria_label="the median step by what it went to")
    note = _note("What hid behind computing is not counted as waiting.")
    return [bar, element("table", *rows, class_="shares"), note]


def _over_time(run: RecordedRun, seconds: Array) -> str:
    """A chart of the parts over all steps, as means over stretches; a long first step is cut off."""
    stretches = np.array_split(np.arange(len(seconds)), min(len(seconds), POINTS // 4))
    steps = np.array([run.column("step")[each].mean() for each in stretches])
    layers = [(name, np.array([values[each].mean() for each in stretches])) for name, values in split(run).items()]
    drawn, longest = np.sum([values for _, values in layers], axis=0), float(np.nanmax(seconds))
    height = min(float(np.nanmax(drawn)) * 1.05, 1.3 * float(np.nanpercentile(drawn, 98))) or 1.0
    chart = stacked_areas("time of a step", steps, layers, height, duration)
    slowest = run.steps[int(np.nanargmax(seconds))]["step"]
    more = [_note(f"The longest, step {slowest}, took {duration(longest)}.")] if longest > height else []
    return _card("Time of a step", chart, _keys(list(PARTS.items())), *more)


def plan(run: RecordedRun) -> Part:
    """Predicted beside measured: time of a step, waits, memory."""
    predicted = (run.plan or {}).get("predicted")
    if run.plan is None or not isinstance(predicted, dict):
        return Missing("plan", "the run follows no plan (halocline train --plan)")
    words = f"{run.plan.get('plan')}, predicted for {run.plan.get('machine')}. Medians of the steps but the first."
    table = _table([["", "predicted", "measured"], *_compared(run, predicted)])
    return Section("plan", "Predicted and measured", _note(words) + table)


def _compared(run: RecordedRun, predicted: Entry) -> list[list[str]]:
    """Rows of a name, what the plan predicted, and what the run measured."""
    steady = replace(run, steps=run.steps[1:] or run.steps)
    waits = predicted.get("exposed") or {}
    memory = sum((predicted.get("memory") or {}).values())
    halos, gradients = waits.get("halo", 0.0) + waits.get("statistics", 0.0), waits.get("gradients", 0.0)
    used = [entry["memory"] for entry in run.ranks if is_number(entry.get("memory"))]

    def measured(*names: str) -> str:
        values = sum(steady.column(name) for name in names)
        return duration(float(np.nanmedian(values))) if steady.steps and np.isfinite(values).any() else ""

    seconds = steady.column("seconds") - np.nan_to_num(steady.column("data"))
    step = duration(float(np.nanmedian(seconds))) if np.isfinite(seconds).any() else ""
    return [
        ["a step, but for waiting for data", duration(predicted.get("seconds", 0.0)), step],
        [PARTS["halo"], duration(halos), measured("halo")],
        [PARTS["gradients"], duration(gradients), measured("gradients")],
        ["memory of a rank", size_text(memory), size_text(int(max(used))) if used else ""],
    ]


# -- ranks


def memory(run: RecordedRun) -> Part:
    """The memory of each rank."""
    told = [entry for entry in run.ranks if is_number(entry.get("memory")) and np.isfinite(entry["memory"])]
    if not told:
        return Missing("memory", _no_ranks(run))
    used = column(told, "memory")
    unit = next((name for name, size in UNITS.items() if used.max() >= size), "KiB")
    labels = [str(entry["rank"]) for entry in told]
    chart = columns("memory of each rank", labels, used / UNITS[unit], lambda value: f"{value:.3g}", "rank")
    words = f"Least {short(used.min() / UNITS[unit])}, most {short(used.max() / UNITS[unit])} {unit}: the GPU's where"
    words += " there is one, else the process's."
    return Section("memory", "Memory", _grid(_card(f"At the peak, {unit}", chart, _note(words))))


def mesh(run: RecordedRun) -> Part:
    """How samples are cut over ranks."""
    told = [entry for entry in run.ranks if entry.get("tile")]
    if not told:
        return Missing("mesh", _no_ranks(run))
    shape = " × ".join(str(size) for size in told[0].get("shape", []))
    letters = "".join(told[0]["tile"])
    words = f"One sample is {shape} ({letters}), " if shape else "One sample is "
    words += f"cut over {len(told)} ranks." if len(told) > 1 else "whole on one rank."
    words += " Tiles are drawn to scale; a tile's number is its rank."
    figures = element("div", *mesh_figures(told), class_="meshes")
    return Section("mesh", "How samples are cut", element("p", text(words)) + figures + _choices(run))


def _choices(run: RecordedRun) -> str:
    """What the mesh decides by (``hc.Choices``), and what holds instead in parts of the model.

    Folded, unless the run has other choices than the defaults of this version.
    """
    if not run.choices:
        return ""
    usual = asdict(Choices())
    inside = {path: values for path, values in run.choices.get("at", {}).items() if isinstance(values, dict)}
    rows, changed = [["choice", "value", "default", "where"]], False
    for path, values in {"": run.choices, **inside}.items():
        for name, value in values.items():
            if name != "at" and (not path or value != usual.get(name)):
                rows.append([_words(name), f"{value}", f"{usual.get(name)}", path or "everywhere"])
                changed = changed or value != usual.get(name)
    words = "How operations on cut samples are computed where there is a choice (hc.Choices)."
    table = element("p", text(words)) + _table(rows)
    return _card("What the mesh decides by", table) if changed else _folded("What the mesh decides by", table)


def _no_ranks(run: RecordedRun) -> str:
    """Why nothing is known of ranks."""
    if run.result is None:
        return "ranks are written down when a run is finished, and this one is not"
    return "the log does not tell of ranks"


def examples(run: RecordedRun) -> Part:
    """Predictions beside the truth."""
    if "examples" in run.troubles:
        return Missing("examples", run.troubles["examples"])
    if run.examples is None:
        return Missing("examples", "there is no examples.npz: the last validation writes it")
    told = run.settings.get("class_names")
    body = answers(run.examples, run.progress, [str(name) for name in told] if isinstance(told, list) else [])
    if body is None:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in run.examples.items())
        return Missing("examples", f"they are neither numbers nor slices that a page could show: {shapes}")
    return Section("examples", "What the network answers", body)


def settings(run: RecordedRun) -> Part:
    """Every setting of the run."""
    if not run.config:
        return Missing("settings", run.troubles.get("settings", "config.toml is empty"))
    trouble = [element("p", text(run.troubles["settings"]), class_="bad")] if "settings" in run.troubles else []
    folded = _folded("config.toml", element("pre", text(run.config)))
    return Section("settings", "Settings", "".join(trouble) + folded)


_MAKERS: tuple[Callable[[RecordedRun], Part], ...] = (loss, validation, examples, time, plan, memory, mesh, settings)
