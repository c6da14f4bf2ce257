"""What a check reports: findings with a status, and helpers that put them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

Status = Literal["ok", "hint", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. With a problem no run will work; with a warning some will fail, or be slow. A hint
    matters for some ways to start ranks alone."""

    topic: str
    name: str
    status: Status
    found: str
    remedy: str = ""


class Fault(NamedTuple):
    """A possible result of a check: whether it holds, and what to report and to advise then."""

    holds: object  # tested for truth
    found: str
    remedy: str
    status: Status = "problem"


def judged(topic: str, name: str, well: str, *faults: Fault) -> Finding:
    """The finding for the first fault that holds; if none does, an ok with the text ``well``."""
    for fault in faults:
        if fault.holds:
            return Finding(topic, name, fault.status, fault.found, fault.remedy)
    return Finding(topic, name, "ok", well)


warn_if = partial(Fault, status="warning")
problem_if = Fault


def problems(findings: Iterable[Finding], *topics: str) -> list[Finding]:
    """The problems among the findings of the given topics, or of all."""
    return [one for one in findings if one.status == "problem" and (not topics or one.topic in topics)]


def ranks_text(ranks: Iterable[int]) -> str:
    """Rank numbers in words.

    >>> ranks_text([4, 0, 1, 2, 7]), ranks_text([3])
    ('ranks 0-2, 4, 7', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(runs) != 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"
