"""The page around the sections: one file that needs no other, in light and dark, on any screen and on paper."""

from __future__ import annotations

import math

import numpy as np

from .run import RecordedRun, is_number
from .sections import Missing, Part, Section
from .svg import document, duration, element, scaled, short, text


def page(run: RecordedRun, parts: list[Part]) -> str:
    """The whole report as HTML: headline figures, links, the sections, and a list of those that are missing."""
    shown = [part for part in parts if isinstance(part, Section)]
    figures = element("dl", *(_fact(name, value) for name, value in facts(run)), class_="facts")
    body = element("header", _head(run), figures, _links(shown))
    sections = [element("section", element("h2", text(each.title)), each.body, id=each.name) for each in shown]
    body += element("main", *sections, _absent([part for part in parts if isinstance(part, Missing)]))
    body += element("footer", "Written by ", element("code", "halocline report"))
    return document(f"{run.subject} · {run.name}", body)


def _head(run: RecordedRun) -> str:
    """Name and subject of the run, and whether it has finished."""
    words, class_ = "finished", "good"
    if run.result is None:
        words, class_ = "not finished", "warn"
    elif run.result.get("stopped"):
        words, class_ = "stopped after a checkpoint", "warn"
    pill = element("span", text(words), class_=f"pill {class_}")
    name = run.name if run.subject != run.name else "a run"
    return element("p", text(name), " ", pill, class_="over") + element("h1", text(run.subject))


def _fact(name: str, value: str) -> str:
    """One headline figure; text after a line's end is set small."""
    figure, _, more = value.partition("\n")
    small = element("small", text(more)) if more else ""
    return element("div", element("dt", text(name)), element("dd", text(figure), small))


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """The headline figures with their names; those that the run does not know are left out."""
    rows = [("steps", _steps(run))]
    if run.steps:
        rows.append(("last loss", short(float(run.column("loss")[-1]))))
    for name, value in run.metrics.items():
        rows.append((f"validation {name.replace('_', ' ')}", short(value)))
    if run.ranks:
        rows.append(("ranks", _ranks(run)))
    seconds = (run.result or {}).get("seconds")
    if is_number(seconds):
        rows.append(("time", duration(float(seconds or 0))))
    speed = float(np.median(run.column("samples_per_second"))) if run.steps else math.nan
    rows += [("samples a second", short(speed))] if math.isfinite(speed) else []
    for name, key in (("sustained FLOP/s", "flops_per_second"), ("peak FLOP/s", "peak_flops_per_second")):
        told = run.column(key)
        if np.isfinite(told).any():
            rows.append((name, scaled(float(np.nanmedian(told)))))
    return rows


def _steps(run: RecordedRun) -> str:
    """The number of steps, and of how many if the run has not made all."""
    done = int(run.steps[-1]["step"]) + 1 if run.steps else 0
    made = (run.result or {}).get("steps")
    if is_number(made) and not (run.result or {}).get("stopped"):
        done = int(made or 0)  # not every step is in the log
    planned = run.settings.get("steps")
    return f"{done} of {planned}" if is_number(planned) and planned != done else str(done)


def _ranks(run: RecordedRun) -> str:
    """The number of ranks, and along which axes they cut the sample."""
    axes: dict[str, int] = {}
    for entry in run.ranks:
        for axis, place in entry.get("coordinates", {}).items():
            axes[axis] = max(axes.get(axis, 0), int(place) + 1)
    cut = " × ".join(f"{axis} {parts}" for axis, parts in axes.items() if parts > 1)
    return f"{len(run.ranks)}" + (f"\n{cut}" if cut else "")


def _links(sections: list[Section]) -> str:
    """Links to the sections."""
    return element("nav", *(element("a", text(each.title), href=f"#{each.name}") for each in sections))


def _absent(missing: list[Missing]) -> str:
    """A list of the sections that cannot be shown, and why."""
    if not missing:
        return ""
    items = [element("li", element("b", text(each.name)), text(f": {each.why}")) for each in missing]
    return element("section", element("h2", "Not shown"), element("ul", *items), id="missing")
