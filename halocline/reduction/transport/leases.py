"""What engines of a world use one after another: channels for their sums, worlds beside the first.

Each costs threads and descriptors, so that an engine that is gone leaves its own to the next. Ranks collect garbage at
different times: one is taken again when it is free on all of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...world import Label, World
from ..schedule.control import Control
from .comm_thread import CommThread
from .sum_queue import SumQueue

MOST = 63  # of a kind: bits of a word
_PATIENCE = 8  # engines that get none, after which Python is asked to look for garbage once more


class LeasePool:
    """Those of one kind in a world."""

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
        self.queue: SumQueue | CommThread | None = None  # which may still have sums to begin on it
        self.spoiled = False  # a pass did not end, and nobody knows what is under way

    def release(self) -> None:
        if not self.spoiled and (self.queue is None or self.queue.idle):
            self._leases.free.add(self._number)


_leases: weakref.WeakKeyDictionary[World, dict[str, LeasePool]] = weakref.WeakKeyDictionary()


def lease(world: World, kind: str, make: Callable[[int], Any], most: int = MOST) -> ChannelLease | None:
    """One that is free on all ranks, or else a new one; None if there are ``most`` already. By all ranks together."""
    known = _leases.setdefault(world, {}).setdefault(kind, LeasePool())
    if not known.free and len(known.things) >= most:
        known.look_for_garbage()
    free = known.free.copy()  # engines that are collected, in any thread, add to it
    mask = torch.tensor([sum(1 << number for number in free)], dtype=torch.int64, device="cpu")
    label = Label(f"which {kind} is free", "the gradients", "control")
    common = int(world.combined(mask, tuple(range(world.size)), torch.bitwise_and, label))
    if common:
        number = (common & -common).bit_length() - 1
        known.free.remove(number)
    elif len(known.things) < most:
        number = len(known.things)
        known.things.append(make(number))
    else:
        return None
    return ChannelLease(known, number)


class Agreement:
    """A world and a way for an engine's ranks to agree in a thread beside backward. Made by all ranks together."""

    def __init__(self, world: World, control: Callable[[World, str], Control], name: str) -> None:
        found = lease(world, "world beside", lambda _: world.duplicate())
        assert found is not None, f"more than {MOST} models whose ranks take different ways"
        self.lease = found
        self.world: World = found.thing
        self.world.traffic.clear()
        self.control = control(self.world, name)
