"""Channels and duplicated worlds that engines use one after another.

Each costs threads and file descriptors, so an engine that is gone leaves its own to the next. Ranks collect garbage at
different times: a resource is leased again when it is free on all of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...world import Label, World
from .sum_queue import SumQueue

MOST = 63  # resources of one kind: bits of a word
_PATIENCE = 8  # engines that get none, after which Python's garbage is collected once more


class LeasePool:
    """The resources of one kind that some ranks of a world share; ``free`` are the numbers of those not in use."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.free: set[int] = set()
        self.refused = 0  # leases asked for while all were in use


class ChannelLease:
    """The right to use one resource (``thing``) of a pool until :meth:`release`."""

    def __init__(self, leases: LeasePool, number: int) -> None:
        self._leases, self._number = leases, number
        self.thing = leases.things[number]
        self.queue: SumQueue | None = None  # may still have sums to begin on it
        self.spoiled = False  # a pass did not end: its sums may be under way for ever

    def release(self) -> None:
        """Give the resource back, unless sums may still use it. Called by finalizers, in any thread."""
        if not self.spoiled and (self.queue is None or self.queue.idle):
            self._leases.free.add(self._number)


_pools: weakref.WeakKeyDictionary[World, dict[tuple[str, tuple[int, ...]], LeasePool]] = weakref.WeakKeyDictionary()


def _pools_of(world: World) -> dict[tuple[str, tuple[int, ...]], LeasePool]:
    """Sub-worlds use the connections of the world that they are a part of, and so its resources."""
    return _pools.setdefault(world.outermost, {})


def lease(
    world: World, kind: str, make: Callable[[int], Any], most: int = MOST, ranks: tuple[int, ...] | None = None
) -> ChannelLease | None:
    """Lease a resource that is free on all ``ranks``, or ``make`` a new one; None if there are ``most`` already.

    Called by all of ``ranks`` together.
    """
    ranks = tuple(range(world.size)) if ranks is None else ranks
    pool = _pools_of(world).setdefault((kind, world.numbers_outside(ranks)), LeasePool())
    if not pool.free and len(pool.things) >= most:
        if pool.refused % _PATIENCE == 0:
            gc.collect()
        pool.refused += 1
    free = pool.free.copy()  # finalizers of engines add to it in any thread
    mask = torch.tensor([sum(1 << number for number in free)], dtype=torch.int64, device="cpu")
    label = Label(f"which {kind} is free", "the gradients", "control")
    common = int(world.combined(mask, ranks, torch.bitwise_and, label))
    if common:
        number = (common & -common).bit_length() - 1
        pool.free.remove(number)
    elif len(pool.things) < most:
        number = len(pool.things)
        pool.things.append(make(number))
    else:
        return None
    return ChannelLease(pool, number)
