"""Intervals and boxes of integers: half open, possibly empty, possibly outside any domain."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """The integers ``lo <= i < hi``.

    >>> Interval(2, 5).intersect(Interval(4, 9))
    Interval(lo=4, hi=5)
    """

    lo: int
    hi: int

    @property
    def size(self) -> int:
        """Zero where it is empty."""
        return max(0, self.hi - self.lo)

    @property
    def empty(self) -> bool:
        """Does it hold no integer?"""
        return self.hi <= self.lo

    def intersect(self, other: Interval) -> Interval:
        """What both hold, possibly nothing."""
        lo = max(self.lo, other.lo)
        return Interval(lo, max(lo, min(self.hi, other.hi)))

    def shift(self, by: int) -> Interval:
        """Moved as a whole."""
        return Interval(self.lo + by, self.hi + by)

    def contains(self, other: Interval) -> bool:
        """Does it hold all of another one? Nothing is held by all."""
        return other.empty or (self.lo <= other.lo and other.hi <= self.hi)


Box = tuple[Interval, ...]


def whole(size: int) -> Interval:
    """All indices of a dim."""
    return Interval(0, size)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of a tensor."""
    return tuple(slice(interval.lo, interval.hi) for interval in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(interval.size for interval in box)
