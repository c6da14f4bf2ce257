"""From the tiles of one set of ranks to the tiles of another: which rank sends which box to whom, and in which order.

Every element leaves the ranks that hold it once. Where several ranks need it, they pass it on along a chain. Regions
that several ranks hold or need are split among them, so that all of them send and receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .interval import Box
from .partition import Partition
from .transfer import volume


class Hop(NamedTuple):
    """One message: ``box`` in global indices. The first hop of a box reads the sender's source, others its target."""

    sender: int
    receiver: int
    box: Box
    first: bool


@dataclass(frozen=True)
class Crossing:
    """All hops, in an order in which every rank may wait for them, and the boxes that ranks of both sides keep.

    The adjoint runs the hops backwards, with sender and receiver swapped, and adds up what arrives.
    """

    sources: Mapping[int, Box]
    targets: Mapping[int, Box]
    hops: tuple[Hop, ...]
    kept: tuple[tuple[int, Box], ...]

    @cached_property
    def crossed(self) -> int:
        """Elements that go from a source tile to a rank that does not hold them."""
        return sum(volume(hop.box) for hop in self.hops if hop.first)


class _Part(NamedTuple):
    """A box that goes along one chain of ranks, beginning with a holder; ``turn`` is its place among its region's."""

    box: Box
    chain: tuple[int, ...]
    turn: int


def plan_crossing(sources: Mapping[int, Box], targets: Mapping[int, Box], largest: int = 1 << 18) -> Crossing:
    """The crossing from tiles ``sources`` to tiles ``targets``, both by rank; messages of at most about ``largest``
    elements where they are passed on.

    Tiles of one side are equal or disjoint, and those of the sources cover those of the targets.
    """
    parts: list[_Part] = []
    kept: list[tuple[int, Box]] = []
    sent, entered = dict.fromkeys(sources, 0), dict.fromkeys(targets, 0)
    for source, holders in _by_box(sources).items():
        for target, needers in _by_box(targets).items():
            region = tuple(a.intersect(b) for a, b in zip(source, target, strict=True))
            if any(interval.empty for interval in region):
                continue
            both = [rank for rank in needers if rank in holders]
            kept += [(rank, region) for rank in both]
            others = [rank for rank in needers if rank not in holders]
            if others:
                parts += _chains(region, both or holders, others, largest, sent, entered)
    steps = [
        ((depth, part.turn, number), Hop(*pair, part.box, depth == 0))
        for number, part in enumerate(parts)
        for depth, pair in enumerate(zip(part.chain, part.chain[1:], strict=False))
    ]
    # Ranks wait in this order: what comes over the boundary, then what has gone round by one rank, by two, ...
    return Crossing(sources, targets, tuple(hop for _, hop in sorted(steps, key=lambda step: step[0])), tuple(kept))


def _by_box(tiles: Mapping[int, Box]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank, box in tiles.items():
        found.setdefault(box, []).append(rank)
    return found


def _chains(
    region: Box,
    holders: Sequence[int],
    needers: Sequence[int],
    largest: int,
    sent: dict[int, int],
    entered: dict[int, int],
) -> list[_Part]:
    """A region in parts. Each leaves the holder that has sent least, and enters at the needer that has received least
    from outside."""
    count = max(len(holders), len(needers))
    if len(needers) > 1:  # several messages in flight along each chain
        count *= max(1, -(-volume(region) // (count * largest)))
    parts = []
    for turn, box in enumerate(_split(region, count)):
        sender = min(holders, key=lambda rank: sent.get(rank, 0))
        start = min(range(len(needers)), key=lambda place: entered[needers[place]])
        size = volume(box)
        sent[sender] = sent.get(sender, 0) + size
        entered[needers[start]] += size
        chain = (sender, *needers[start:], *needers[:start])
        parts.append(_Part(box, chain, turn // len(needers)))
    return parts


def _split(region: Box, count: int) -> list[Box]:
    """The region in at most ``count`` boxes along its first dim that is long enough, else its longest."""
    dim = next((d for d, side in enumerate(region) if side.size >= count), None)
    if dim is None:
        dim = max(range(len(region)), key=lambda d: region[d].size) if region else None
    if dim is None:
        return [region]
    pieces = Partition.even(region[dim].size, min(count, region[dim].size)).pieces()
    return [(*region[:dim], piece.shift(region[dim].lo), *region[dim + 1 :]) for piece in pieces]
