"""A recorded step replayed on a machine: two streams, one for computation and one for each world's communication.

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
        return sum(self.exposed.values())


def kind_of(event: Begun | Summed) -> str:
    """What the communication is for, in the words of the explanation."""
    if event.label.channel.startswith("gradients"):
        return "gradients"
    return "statistics" if event.label.channel == "control" else "halo"


def replay(events: Iterable[Event], rank: int, machine: Machine, prices: Prices) -> Timeline:
    """The predicted time of a step of that rank."""
    now, timeline = 0.0, Timeline()
    busy: dict[tuple[int, str], float] = defaultdict(float)  # a channel of a world carries one thing after another
    finish: dict[int, tuple[float, str]] = {}
    for event in events:
        if isinstance(event, Computed):
            seconds = prices.seconds(event)
            now += seconds
            timeline.compute += seconds
        elif isinstance(event, Begun | Summed):
            kind = kind_of(event)
            seconds = (
                exchange_seconds(machine, rank, event.sends)
                if isinstance(event, Begun)
                else sum_seconds(machine, event.bytes, event.ranks)
            )
            channel = event.world, event.label.channel
            busy[channel] = max(now, busy[channel]) + seconds
            finish[event.number] = busy[channel], kind
            timeline.communication[kind] += seconds
        elif isinstance(event, Waited) and event.event in finish:
            ends, kind = finish.pop(event.event)
            timeline.exposed[kind] += max(0.0, ends - now)
            now = max(now, ends)
    for ends, kind in finish.values():  # begun and never waited for inside the step
        timeline.exposed[kind] += max(0.0, ends - now)
        now = max(now, ends)
    timeline.seconds = now
    return timeline
