"""How to cut gradients, in the order in which they become ready, into messages so that the last is done early.

A message of n bytes takes ``latency + n * per_byte`` seconds. It starts when all its gradients are ready and the
message before it is done. Runs of neighbours in ready order suffice: exchanging two gradients of unequal ready times
never helps. The best cut is found exactly, by dynamic programming over where the last message begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

_CLOSE = 1.02  # of the best time: the cost of a message is not known any better
_MESSAGES, _FEWEST = 16, 4  # how many of moderate size, where the link is always busy and where it hardly is
_LEAST = 3_900_000  # bytes of a moderate message
_SMALL = 1 << 18  # bytes of the smallest message, where each is needed at a time of its own
_OF_WHAT_IS_LEFT = 2 / 3  # largest part of the remaining bytes that one tapered message takes


@dataclass(frozen=True)
class LinkCost:
    """What a message, or a sum over all ranks, costs: seconds, and seconds per byte."""

    latency: float = 1e-3
    per_byte: float = 1e-8

    def seconds(self, size: float) -> float:
        """Of a message of so many bytes, by itself."""
        return self.latency + self.per_byte * size


def best_cut(ready: Sequence[float], sizes: Sequence[int], link: LinkCost, most: float = math.inf) -> list[int]:
    """Where messages of at most ``most`` bytes begin (a larger gradient by itself), for gradients in ready order.

    >>> best_cut([0.0, 1.0, 1.0], [100, 100, 100], LinkCost(0.1, 0.001))
    [0, 1]
    """
    count = len(sizes)
    if not count:
        return []
    upto = np.concatenate([[0.0], np.cumsum(np.asarray(sizes, dtype=np.float64))])
    finish = np.zeros(count + 1)
    begins = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        size = upto[end] - upto[:end]
        done = np.maximum(finish[:end], ready[end - 1]) + link.latency + link.per_byte * size
        done[:-1][size[:-1] > most] = math.inf
        # Among equally good cuts the one with the fewest messages: the earliest beginning.
        begins[end] = int(np.argmax(done <= done.min() * (1 + 1e-12) + 1e-15))
        finish[end] = done[begins[end]]
    cut, end = [], count
    while end > 0:
        end = int(begins[end])
        cut.append(end)
    return cut[::-1]


def robust_cut(ready: Sequence[float], sizes: Sequence[int], link: LinkCost) -> list[int]:
    """The fewest messages that are done nearly as early as the best cut, since each costs processor time.

    The busier the link, the smaller they may be: with messages of moderate size a gradient that comes later than
    planned delays less, and the transport works on several at once.
    """
    total, deadline = sum(sizes), _CLOSE * finish_time(best_cut(ready, sizes, link), ready, sizes, link)
    load = link.seconds(total) / max(deadline - link.seconds(total), link.latency)
    moderate = max(_LEAST, total / min(_MESSAGES, max(_FEWEST, _MESSAGES * load)))
    return fewest_cut(ready, sizes, link, deadline, moderate) or best_cut(ready, sizes, link)


def fewest_cut(
    ready: Sequence[float], sizes: Sequence[int], link: LinkCost, deadline: float, most: float = math.inf
) -> list[int]:
    """Where the fewest messages of at most ``most`` bytes begin that are all done by ``deadline``; empty if impossible.

    From the last backwards, each message takes as many gradients as its own deadline allows, and leaves the rest of the
    time to those before it.

    >>> fewest_cut([0.0, 1.0, 1.0], [100, 100, 100], LinkCost(0.1, 0.001), 1.35)
    [0, 1]
    """
    cut: list[int] = []
    end = len(sizes)
    while end:
        begin, size = end - 1, sizes[end - 1]
        while begin and size + sizes[begin - 1] <= most:
            if ready[end - 1] + link.seconds(size + sizes[begin - 1]) > deadline:
                break
            begin -= 1
            size += sizes[begin]
        if ready[end - 1] + link.seconds(size) > deadline:
            return []
        deadline -= link.seconds(size)
        cut.append(begin)
        end = begin
    return cut[::-1]


def finish_time(cut: Sequence[int], ready: Sequence[float], sizes: Sequence[int], link: LinkCost) -> float:
    """Seconds at which the last message of this cut is done."""
    done = 0.0
    for begin, end in zip(cut, [*cut[1:], len(sizes)], strict=True):
        done = max(done, ready[end - 1]) + link.seconds(sum(sizes[begin:end]))
    return done


def finer_cuts(ready: Sequence[float], sizes: Sequence[int], link: LinkCost) -> list[list[int]]:
    """Candidate cuts into messages of several sizes, large ones first. Small messages cost more, but delay urgent ones
    less. The last gradients to come are needed first, so some cuts taper off towards them."""
    total = sum(sizes)
    caps = [max(_SMALL, total / count) for count in (6, 12, 24, 48, 96)]
    even = [fewest_cut(ready, sizes, link, math.inf, cap) for cap in caps]
    return even + [_tapered(sizes, cap) for cap in caps]


def _tapered(sizes: Sequence[int], most: float) -> list[int]:
    """Messages of at most ``most`` bytes and at most two thirds of the bytes that are left when their last gradient
    comes, that gradient included."""
    cut, filled, left = [0], 0, sum(sizes)
    for place, size in enumerate(sizes):
        if filled and filled + size > max(_SMALL / 4, min(most, _OF_WHAT_IS_LEFT * left)):
            cut.append(place)
            filled = 0
        filled += size
        left -= size
    return cut


@dataclass(frozen=True)
class BucketTiming:
    """When a bucket is ready and when it is needed, in seconds, and its bytes."""

    ready: float
    needed: float
    size: int


def deadline_order(messages: Sequence[BucketTiming], link: LinkCost) -> list[int]:
    """The order in which messages go if, whenever the link is free, the ready message that is needed first starts.

    >>> deadline_order([BucketTiming(0, 9, 10), BucketTiming(1, 8, 10), BucketTiming(2, 7, 10)], LinkCost(0.0, 0.3))
    [0, 2, 1]
    """
    left, now, order = set(range(len(messages))), 0.0, []
    while left:
        now = max(now, min(messages[place].ready for place in left))
        there = [place for place in left if messages[place].ready <= now]
        order.append(min(there, key=lambda place: (messages[place].needed, place)))
        left.remove(order[-1])
        now += link.seconds(messages[order[-1]].size)
    return order


def done_by_need(ready: Sequence[float], needed: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """When each is done, if the one that is needed first always goes first and interrupts the others.

    >>> done_by_need([0.0, 1.0], [5.0, 1.0], [3.0, 1.0])
    [4.0, 2.0]
    """
    left, done, now = list(seconds), [0.0] * len(ready), 0.0
    coming = sorted(range(len(ready)), key=ready.__getitem__, reverse=True)
    there: list[tuple[float, int]] = []  # a heap by need
    while coming or there:
        if not there:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            heappush(there, (needed[coming[-1]], coming.pop()))
        first = there[0][1]
        until = min(now + left[first], ready[coming[-1]] if coming else math.inf)
        left[first] -= until - now
        now = until
        if left[first] <= 1e-12:
            done[first] = now
            heappop(there)
    return done


def urgent_lateness(messages: Sequence[BucketTiming], link: LinkCost, express: int, chunk: int) -> float:
    """As :func:`lateness`, where the most urgent message interrupts the others.

    Messages of more than ``express`` bytes go round rings and wait in every round for what is under way: in all about
    half as long as a ``chunk`` takes.
    """
    needed = [message.needed for message in messages]
    done = done_by_need([message.ready for message in messages], needed, [link.seconds(m.size) for m in messages])
    waits = [link.per_byte * chunk / 2 * (message.size > express) for message in messages]
    return max((end + wait - need for end, wait, need in zip(done, waits, needed, strict=True)), default=0.0)


def lateness(messages: Sequence[BucketTiming], link: LinkCost, shared: bool = False) -> float:
    """The longest time by which a message is done after it is needed, if they go in this order.

    ``shared``: one more is always under way, so that each takes twice as long and begins that much earlier.
    """
    done = late = 0.0
    for message in messages:
        done = max(done, message.ready) + link.seconds(message.size)
        late = max(late, done + shared * link.per_byte * message.size - message.needed)
    return late
