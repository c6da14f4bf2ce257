"""A needed box as the own tile and the slabs beside it: what arrives need not be glued to the tile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from .interval import Box, Interval
from .transfer import Transfer


@dataclass(frozen=True)
class Slabs:
    """``own`` and ``pieces`` are disjoint boxes of the target, which hold everything that is not fill.

    ``source`` is the part of the tile that is needed, which lies at ``own``.
    ``placed`` says for each message, in order, which piece each of its boxes belongs to, and where in it.
    """

    source: Box
    own: Box
    pieces: tuple[Box, ...]
    placed: tuple[tuple[tuple[int, Box], ...], ...]

    @cached_property
    def messages(self) -> tuple[int | None, ...]:
        """For each piece, the message that is just this piece, if there is one."""
        boxes = Counter(piece for places in self.placed for piece, _ in places)
        alone = {
            places[0][0]: index
            for index, places in enumerate(self.placed)
            if len(places) == 1 and boxes[places[0][0]] == 1
        }
        return tuple(alone.get(piece) for piece in range(len(self.pieces)))


def slabs_of(transfer: Transfer) -> Slabs:
    """Of a transfer that needs something of its own tile, at one place."""
    ((source, own),) = transfer.own
    sides: dict[tuple[int, bool], list[Box]] = {}
    for _, boxes in transfer.receives:
        for box in boxes:
            sides.setdefault(_side(box, own), []).append(box)
    pieces = {side: _hull(boxes) for side, boxes in sides.items()}
    order = {side: index for index, side in enumerate(pieces)}
    placed = tuple(
        tuple((order[_side(box, own)], _within(box, pieces[_side(box, own)])) for box in boxes)
        for _, boxes in transfer.receives
    )
    return Slabs(source, own, tuple(pieces.values()), placed)


def _side(box: Box, own: Box) -> tuple[int, bool]:
    """The first dim along which a box lies beside the tile, and whether above it. Owners do not overlap."""
    for dim, (interval, mine) in enumerate(zip(box, own, strict=True)):
        if interval.hi <= mine.lo or interval.lo >= mine.hi:
            return dim, interval.lo >= mine.hi
    raise AssertionError(f"{box} came from another rank, and lies in this rank's own {own}")


def _hull(boxes: list[Box]) -> Box:
    return tuple(Interval(min(i.lo for i in along), max(i.hi for i in along)) for along in zip(*boxes, strict=True))


def _within(box: Box, piece: Box) -> Box:
    return tuple(interval.shift(-outer.lo) for interval, outer in zip(box, piece, strict=True))
