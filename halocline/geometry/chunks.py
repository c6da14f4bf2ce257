"""One box in chunks that are small enough, each as large as it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product

from .interval import Box, Interval


def chunks_of(box: Box, order: Sequence[int], elements: Callable[[Box], int], most: int) -> list[Box]:
    """``box`` cut evenly along the first dim of ``order`` that suffices, and as thin as can be along those before it.

    ``elements`` says how many elements the work on a box takes, its halo included. Where even single indices along all
    dims of ``order`` are too many, those are the chunks.

    >>> from math import prod
    >>> from .interval import shape_of, whole
    >>> [shape_of(b) for b in chunks_of((whole(2), whole(5)), (0, 1), lambda b: prod(shape_of(b)), 3)]
    [(1, 2), (1, 3), (1, 2), (1, 3)]
    """
    pieces = [[interval] for interval in box]
    largest = list(box)
    for dim in order:
        parts = _parts(tuple(largest), dim, elements, most)
        pieces[dim] = evenly(box[dim], parts)
        largest[dim] = max(pieces[dim], key=lambda piece: piece.size)
        if elements(tuple(largest)) <= most:
            break
    return list(product(*pieces))


def _parts(box: Box, dim: int, elements: Callable[[Box], int], most: int) -> int:
    """Into how many pieces ``dim`` must go: the fewest that are small enough, or one for each index."""
    size = box[dim].size
    parts = min(size, max(1, -(-elements(box) // most)))
    while parts < size:
        largest = -(-size // parts)
        sample = Interval(box[dim].lo, box[dim].lo + largest)
        if elements((*box[:dim], sample, *box[dim + 1 :])) <= most:
            break
        parts = -(-size // (largest - 1))  # the next count whose largest piece is smaller
    return max(1, parts)


def evenly(interval: Interval, parts: int) -> list[Interval]:
    """The interval in as many pieces of about one size."""
    points = [interval.lo + interval.size * part // parts for part in range(parts + 1)]
    return [Interval(lo, hi) for lo, hi in pairwise(points)]


def cut_at(interval: Interval, points: Sequence[int]) -> list[Interval]:
    """The interval in pieces that begin at those of ``points`` that lie inside.

    >>> cut_at(Interval(2, 9), [0, 4, 9])
    [Interval(lo=2, hi=4), Interval(lo=4, hi=9)]
    """
    inside = sorted({point for point in points if interval.lo < point < interval.hi})
    return [Interval(lo, hi) for lo, hi in pairwise([interval.lo, *inside, interval.hi])]
