"""Who sends which box to whom. Worked out a dim at a time, so that the cost does not grow with the number of ranks.

A ``DimMove`` says, for one dim of an operand, who owns what (by the coordinate on the axis that cuts it) and who needs
what (by the coordinate on the axis that cuts the work). A rank's pieces are the products of these over the dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from .interval import Box, Interval, shape_of, slices, whole

Needs = tuple[Interval, ...]
Rank = Callable[[Mapping[str, int]], int]


@dataclass(frozen=True)
class DimMove:
    """``owned[c]`` by coordinate on ``owner_axis``, ``needs[c]`` on ``need_axis``; an axis of None has one entry.

    With ``filled`` the target keeps room for what lies outside the dim; otherwise needs are clipped to it.
    """

    size: int
    owner_axis: str | None
    owned: tuple[Interval, ...]
    need_axis: str | None
    needs: tuple[Needs, ...]
    filled: bool = False

    def wanted(self, coordinate: int) -> Needs:
        """What the rank at this coordinate needs of the dim."""
        needs = self.needs[coordinate if self.need_axis else 0]
        return needs if self.filled else tuple(need.intersect(whole(self.size)) for need in needs)

    def holds(self, coordinate: int) -> Interval:
        """What the rank at this coordinate owns of the dim."""
        return self.owned[coordinate if self.owner_axis else 0]

    def overlaps(self, needer: int, owner: int) -> list[tuple[Interval, Interval]]:
        """(where in the owner's tile, where in the needer's target) for each need the owner can serve."""
        held, offset, overlaps = self.holds(owner), 0, []
        for need in self.wanted(needer):
            common = need.intersect(held)
            if not common.empty:
                overlaps.append((common.shift(-held.lo), common.shift(offset - need.lo)))
            offset += need.size
        return overlaps

    @cached_property
    def local(self) -> bool:
        """Every rank already holds what it needs of this dim: nothing crosses the owner's axis."""
        if self.owner_axis is None:
            return True
        if self.owner_axis != self.need_axis:
            return False
        inside = whole(self.size)
        return all(
            self.owned[c].contains(need.intersect(inside)) for c in range(len(self.owned)) for need in self.needs[c]
        )

    @cached_property
    def untouched(self) -> bool:
        """Every rank needs just what it holds, in place: the tile can be used as it is."""
        if self.owner_axis is None:
            return self.need_axis is None and self.needs == ((whole(self.size),),)
        return self.owner_axis == self.need_axis and all(
            len(need) == 1 and (need[0] == own or (need[0].empty and own.empty))
            for need, own in zip(self.needs, self.owned, strict=True)
        )


