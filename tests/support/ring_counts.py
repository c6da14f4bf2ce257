"""What sums over ranks send, counted; and the factorizations that levels may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from halocline.reduction.buckets.cutting import LinkCost
from halocline.reduction.transport.algorithms import Round
from halocline.reduction.transport.costs import level_seconds


def factorizations(ranks: int) -> list[tuple[int, ...]]:
    """In all orders.

    >>> factorizations(8)
    [(8,), (2, 4), (2, 2, 2), (4, 2)]
    """
    found: list[tuple[int, ...]] = [(ranks,)]
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            found += [(first, *rest) for rest in factorizations(ranks // first)]
    return found


def best_factors(ranks: int, links: Callable[[tuple[int, ...]], Sequence[LinkCost]], size: int) -> tuple[int, ...]:
    """The cheapest factorization; ``links`` says what its levels cost."""
    return min(factorizations(ranks), key=lambda factors: sum(level_seconds(factors, links(factors), size)))


def messages(rounds: Iterable[Round]) -> int:
    """That the rank sends."""
    return sum(each.to is not None for each in rounds)


def elements_sent(rounds: Iterable[Round]) -> int:
    return sum(each.sent.size for each in rounds)


def level_messages(factors: Sequence[int]) -> int:
    """A rank's, in one chunk.

    >>> [level_messages(factors) for factors in ((256,), (4, 64), (4, 8, 8))]
    [510, 132, 34]
    """
    return sum(2 * (factor - 1) for factor in factors)


def level_bytes(factors: Sequence[int], size: int) -> list[float]:
    """That a rank sends on each level, of a sum of so many bytes.

    >>> level_bytes((4, 64), 1024)
    [1536.0, 504.0]
    """
    return [2 * (factor - 1) * size / prod(factors[: level + 1]) for level, factor in enumerate(factors)]


def leader_bytes(nodes: int, leaders: int, size: int) -> float:
    """That a leader sends to other nodes."""
    return 2 * (nodes - 1) / nodes * size / leaders
