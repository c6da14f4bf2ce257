"""What engines of a world use one after another: channels for their sums, duplicates of the world.

Each costs threads and descriptors, so that an engine that is gone leaves its own to the next. Ranks collect garbage at
different times: a thing is leased again when it is free on all of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...world import CommThread, Label, World
from ..schedule.control import Control
from .sum_queue import SumQueue

MOST = 63  # of a kind: bits of a word
_PATIENCE = 8  # engines that get none, after which Python is asked to look for garbage once more


class LeasePool:
    """The things of one kind that some ranks of a world share."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.free: set[int] = set()
        self.refused = 0

    def look_for_garbage(self) -> None:
        if self.refused % _PATIENCE == 0:
            gc.collect()
        self.refused += 1


class ChannelLease:
    """One of them, till :meth:`release`."""

    def __init__(self, leases: LeasePool, number: int) -> None:
        self._leases, self._number = leases, number
        self.thing = leases.things[number]
        self.queue: SumQueue | None = None  # which may still have sums to begin on it
        self.spoiled = False  # a pass did not end, and sums of it may be under way

    def release(self) -> None:
        if not self.spoiled and (self.queue is None or self.queue.idle):
            self._leases.free.add(self._number)


_pools: weakref.WeakKeyDictionary[World, dict[tuple[str, tuple[int, ...]], LeasePool]] = weakref.WeakKeyDictionary()


def lease(
    world: World, kind: str, make: Callable[[int], Any], most: int = MOST, ranks: tuple[int, ...] | None = None
) -> ChannelLease | None:
    """One that is free on all ``ranks``, or else a new one; None if there are ``most`` already. By them together."""
    ranks = tuple(range(world.size)) if ranks is None else ranks
    pool = _pools.setdefault(world, {}).setdefault((kind, ranks), LeasePool())
    if not pool.free and len(pool.things) >= most:
        pool.look_for_garbage()
    free = pool.free.copy()  # engines that are collected, in any thread, add to it
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


class Agreement:
    """A duplicated world and its thread, in which ranks agree while backward runs. Made by all ranks together."""

    def __init__(self, world: World, control: Callable[[World, str], Control], name: str) -> None:
        leased = lease(world, "duplicated world", lambda _: (world.duplicate(), CommThread("halocline agreement")))
        assert leased is not None, f"more than {MOST} models whose ranks take different paths"
        self.lease = leased
        self.world: World = leased.thing[0]
        self.thread: CommThread = leased.thing[1]
        self.world.traffic.clear()
        self.control = control(self.world, name)
