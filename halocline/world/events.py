"""What a rank does, as one stream of typed events, which counters, dry records, traces and reports read.

A world and its duplicates share a stream. An event has a number in it, the world that it happened in (0 for the first,
n for its n-th duplicate) and its time by the stream's clock. Listeners run in the thread that emits.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

Sizes = tuple[tuple[int, int], ...]  # a peer, and the bytes that go to it or come from it


class Label(NamedTuple):
    """What a communication is for: shown in errors, and part of the tag. Channels never wait for each other.

    Where the world has priorities, messages with the smallest ``urgency`` go first over a link.
    """

    operation: str
    place: str
    channel: str = "moves"
    urgency: float = 0.0

    def __str__(self) -> str:
        return f"{self.operation} in {self.place}"


class Begun(NamedTuple):
    """An exchange has begun; bytes by peer."""

    number: int
    world: int
    time: float
    label: Label
    sends: Sizes
    receives: Sizes
    dtype: torch.dtype


class Summed(NamedTuple):
    """A sum of ``bytes`` over ``ranks`` has begun, as one call of the transport. This rank is one of them."""

    number: int
    world: int
    time: float
    label: Label
    ranks: tuple[int, ...]
    bytes: int
    dtype: torch.dtype


class Waited(NamedTuple):
    """A wait for ``event``, the number of a :class:`Begun` or :class:`Summed`, began at ``time`` and has ended."""

    number: int
    world: int
    time: float
    label: Label
    event: int
    seconds: float


class Redistributed(NamedTuple):
    """An operand was moved so that an operation is possible: ``kind`` is "gather", "shuffle", "ring" or "hc.gather"."""

    number: int
    world: int
    time: float
    label: Label
    kind: str
    bytes: int  # received beyond this rank's own part


class Averaged(NamedTuple):
    """Gradients of one bucket became means at ``time``; ready on this rank, and sent, at the times given."""

    number: int
    world: int
    time: float
    label: Label
    step: int
    bucket: int
    parameters: tuple[str, ...]
    bytes: int
    ready: float
    sent: float


class Computed(NamedTuple):
    """One local operation of torch with this rank's shapes. Emitted only inside ``halocline.program.record``."""

    number: int
    world: int
    time: float
    name: str
    place: str
    phase: str  # "forward" or "backward"
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None  # of the first operand
    flops: float
    bytes: int  # read and written
    options: tuple[object, ...] = ()  # arguments that are no tensors: integers, flags, and tuples of them


Event = Begun | Summed | Waited | Redistributed | Averaged | Computed
Listener = Callable[[Event], object]


class EventStream:
    """Calls the listeners of a rank with its events, in the order of their numbers within a thread."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        #: Seconds. A dry run that is priced while it runs sets it to predicted time, so that gradients are planned from
        #: when they would be ready on the machine, not on the host that plans.
        self.clock: Callable[[], float] = time.perf_counter
        self.numbers = count(1)
        self.worlds = count(0)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Inside, ``listener`` is called with every event of all threads."""
        self.add(listener)
        try:
            yield
        finally:
            self.remove(listener)

    def add(self, listener: Listener) -> None:
        """Call ``listener`` with every event from now on."""
        self.listeners = (*self.listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling ``listener``."""
        self.listeners = tuple(each for each in self.listeners if each != listener)


@dataclass
class Traffic:
    """Counters over the events of one world since it was made or the counters were cleared."""

    messages: int = 0  # sent
    moved_bytes: int = 0  # received by moves
    gathered_bytes: int = 0
    sums: int = 0
    summed_bytes: int = 0
    transport_bytes: int = 0  # of messages sent and tensors summed
    #: Seconds by channel that a rank has waited: communication that was not hidden by work.
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    gathers: Counter[str] = field(default_factory=Counter)
    shuffles: Counter[str] = field(default_factory=Counter)
    rings: Counter[str] = field(default_factory=Counter)

    def count(self, event: Event) -> None:
        """Add an event to the counters."""
        if isinstance(event, Begun):
            self.messages += len(event.sends)
            for _, size in event.sends:
                self.transport_bytes += size
            if event.label.channel == "moves":
                for _, size in event.receives:
                    self.moved_bytes += size
        elif isinstance(event, Waited):
            self.waited[event.label.channel] += event.seconds
        elif isinstance(event, Summed):
            self.sums += 1
            self.summed_bytes += event.bytes
            self.transport_bytes += event.bytes
        elif isinstance(event, Redistributed):
            self.gathered_bytes += event.bytes
            self._counter(event.kind)[str(event.label)] += 1

    def times(self, kind: str, label: Label) -> int:
        """How often a redistribution of that kind happened with this label."""
        return self._counter(kind)[str(label)]

    def _counter(self, kind: str) -> Counter[str]:
        return {"gather": self.gathers, "shuffle": self.shuffles, "ring": self.rings}.get(kind, Counter())

    def clear(self) -> None:
        """Set all counters to zero."""
        self.messages = self.moved_bytes = self.gathered_bytes = self.sums = 0
        self.summed_bytes = self.transport_bytes = 0
        for counter in (self.waited, self.gathers, self.shuffles, self.rings):
            counter.clear()
