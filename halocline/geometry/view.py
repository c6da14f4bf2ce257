"""A sample seen otherwise: flipped, turned, cropped, shifted. Which box of the source does a box of the view show?

Each dim of a view follows one dim of the source in *runs*: stretches in which the source's index goes up or down with
the view's. What no run covers lies outside the source, and is filled. Every change of view is a change of runs, so any
sequence of them is again a view, and is read without anything being moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ..errors import ShardingError
from .interval import Box, Interval


class IndexRun(NamedTuple):
    """Index ``i`` of ``[lo, hi)`` shows index ``start + step * (i - lo)`` of the source; ``step`` is 1 or -1."""

    lo: int
    hi: int
    start: int
    step: int

    def moved(self, by: int) -> IndexRun:
        """The same sources, shown elsewhere."""
        return self._replace(lo=self.lo + by, hi=self.hi + by)

    def within(self, lo: int, hi: int) -> IndexRun:
        """The part of it in ``[lo, hi)`` of the view, perhaps empty."""
        first, last = max(self.lo, lo), min(self.hi, hi)
        return IndexRun(first, max(first, last), self.start + self.step * (first - self.lo), self.step)

    def showing(self, source: Interval) -> IndexRun:
        """The part of it that shows ``source``."""
        if self.step > 0:
            return self.within(source.lo - self.start + self.lo, source.hi - self.start + self.lo)
        return self.within(self.start - source.hi + 1 + self.lo, self.start - source.lo + 1 + self.lo)

    @property
    def source(self) -> Interval:
        """The interval of the source that it shows."""
        last = self.start + self.step * (self.hi - self.lo - 1)
        return Interval(min(self.start, last), max(self.start, last) + 1)


@dataclass(frozen=True)
class DimView:
    """One dim of a view: its size, the dim of the source that it follows, and its runs in order."""

    size: int
    source: int
    runs: tuple[IndexRun, ...]

    def cropped(self, lo: int, hi: int) -> DimView:
        """Only what lies between."""
        parts = (run.within(lo, hi).moved(-lo) for run in self.runs)
        return DimView(hi - lo, self.source, tuple(run for run in parts if run.lo < run.hi))

    def flipped(self) -> DimView:
        """From the end."""
        turned = (
            IndexRun(self.size - run.hi, self.size - run.lo, run.start + run.step * (run.hi - run.lo - 1), -run.step)
            for run in reversed(self.runs)
        )
        return replace(self, runs=tuple(turned))

    def shifted(self, by: int) -> DimView:
        """Moved along, with nothing where it came from."""
        moved = (run.moved(by).within(0, self.size) for run in self.runs)
        return replace(self, runs=tuple(run for run in moved if run.lo < run.hi))

    def rolled(self, by: int) -> DimView:
        """Moved along, round the end."""
        by %= self.size
        back, ahead = self.shifted(by - self.size), self.shifted(by)
        return replace(self, runs=back.runs + ahead.runs) if by else self

    def taken(self, indices: Sequence[int]) -> DimView:
        """These indices, in this order."""
        runs: list[IndexRun] = []
        for place, index in enumerate(indices):
            hits = [run.within(index, index + 1) for run in self.runs if run.lo <= index < run.hi]
            runs += [run.moved(place - index) for run in hits]
        return DimView(len(indices), self.source, _joined(runs))

    def pieces(self, of: Interval, within: Interval | None) -> Iterator[IndexRun]:
        """The runs in ``of``, counted from its start, that show nothing outside ``within``."""
        for run in self.runs:
            part = run.within(*of)
            if within is not None and part.lo < part.hi:
                part = part.showing(within)
            if part.lo < part.hi:
                yield part.moved(-of.lo)


def _joined(runs: Iterable[IndexRun]) -> tuple[IndexRun, ...]:
    """Single indices that follow each other upwards make one run."""
    joined: list[IndexRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.step == run.step == 1 and last.hi == run.lo and last.source.hi == run.start:
            joined[-1] = last._replace(hi=run.hi)
        else:
            joined.append(run._replace(step=1) if run.hi - run.lo == 1 else run)
    return tuple(joined)


class Piece(NamedTuple):
    """``source``, a box of the source, goes to ``place`` in the target; ``steps`` is -1 where it runs backwards.

    ``source`` is in the source's order of dims; ``place`` and ``steps`` in the view's.
    """

    source: Box
    place: Box
    steps: tuple[int, ...]


@dataclass(frozen=True)
class SampleView:
    """Immutable; every method but the last few gives another view.

    >>> view = SampleView.of((4, 6)).flip(0).crop(1, 2, 5)
    >>> view.shape, next(view.pieces((Interval(0, 2), Interval(0, 3)))).source
    ((3, 4), (Interval(lo=2, hi=4), Interval(lo=2, hi=5)))
    """

    lines: tuple[DimView, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> SampleView:
        """All of a source of that shape, as it is."""
        return cls(
            tuple(DimView(size, dim, (IndexRun(0, size, 0, 1),) if size else ()) for dim, size in enumerate(shape))
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is seen."""
        return tuple(line.size for line in self.lines)

    @property
    def order(self) -> tuple[int, ...]:
        """For each dim of the view, the dim of the source."""
        return tuple(line.source for line in self.lines)

    def flip(self, dim: int) -> SampleView:
        """A dim from its end."""
        return self._with(dim, self.lines[dim].flipped())

    def crop(self, dim: int, lo: int, hi: int) -> SampleView:
        """Part of a dim."""
        if not 0 <= lo <= hi <= self.lines[dim].size:
            raise ShardingError(f"a crop [{lo}, {hi}) leaves dim {dim} of size {self.lines[dim].size}")
        return self._with(dim, self.lines[dim].cropped(lo, hi))

    def shift(self, dim: int, by: int) -> SampleView:
        """Index ``i`` comes to ``i + by``; what is left behind is filled."""
        return self._with(dim, self.lines[dim].shifted(by))

    def roll(self, dim: int, by: int) -> SampleView:
        """As ``shift``; what leaves at one end comes in at the other."""
        return self._with(dim, self.lines[dim].rolled(by))

    def take(self, dim: int, indices: Sequence[int]) -> SampleView:
        """Some indices of a dim."""
        wrong = [index for index in indices if not 0 <= index < self.lines[dim].size]
        if wrong:
            raise ShardingError(f"index {wrong[0]} is not in dim {dim} of size {self.lines[dim].size}")
        return self._with(dim, self.lines[dim].taken(indices))

    def rotate(self, first: int, second: int, turns: int) -> SampleView:
        """Quarter turns from dim ``first`` towards ``second``, as ``torch.rot90``."""
        view = self
        for _ in range(turns % 4):
            lines = list(view.lines)
            lines[first], lines[second] = view.lines[second].flipped(), view.lines[first]
            view = SampleView(tuple(lines))
        return view

    def _with(self, dim: int, line: DimView) -> SampleView:
        return SampleView((*self.lines[:dim], line, *self.lines[dim + 1 :]))

    def pieces(self, box: Box, within: Box | None = None) -> Iterator[Piece]:
        """What to read for ``box`` of the view, and where it goes; only what lies in the source's box ``within``."""
        options = [
            list(line.pieces(of, within[line.source] if within is not None else None))
            for line, of in zip(self.lines, box, strict=True)
        ]
        for runs in product(*options):
            source = [Interval(0, 0)] * len(self.lines)
            for line, run in zip(self.lines, runs, strict=True):
                source[line.source] = run.source
            yield Piece(tuple(source), tuple(Interval(r.lo, r.hi) for r in runs), tuple(r.step for r in runs))

    def fills(self, box: Box) -> bool:
        """Is some of ``box`` outside the source?"""
        covered = (sum(run.hi - run.lo for run in line.pieces(of, None)) == of.size for line, of in self._along(box))
        return not all(covered)

    def _along(self, box: Box) -> Iterator[tuple[DimView, Interval]]:
        return zip(self.lines, box, strict=True)
