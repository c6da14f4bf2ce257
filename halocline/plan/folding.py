"""Blocks of a network that repeat, found in the order of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .calls import LONGEST, Calls


@dataclass(frozen=True)
class Run:
    """Calls ``start`` to ``start + period * repeats`` are one block after another."""

    start: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.repeats


def runs_of(calls: Calls) -> list[Run]:
    """Blocks that repeat at least three times, read and made alike, whose inner values nothing later reads."""
    signs = np.fromiter((call.sign for call in calls.calls), np.int64, len(calls.calls))
    return [run for run in _repeats(signs, 0) if _closed(calls, run)]


def _repeats(signs: np.ndarray[Any, np.dtype[np.int64]], offset: int) -> Iterator[Run]:
    """The longest run of equal blocks, then what lies before and after it."""
    best: tuple[int, int, int] | None = None  # covered, period, start
    for period in range(1, min(LONGEST, len(signs) // 3) + 1):
        equal = np.concatenate([[False], signs[:-period] == signs[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        lengths = edges[1::2] - edges[::2]
        if len(lengths) and (longest := int(lengths.max())) >= 2 * period:
            covered = longest + period
            # A block of two blocks covers hardly more than one.
            if best is None or covered > 1.05 * best[0]:
                best = covered, period, int(edges[::2][lengths.argmax()])
    if best is None:
        return
    covered, period, start = best
    run = Run(start, period, covered // period)
    yield from _repeats(signs[:start], offset)
    yield replace(run, start=run.start + offset)
    yield from _repeats(signs[run.end :], offset + run.end)


def _closed(calls: Calls, run: Run) -> bool:
    """Does nothing after the run read what its earlier blocks made?"""
    last = run.end - run.period
    nowhere = (-1, 0)
    return all(
        not run.start <= calls.made.get(n, nowhere)[0] < last for call in calls.calls[run.end :] for n in call.operands
    )
