"""What goes together: gradients in the order in which they become ready, cut into messages so that the last is done
as early as can be.

A message of n bytes takes ``latency + n * per_byte`` seconds, and starts when all of it is ready and the one before it
is done. Runs of neighbours in ready order suffice: exchanging two gradients of unequal ready times never helps. The
best cut is found exactly, by dynamic programming over where the last message begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Link:
    """What a sum over all ranks costs."""

    latency: float = 1e-3
    per_byte: float = 1e-8

    def seconds(self, size: float) -> float:
        return self.latency + self.per_byte * size

    @classmethod
    def fitted(cls, small: tuple[int, float], large: tuple[int, float]) -> Link:
        """Through two measurements of (bytes, seconds); never less than nothing."""
        (few, quick), (many, slow) = small, large
        per_byte = max(0.0, slow - quick) / max(1, many - few)
        return cls(max(1e-6, quick - per_byte * few), max(1e-12, per_byte))


def best_cut(ready: Sequence[float], sizes: Sequence[int], link: Link) -> list[int]:
    """Where messages begin, for gradients in ready order; the first begins at 0.

    >>> best_cut([0.0, 1.0, 1.0], [100, 100, 100], Link(0.1, 0.001))
    [0, 1]
    """
    count = len(sizes)
    if not count:
        return []
    upto = np.concatenate([[0.0], np.cumsum(np.asarray(sizes, dtype=np.float64))])
    finish = np.zeros(count + 1)
    begins = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        start = np.maximum(finish[:end], ready[end - 1])
        done = start + link.latency + link.per_byte * (upto[end] - upto[:end])
        # Of equally good ones the fewest messages: the earliest beginning.
        begins[end] = int(np.argmax(done <= done.min() * (1 + 1e-12) + 1e-15))
        finish[end] = done[begins[end]]
    return _walked(begins, count)


def _walked(begins: np.ndarray, count: int) -> list[int]:
    cut, end = [], count
    while end > 0:
        end = int(begins[end])
        cut.append(end)
    return cut[::-1]


def finish_time(cut: Sequence[int], ready: Sequence[float], sizes: Sequence[int], link: Link) -> float:
    """When the last message of this cut is done."""
    done = 0.0
    for begin, end in zip(cut, [*cut[1:], len(sizes)], strict=True):
        done = max(done, ready[end - 1]) + link.seconds(sum(sizes[begin:end]))
    return done
