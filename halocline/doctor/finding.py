"""What a probe says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. With a problem no run will work; with a warning some will not, or slowly."""

    topic: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def problems(findings: Iterable[Finding], *topics: str) -> list[Finding]:
    """Those of the given topics, or of all."""
    return [one for one in findings if one.status == "problem" and (not topics or one.topic in topics)]


def ranks_text(ranks: Iterable[int]) -> str:
    """
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


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result, or TimeoutError. Name servers and transports keep deadlines of their own, or none.

    A late call is left behind in its thread, which does not keep the process alive.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - it is raised again by the one who waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
