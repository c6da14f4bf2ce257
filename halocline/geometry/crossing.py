"""From the tiles of one set of ranks to the tiles of another: which rank sends which box to whom, and in which order.

Every element leaves the ranks that hold it once. Where several ranks need it, they pass it on along a chain. Regions
that several ranks hold or need are split among them, so that all of them send and receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
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


class RankHops(NamedTuple):
    """The hops of one rank, with their numbers: a rank begins and waits for them in this order."""

    sends: list[tuple[int, Hop]]  # from its source tile
    arrives: list[tuple[int, Hop]]
    passes_on: dict[Box, int]  # the hop by which a box goes on that has come to this rank


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

    def hops_of(self, rank: int) -> RankHops:
        """The hops of a rank; none for one that has no part in the crossing."""
        return self._by_rank.get(rank) or RankHops([], [], {})

    @cached_property
    def _by_rank(self) -> Mapping[int, RankHops]:
        found = {rank: RankHops([], [], {}) for rank in (*self.sources, *self.targets)}
        for number, hop in enumerate(self.hops):
            found[hop.receiver].arrives.append((number, hop))
            if hop.first:
                found[hop.sender].sends.append((number, hop))
            else:
                found[hop.sender].passes_on[hop.box] = number
        return found


class _Part(NamedTuple):
    """A box that goes along one chain of ranks: its holder, the rank at which it enters, and those that follow."""

    box: Box
    chain: tuple[int, ...]


@dataclass
class _Loads:
    """Elements that each rank sends and receives over the boundary, as far as parts are planned."""

    sent: dict[int, int]
    entered: dict[int, int]
    feeds: dict[int, int] = field(default_factory=dict)  # by sender: the rank at which its last part entered

    def choose(self, holders: Sequence[int], needers: Sequence[int], size: int, share: int) -> tuple[int, int]:
        """The holder that has sent least, and the needer at which the part enters: the one that this holder feeds
        already, until that has its ``share``; then the one that has received least.

        A link into which many senders send at once loses packets.
        """
        sender = min(holders, key=lambda rank: self.sent.get(rank, 0))
        entry = self.feeds.get(sender, -1)
        if entry not in needers or self.entered[entry] + size > share:
            entry = min(needers, key=lambda rank: self.entered[rank])
        self.sent[sender] = self.sent.get(sender, 0) + size
        self.entered[entry] += size
        self.feeds[sender] = entry
        return sender, entry


def plan_crossing(sources: Mapping[int, Box], targets: Mapping[int, Box], largest: int = 1 << 18) -> Crossing:
    """The crossing from tiles ``sources`` to tiles ``targets``, both by rank; messages of at most about ``largest``
    elements where they are passed on.

    Tiles of one side are equal or disjoint, and those of the sources cover those of the targets.
    """
    parts: list[_Part] = []
    kept: list[tuple[int, Box]] = []
    loads = _Loads(dict.fromkeys(sources, 0), dict.fromkeys(targets, 0))
    for source, holders in _by_box(sources).items():
        for target, needers in _by_box(targets).items():
            region = tuple(a.intersect(b) for a, b in zip(source, target, strict=True))
            if any(interval.empty for interval in region):
                continue
            both = [rank for rank in needers if rank in holders]
            kept += [(rank, region) for rank in both]
            others = [rank for rank in needers if rank not in holders]
            if others:
                share = -(-volume(target) // len(needers))
                parts += _chains(region, both or holders, others, largest, share, loads)
    return Crossing(sources, targets, _in_order(parts), tuple(kept))


def _by_box(tiles: Mapping[int, Box]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank, box in tiles.items():
        found.setdefault(box, []).append(rank)
    return found


def _chains(
    region: Box, holders: Sequence[int], needers: Sequence[int], largest: int, share: int, loads: _Loads
) -> list[_Part]:
    """A region in parts, each with its chain. ``share``: elements that are to enter at each needer."""
    count = max(len(holders), len(needers))
    if len(needers) > 1:  # several messages in flight along each chain
        count *= max(1, -(-volume(region) // (count * largest)))
    parts = []
    for box in _split(region, count):
        sender, entry = loads.choose(holders, needers, volume(box), share)
        start = needers.index(entry)
        parts.append(_Part(box, (sender, *needers[start:], *needers[:start])))
    return parts


def _in_order(parts: Sequence[_Part]) -> tuple[Hop, ...]:
    """The hops of all parts as they arrive if each takes as long as any other.

    A rank passes on what it has waited for. If it waited for all that comes over the boundary first, what has come
    from its neighbour would lie there meanwhile, and the links behind it would run dry.
    """
    sent, entered = Counter[tuple[int, int]](), Counter[int]()
    turns = []  # the number of each part among those that go the same way over the boundary
    for part in parts:
        sender, entry = part.chain[:2]
        turns.append(sent[sender, entry])
        sent[sender, entry] += 1
    steps = []
    for number in sorted(range(len(parts)), key=lambda number: (turns[number], number)):
        box, chain = parts[number]
        turn = entered[chain[1]]
        entered[chain[1]] += 1
        for depth, (sender, receiver) in enumerate(pairwise(chain)):
            steps.append(((turn + depth, depth, number), Hop(sender, receiver, box, depth == 0)))
    return tuple(hop for _, hop in sorted(steps, key=lambda step: step[0]))


def _split(region: Box, count: int) -> list[Box]:
    """The region in at most ``count`` boxes along its first dim that is long enough, else its longest."""
    dim = next((d for d, side in enumerate(region) if side.size >= count), None)
    if dim is None:
        dim = max(range(len(region)), key=lambda d: region[d].size) if region else None
    if dim is None:
        return [region]
    pieces = Partition.even(region[dim].size, min(count, region[dim].size)).pieces()
    return [(*region[:dim], piece.shift(region[dim].lo), *region[dim + 1 :]) for piece in pieces]
