"""The page round the parts: one file that needs no other, in light and dark, on screens of any width and on paper."""

from __future__ import annotations

import math

import numpy as np

from .run import RecordedRun, is_number
from .sections import Missing, Part, Section
from .style import STYLE
from .svg import duration, element, short, text

#: The browser itself holds the page to it: nothing is fetched, and no script runs.
_SEALED = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'\">"
)


def page(run: RecordedRun, parts: list[Part]) -> str:
    """The whole report as HTML."""
    shown = [part for part in parts if isinstance(part, Section)]
    body = element("header", _head(run), _facts(run), _links(shown))
    body += element("main", *(_section(part) for part in shown), _absent([p for p in parts if isinstance(p, Missing)]))
    body += _foot(run)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += '<meta name="color-scheme" content="light dark">' + _SEALED
    head += element("title", text(f"{run.subject} · {run.name}")) + f"<style>{STYLE}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _head(run: RecordedRun) -> str:
    words, class_ = _ending(run)
    pill = element("span", text(words), class_=f"pill {class_}")
    name = run.name if run.subject != run.name else "a run"
    return element("p", text(name), " ", pill, class_="over") + element("h1", text(run.subject))


def _ending(run: RecordedRun) -> tuple[str, str]:
    if run.result is None:
        return "not finished", "warn"
    if run.result.get("stopped"):
        return "stopped after a checkpoint", "warn"
    return "finished", "good"


def _facts(run: RecordedRun) -> str:
    """Headline figures; those that the run does not know are left out."""
    return element("dl", *(_fact(name, value) for name, value in facts(run)), class_="facts")


def _fact(name: str, value: str) -> str:
    """What follows a line's end is set small."""
    figure, _, more = value.partition("\n")
    small = element("small", text(more)) if more else ""
    return element("div", element("dt", text(name)), element("dd", text(figure), small))


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """The key figures at the top of the page."""
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
    return [*rows, ("samples a second", short(speed))] if math.isfinite(speed) else rows


def _steps(run: RecordedRun) -> str:
    done = int(run.steps[-1]["step"]) + 1 if run.steps else 0
    made = (run.result or {}).get("steps")
    if is_number(made) and not (run.result or {}).get("stopped"):
        done = int(made or 0)  # not every step is in the log
    planned = run.settings.get("steps")
    return f"{done} of {planned}" if is_number(planned) and planned != done else str(done)


def _ranks(run: RecordedRun) -> str:
    """How many, and along which axes."""
    axes: dict[str, int] = {}
    for entry in run.ranks:
        for axis, place in entry.get("coordinates", {}).items():
            axes[axis] = max(axes.get(axis, 0), int(place) + 1)
    cut = " × ".join(f"{axis} {parts}" for axis, parts in axes.items() if parts > 1)
    return f"{len(run.ranks)}" + (f"\n{cut}" if cut else "")


def _links(sections: list[Section]) -> str:
    return element("nav", *(element("a", text(each.title), href=f"#{each.name}") for each in sections))


def _section(part: Section) -> str:
    return element("section", element("h2", text(part.title)), part.body, id=part.name)


def _absent(missing: list[Missing]) -> str:
    if not missing:
        return ""
    items = [element("li", element("b", text(each.name)), text(f": {each.why}")) for each in missing]
    return element("section", element("h2", "Not shown"), element("ul", *items), id="missing")


def _foot(run: RecordedRun) -> str:
    return element("footer", "Written by ", element("code", text(f"halocline report {run.name}")))
