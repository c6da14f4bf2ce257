"""A recorded step replayed on a machine: computation on one stream, each world's channels on streams of their own.

The events of one rank carry all that is needed: local operations run in order, exchanges and sums begin where the
program begins them and are waited for where it waits. Communication that runs beside computation slows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..world.events import Begun, Computed, Event, Summed, Waited
from .collectives import exchange_seconds, sum_seconds
from .cost import Prices
from .machine import Machine


@dataclass
class Timeline:
    """Seconds of one step of one rank, and where they go."""

    seconds: float = 0.0
    compute: float = 0.0
    #: Waiting that computation did not hide, by what was waited for: "halo", "statistics", "gradients".
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    #: All communication, hidden or not.
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which the rank waits and computes nothing, whatever it waits for."""
        return sum(self.exposed.values())


@dataclass(frozen=True)
class UnderWay:
    """Communication that has begun: what for, when it begins to run, and when it ends."""

    kind: str
    starts: float
    ends: float


def kind_of(event: Begun | Summed) -> str:
    """What the communication is for, in the words of the explanation."""
    if event.label.channel.startswith("gradients"):
        return "gradients"
    return "statistics" if event.label.channel == "control" else "halo"


class Replay:
    """Takes events as they come, and tells what time it would be on the machine.

    A dry run may listen to its own events with one and read the clock off it: then gradients are planned from predicted
    times.
    """

    def __init__(self, rank: int, machine: Machine, prices: Prices) -> None:
        self.timeline = Timeline()
        self._rank, self._machine, self._prices = rank, machine, prices
        self._loss = machine.overlap_loss.value if machine.overlap_loss is not None else 0.0
        self._waiting = prices.load.waiting.value if prices.load is not None else 1.0
        self._now = 0.0
        self._busy: dict[tuple[int, str], float] = defaultdict(float)  # a channel carries one thing after another
        self._under_way: dict[int, UnderWay] = {}
        self._sums: dict[tuple[tuple[int, ...], int], float] = {}  # seconds by ranks and bytes

    def clock(self) -> float:
        """Predicted seconds since the first event."""
        return self._now

    @property
    def knows_workspace(self) -> bool:
        """Was the memory of operations measured on this machine?"""
        return self._prices.curves is not None

    def workspace(self, event: Computed) -> int:
        """Bytes that the operation takes while it runs, beside its operands and results."""
        return self._prices.workspace(event)

    def take(self, event: Event) -> None:
        """The next event of the rank."""
        if isinstance(event, Computed):
            seconds = self._prices.seconds(event)
            self._now += seconds
            self.timeline.compute += seconds
        elif isinstance(event, Begun | Summed):
            self._begin(event)
        elif isinstance(event, Waited):
            waited = self._under_way.pop(event.event, None)
            if waited is not None:
                self._wait(waited)

    def communication_seconds(self, event: Begun | Summed) -> float:
        """Of an exchange or a sum that has the links for itself."""
        load = self._prices.load
        if isinstance(event, Begun):
            return exchange_seconds(self._machine, self._rank, event.sends, load)
        key = event.ranks, event.bytes
        if key not in self._sums:
            self._sums[key] = sum_seconds(self._machine, event.bytes, event.ranks, load)
        return self._sums[key]

    def scheduled(self, event: Begun | Summed) -> UnderWay:
        """When the communication runs: after what its channel carries already."""
        channel = event.world, event.label.channel
        starts = max(self._now, self._busy[channel])
        ends = self._busy[channel] = starts + self.communication_seconds(event)
        return UnderWay(kind_of(event), starts, ends)

    def _begin(self, event: Begun | Summed) -> None:
        """Communication begins now, or when its channel is free; the rank does not wait for it here."""
        begun = self._under_way[event.number] = self.scheduled(event)
        self.timeline.communication[begun.kind] += begun.ends - begun.starts

    def _wait(self, waited: UnderWay) -> None:
        """Wait for communication: computing meanwhile hides it, but for the share that overlap costs."""
        hidden = max(0.0, min(self._now, waited.ends) - waited.starts)
        exposed = self._waiting * (self._loss * hidden + max(0.0, waited.ends - self._now))
        self.timeline.exposed[waited.kind] += exposed
        self._now += exposed

    def snapshot(self) -> Timeline:
        """The timeline up to now, without waiting for anything."""
        line = self.timeline
        return Timeline(self._now, line.compute, dict(line.exposed), dict(line.communication))

    def end(self) -> Timeline:
        """Wait for communication that is still in flight; the timeline of the whole step."""
        for waited in self._under_way.values():
            self._wait(waited)
        self._under_way.clear()
        self.timeline.seconds = self._now
        return self.timeline


def replay(events: Iterable[Event], rank: int, machine: Machine, prices: Prices) -> Timeline:
    """The predicted time of a step of that rank."""
    running = Replay(rank, machine, prices)
    for event in events:
        running.take(event)
    return running.end()
