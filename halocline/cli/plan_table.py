"""How ``halocline plan`` shows its candidates, and the difference of two plans, in 80 columns."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..arrangement import DATA
from .output import number_table, number_text, say, size_text, stdout
from .whole_tables import fits

if TYPE_CHECKING:
    from ..plan.candidate import Candidate, RefusedCut
    from ..plan.explain import Difference
    from ..plan.machine import Machine
    from ..plan.pipelines import PipelineCandidate
    from ..plan.plan_file import Plan

SHOWN = 10  # candidates
LONGEST = 3  # modules that a cell names

_table = partial(number_table, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def show_candidates(
    target: str,
    machine: Machine,
    best: Candidate,
    candidates: Sequence[Candidate],
    refused: Sequence[RefusedCut] = (),
    batch: int | None = None,
) -> None:
    """The candidates, the best first, and what a step of the best is made of; ``batch`` is the one asked for."""
    console = stdout()
    title = f"{target} on {best.arrangement.ranks:,} devices of {machine.name}"
    table = _candidate_table(title, best, candidates)
    if not fits(table, console.width):
        table = _candidate_table(title, best, candidates, without=("a sample",))
    console.print(table)
    say(stdout(), f"Take {escape(str(best))}. {_made_of(best)}")
    if {axis for axis, size in best.arrangement.sizes.items() if size > 1} == {DATA}:
        count = best.arrangement.ranks
        keep = (
            "" if batch else f" A step then has {count} samples; --batch N keeps it at N, and cuts samples for fewer."
        )
        say(stdout(), f"No cut of samples is needed: each device takes whole ones.{keep}")
    if best.input_seconds > best.timeline.seconds:
        say(
            stdout(), "It is input-bound: faster storage, smaller files or nearer copies would help; other cuts do not."
        )
    for reason in dict.fromkeys(each.reason for each in refused):
        cuts = [str(each.arrangement) for each in refused if each.reason == reason]
        more = f" and {len(cuts) - LONGEST} more" if len(cuts) > LONGEST else ""
        say(stdout(), f"Refused: {', '.join(cuts[:LONGEST])}{more}: {reason}.")
    say_assumed(machine.assumed())


def _candidate_table(
    title: str, best: Candidate, candidates: Sequence[Candidate], without: Container[str] = ()
) -> Table:
    """A row for each candidate."""
    rows = [
        {
            "mesh": short_name(each),
            "step": time_text(each.seconds),
            "range": range_text(each.low_seconds, each.high_seconds),
            "a sample": time_text(each.seconds_per_sample),
            "compute": time_text(each.timeline.compute),
            "waits": time_text(max(0.0, each.seconds - each.timeline.compute)),
            "memory": size_text(each.recorded.memory),
            "bound by": each.binds,
        }
        for each in candidates[:SHOWN]
    ]
    headings = [heading for heading in rows[0] if heading not in without]
    table = _table(title, headings, texts=("mesh", "bound by"), whole=True)
    for each, row in zip(candidates, rows, strict=False):
        style = "bold" if each is best else "" if each.fits else "dim"
        table.add_row(*(row[heading] for heading in headings), style=style)
    return table


def say_assumed(constants: Iterable[tuple[str, object]]) -> None:
    """Which constants of the machine nobody measured, by the part of the machine."""
    parts: dict[str, list[str]] = {}
    for path, _ in constants:
        part, _, name = path.rpartition(".")
        parts.setdefault(part, []).append(name)
    if parts:
        told = "; ".join(f"{part}: {', '.join(names)}" if part else ", ".join(names) for part, names in parts.items())
        say(stdout(), f"Assumed, not measured: {told}.")


def show_pipelines(candidates: Sequence[PipelineCandidate]) -> None:
    """Meshes of stages and data, the best first."""
    headings = ("mesh", "step", "a sample", "lanes wait", "gradients", "memory")
    table = _table("Pipelines", headings, texts=("mesh",), whole=True)
    for each in candidates[:SHOWN]:
        seconds = each.seconds, each.seconds_per_sample, each.bubble, each.gradients
        table.add_row(str(each), *map(time_text, seconds), size_text(each.memory), style="" if each.fits else "dim")
    stdout().print(table)


def short_name(candidate: Candidate) -> str:
    """An arrangement with few of its modules named."""
    arrangement = candidate.arrangement
    words = [f"{axis}={size}" for axis, size in arrangement.sizes.items() if size > 1] or ["one device"]
    words += [f"{axis} uneven" for axis in arrangement.points]
    words += [f"multiples of {arrangement.multiple}"] if arrangement.multiple > 1 else []
    for what, paths in (("gather", arrangement.gather), ("recompute", arrangement.recompute)):
        if paths:
            more = f" and {len(paths) - LONGEST} more" if len(paths) > LONGEST else ""
            words.append(f"{what} {', '.join(paths[:LONGEST])}{more}")
    if arrangement.layout:
        words.append(f"layout of {len(arrangement.layout)} patterns")
    return " ".join(words)


def _made_of(candidate: Candidate) -> str:
    line = candidate.timeline
    waits = [f"{time_text(seconds)} for {kind}" for kind, seconds in line.exposed.items() if seconds > 0]
    waiting = f"; it waits {', '.join(waits)}" if waits else ""
    reading = f"; reading takes {time_text(candidate.input_seconds)} beside it" if candidate.input_seconds else ""
    return f"A step computes for {time_text(line.compute)}{waiting}{reading}."


def show_difference(first: Plan, second: Plan, differences: Sequence[Difference]) -> None:
    """Two plans term by term."""
    table = _table("Difference", ("", str(first), str(second), "difference"), texts=("",))
    in_bytes = False
    for each in differences:
        in_bytes = in_bytes or each.term.startswith("bytes")
        more = each.second - each.first
        shown = size_text if in_bytes else time_text
        sign = "+" if more > 0 else "-" if more < 0 else ""
        cells = [shown(int(value) if in_bytes else value) for value in (each.first, each.second, abs(more))]
        table.add_row(each.term, cells[0], cells[1], sign + cells[2])
    stdout().print(table)


def range_text(low: float, high: float) -> str:
    """Such as "150-260 ms"."""
    unit, size = _unit(high)
    return f"{number_text(low / size)}-{number_text(high / size)} {unit}"


def time_text(seconds: float) -> str:
    """Three digits with a unit."""
    unit, size = _unit(seconds)
    if 0 < seconds < 1e-6:
        return "< 1 us"
    return f"{number_text(seconds / size)} {unit}" if seconds else "0 s"


def _unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or math.isclose(seconds, size):
            return unit, size
    return "us", 1e-6
