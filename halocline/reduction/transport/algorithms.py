"""How a sum travels, as data: for one rank, the rounds in which it sends one span of elements and receives another.

Nothing communicates here. Both ends of a message compute the same span, so empty messages are left out on both, and
every rank counts the rounds alike, idle ones included. In all algorithms but doubling an element is added up along one
chain of ranks, the last of which sends its result to all others; in doubling both partners add the same two numbers in
the same order. Either way all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from ...errors import MeshError


class Span(NamedTuple):
    """Elements from ``start`` up to ``stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


#: What a rank does with received elements: overwrite its own, add them to its own, add its own to them (the other order
#: of operands), or add its own to them and send the result on in the next round, leaving its own unchanged.
Taking = Literal["copy", "add", "add to it", "carry"]
NOTHING = Span(0, 0)


class Round(NamedTuple):
    """At most one message out (``to``) and one in (``source``) of one rank; ranks are numbers in the world."""

    to: int | None = None
    sent: Span = NOTHING
    source: int | None = None
    received: Span = NOTHING
    taking: Taking = "copy"

    @property
    def idle(self) -> bool:
        """Does the rank neither send nor receive?"""
        return self.to is None and self.source is None


IDLE = Round()


def split(span: Span, parts: int) -> list[Span]:
    """Divide a span into parts whose sizes differ by one at most.

    >>> split(Span(0, 5), 3)
    [Span(start=0, stop=1), Span(start=1, stop=3), Span(start=3, stop=5)]
    """
    edges = [span.start + span.size * part // parts for part in range(parts + 1)]
    return [Span(*edge) for edge in pairwise(edges)]


# ---- along one ring ----


def ring_scatter(shares: Sequence[Span], ring: Sequence[int], place: int, taking: Taking = "add") -> Iterator[Round]:
    """Reduce-scatter: share i ends, summed, on the i-th rank of the ring, after going all round from the next one."""
    count = len(ring)
    for step in range(count - 1):
        sent, received = shares[(place - step - 1) % count], shares[(place - step - 2) % count]
        yield _round(ring[(place + 1) % count], sent, ring[(place - 1) % count], received, taking)


def ring_gather(shares: Sequence[Span], ring: Sequence[int], place: int) -> Iterator[Round]:
    """All-gather: share i goes from the i-th rank of the ring to all others."""
    count = len(ring)
    for step in range(count - 1):
        sent, received = shares[(place - step) % count], shares[(place - step - 1) % count]
        yield _round(ring[(place + 1) % count], sent, ring[(place - 1) % count], received, "copy")


def _round(to: int, sent: Span, source: int, received: Span, taking: Taking) -> Round:
    out = Round(to, sent) if sent.size else IDLE
    return out._replace(source=source, received=received, taking=taking) if received.size else out


# ---- over levels ----


def coordinates(place: int, factors: Sequence[int]) -> list[int]:
    """The ``place``-th rank's number at each level; neighbours differ in the first.

    >>> coordinates(7, (2, 4))
    [1, 3]
    """
    numbers = []
    for factor in factors:
        numbers.append(place % factor)
        place //= factor
    return numbers


def _ring_of(level: int, ranks: Sequence[int], factors: Sequence[int], place: int) -> list[int]:
    """The ranks that differ from this one at that level alone."""
    stride = prod(factors[:level])
    first = place - coordinates(place, factors)[level] * stride
    return [ranks[first + number * stride] for number in range(factors[level])]


def level_sum(span: Span, ranks: Sequence[int], factors: Sequence[int], place: int) -> Iterator[Round]:
    """Reduce-scatter over each level in turn, on this rank's share of the level before; then all-gathers in reverse."""
    own, way_back = coordinates(place, factors), []
    for level, factor in enumerate(factors):
        shares, ring = split(span, factor), _ring_of(level, ranks, factors, place)
        yield from ring_scatter(shares, ring, own[level])
        way_back.append((shares, ring, own[level]))
        span = shares[own[level]]
    for shares, ring, at in reversed(way_back):
        yield from ring_gather(shares, ring, at)


# ---- leaders ----


def leader_sum(span: Span, ranks: Sequence[int], factors: Sequence[int], place: int, leaders: int) -> Iterator[Round]:
    """The first ``leaders`` ranks of each node each collect a share of the node, sum it over nodes and send it back."""
    (on_node, nodes), (local, _) = factors, coordinates(place, factors)
    shares, node = split(span, leaders), _ring_of(0, ranks, factors, place)
    shares += [NOTHING] * (on_node - leaders)
    for step in range(1, on_node):
        after, before = (local + step) % on_node, (local - step) % on_node
        yield _round(node[after], shares[after], node[before], shares[local], "add")
    if local < leaders:
        pieces, ring = split(shares[local], nodes), _ring_of(1, ranks, factors, place)
        yield from ring_scatter(pieces, ring, place // on_node)
        yield from ring_gather(pieces, ring, place // on_node)
    else:
        yield from [IDLE] * (2 * (nodes - 1))
    for step in range(1, on_node):
        after, before = (local + step) % on_node, (local - step) % on_node
        yield _round(node[after], shares[local], node[before], shares[before], "copy")


# ---- doubling ----


def doubling_sum(span: Span, ranks: Sequence[int], place: int) -> Iterator[Round]:
    """Recursive doubling: partners at distance 1, 2, 4, ... exchange all elements. A rank beyond the largest power of
    two is a guest: it gives its elements to a host before, and receives the sum after."""
    power = 1 << (len(ranks).bit_length() - 1)
    guest = place >= power
    if not span.size:
        return
    first = last = IDLE
    if guest:
        host = ranks[place - power]
        first, last = Round(host, span), Round(source=host, received=span, taking="copy")
    elif place + power < len(ranks):
        hosted = ranks[place + power]
        first, last = Round(source=hosted, received=span, taking="add"), Round(hosted, span)
    if power < len(ranks):
        yield first
    step = 1
    while step < power:
        partner = place ^ step
        taking: Taking = "add" if place < partner else "add to it"
        yield IDLE if guest else Round(ranks[partner], span, ranks[partner], span, taking)
        step *= 2
    if power < len(ranks):
        yield last


# ---- a chosen algorithm ----

Kind = Literal["levels", "leaders", "doubling"]


@dataclass(frozen=True)
class Algorithm:
    """How a sum over ``ranks`` travels, as the ``place``-th of them sees it. Hashable, so that rounds are cached.

    ``factors`` are the ranks at each level, neighbours first; one factor is a flat ring.
    """

    kind: Kind
    ranks: tuple[int, ...]
    place: int
    factors: tuple[int, ...] = ()
    leaders: int = 0

    def __post_init__(self) -> None:
        if self.kind != "doubling":
            check_factors(self.factors, len(self.ranks))
        if self.kind == "leaders" and not (len(self.factors) == 2 and 1 <= self.leaders <= self.factors[0]):
            raise MeshError(
                f"{self.leaders} leaders on nodes of {self.factors[0]} ranks: give from 1 to {self.factors[0]}, and "
                "two levels"
            )

    @property
    def name(self) -> str:
        """For logs and benchmarks.

        >>> Algorithm("levels", tuple(range(8)), 0, (2, 4)).name
        'levels 2x4'
        """
        shown = "x".join(str(factor) for factor in self.factors)
        if self.kind == "leaders":
            return f"{self.leaders} leaders of {shown}"
        return self.kind if self.kind == "doubling" else f"levels {shown}"

    def rounds(self, elements: int) -> tuple[Round, ...]:
        """This rank's rounds of a sum of so many elements."""
        return _rounds(self, elements)


@lru_cache(maxsize=256)
def _rounds(algorithm: Algorithm, elements: int) -> tuple[Round, ...]:
    span, ranks, place, factors = Span(0, elements), algorithm.ranks, algorithm.place, algorithm.factors
    if algorithm.kind == "doubling":
        return tuple(doubling_sum(span, ranks, place))
    if algorithm.kind == "leaders":
        return tuple(leader_sum(span, ranks, factors, place, algorithm.leaders))
    return tuple(level_sum(span, ranks, factors, place))


@lru_cache(maxsize=256)
def scatter_rounds(elements: int, ranks: tuple[int, ...], place: int, piece: int, pieces: int) -> tuple[Round, ...]:
    """Rounds of the ``piece``-th of ``pieces`` parts of a reduce-scatter after which rank r has the r-th share."""
    return tuple(ring_scatter(_shares(elements, ranks, piece, pieces), ranks, place, "carry"))


@lru_cache(maxsize=256)
def gather_rounds(elements: int, ranks: tuple[int, ...], place: int, piece: int, pieces: int) -> tuple[Round, ...]:
    """Rounds of one part of an all-gather of such shares."""
    return tuple(ring_gather(_shares(elements, ranks, piece, pieces), ranks, place))


def _shares(elements: int, ranks: tuple[int, ...], piece: int, pieces: int) -> list[Span]:
    """The ``piece``-th part of every rank's share, in the order of the ring."""
    shares = split(Span(0, elements), len(ranks))
    return [split(shares[rank], pieces)[piece] for rank in ranks]


def check_factors(factors: Sequence[int], ranks: int) -> None:
    """Raise MeshError unless the factors multiply to the number of ranks."""
    if prod(factors) != ranks or any(factor < 1 for factor in factors):
        shown = " x ".join(str(factor) for factor in factors)
        raise MeshError(f"levels of {shown} are {prod(factors)} ranks, and there are {ranks}; give factors of {ranks}")