@dataclass(frozen=True)
class Transfer:
    """One rank's part in a movement: boxes of its source that go out, boxes of its target that come in.

    ``reversed`` is the adjoint: what was received is sent back, and whatever arrives is added up.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    own: tuple[tuple[Box, Box], ...]
    sends: tuple[tuple[int, tuple[Box, ...]], ...]
    receives: tuple[tuple[int, tuple[Box, ...]], ...]
    accumulate: bool = False

    @cached_property
    def reversed(self) -> Transfer:
        """The adjoint: what came goes back, and is added up."""
        return replace(
            self,
            source_shape=self.target_shape,
            target_shape=self.source_shape,
            own=tuple((target, source) for source, target in self.own),
            sends=self.receives,
            receives=self.sends,
            accumulate=not self.accumulate,
        )

    @cached_property
    def received_elements(self) -> int:
        """From other ranks."""
        return sum(message.elements for message in self.arriving)

    @cached_property
    def leaving(self) -> tuple[PackedMessage, ...]:
        """One message for each rank that gets something."""
        return tuple(_message(peer, boxes) for peer, boxes in self.sends)

    @cached_property
    def arriving(self) -> tuple[PackedMessage, ...]:
        """One message from each rank that sends something."""
        return tuple(_message(peer, boxes) for peer, boxes in self.receives)

    @cached_property
    def staying(self) -> tuple[tuple[Slices, Slices], ...]:
        """From where in the source to where in the target."""
        return tuple((slices(source), slices(target)) for source, target in self.own)

    @cached_property
    def covers(self) -> bool:
        """Is every element of the target written just once?"""
        kept = sum(volume(target) for _, target in self.own)
        return not self.accumulate and kept + self.received_elements == prod(self.target_shape)


Slices = tuple[slice, ...]


class Strip(NamedTuple):
    """A box of a tensor, and where in a flat message its elements lie."""

    place: Slices
    shape: tuple[int, ...]
    start: int
    stop: int


class PackedMessage(NamedTuple):
    """The boxes between two ranks, one after another in one flat buffer."""

    peer: int
    elements: int
    strips: tuple[Strip, ...]


def _message(peer: int, boxes: tuple[Box, ...]) -> PackedMessage:
    strips, at = [], 0
    for box in boxes:
        size = volume(box)
        strips.append(Strip(slices(box), shape_of(box), at, at + size))
        at += size
    return PackedMessage(peer, at, tuple(strips))


def volume(box: Box) -> int:
    """Elements of a box."""
    total = 1
    for interval in box:
        total *= interval.size
    return total


def plan_transfer(dims: tuple[DimMove, ...], coordinates: Mapping[str, int], rank_at: Rank) -> Transfer:
    """The transfer of the rank at ``coordinates``: owners differ from needers only on the axes that cut the operand."""
    here = rank_at(coordinates)
    received = list(_received(dims, coordinates, rank_at))
    sent = list(_sent(dims, coordinates, rank_at))
    target = tuple(sum(n.size for n in dim.wanted(_at(coordinates, dim.need_axis))) for dim in dims)
    return Transfer(
        source_shape=tuple(dim.holds(_at(coordinates, dim.owner_axis)).size for dim in dims),
        target_shape=target,
        own=tuple((source, box) for peer, source, box in received if peer == here),
        sends=_by_peer((peer, source) for peer, source, _ in sent if peer != here),
        receives=_by_peer((peer, box) for peer, _, box in received if peer != here),
    )


def _at(coordinates: Mapping[str, int], axis: str | None) -> int:
    return coordinates[axis] if axis else 0


def _by_peer(items: Iterator[tuple[int, Box]]) -> tuple[tuple[int, tuple[Box, ...]], ...]:
    grouped: dict[int, list[Box]] = {}
    for peer, box in items:
        grouped.setdefault(peer, []).append(box)
    return tuple((peer, tuple(grouped[peer])) for peer in sorted(grouped))


Option = tuple[dict[str, int], Interval, Interval]


def _combine(options: list[list[Option]]) -> Iterator[tuple[dict[str, int], Box, Box]]:
    for choice in product(*options):
        where: dict[str, int] = {}
        for moved, _, _ in choice:
            if any(where.get(axis, place) != place for axis, place in moved.items()):
                break  # two dims follow one axis, and no rank stands at two places of it
            where.update(moved)
        else:
            yield where, tuple(source for _, source, _ in choice), tuple(target for _, _, target in choice)


def _received(
    dims: tuple[DimMove, ...], coordinates: Mapping[str, int], rank_at: Rank
) -> Iterator[tuple[int, Box, Box]]:
    options: list[list[Option]] = []
    for dim in dims:
        needer = _at(coordinates, dim.need_axis)
        options.append(
            [
                ({dim.owner_axis: owner} if dim.owner_axis else {}, source, target)
                for owner in range(len(dim.owned))
                for source, target in dim.overlaps(needer, owner)
            ]
        )
    for where, source_box, target_box in _combine(options):
        yield rank_at({**coordinates, **where}), source_box, target_box


def _sent(dims: tuple[DimMove, ...], coordinates: Mapping[str, int], rank_at: Rank) -> Iterator[tuple[int, Box, Box]]:
    owner_axes = {dim.owner_axis: len(dim.owned) for dim in dims if dim.owner_axis}
    need_axes = {dim.need_axis for dim in dims}
    options: list[list[Option]] = []
    for dim in dims:
        owner = _at(coordinates, dim.owner_axis)
        # A needer may differ from us only on axes that cut the operand: elsewhere it has an owner of its own.
        needers = range(len(dim.needs)) if dim.need_axis in owner_axes else [_at(coordinates, dim.need_axis)]
        options.append(
            [
                ({dim.need_axis: needer} if dim.need_axis else {}, source, target)
                for needer in needers
                for source, target in dim.overlaps(needer, owner)
            ]
        )
    free = [(axis, size) for axis, size in owner_axes.items() if axis not in need_axes]
    for where, source_box, target_box in _combine(options):
        for values in product(*(range(size) for _, size in free)):
            elsewhere = dict(zip((axis for axis, _ in free), values, strict=True))
            yield rank_at({**coordinates, **where, **elsewhere}), source_box, target_box
