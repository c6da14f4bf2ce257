"""The planner's replay with what a cluster adds: agreement before sums, links that several share, late gradients.

Operations, collectives and machines are those of :mod:`halocline.plan`; here they only get other moments to begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..plan.collectives import group_of, sum_seconds
from ..plan.cost import Prices
from ..plan.machine import Machine, NetworkLevel
from ..plan.replay import Replay, Timeline, UnderWay, kind_of
from ..reduction.buckets.cutting import LinkCost
from ..reduction.transport.costs import best_chunk, level_seconds, piped_seconds
from ..world.events import Begun, Computed, Event, Summed, Waited
from .levers import MESSAGE_US, Levers, agreement_seconds

GRADIENTS, CONTROL = "gradients", "agreement"
STEPS = 3  # replayed where a step's gradients are waited for in the next


class StreamSpan(NamedTuple):
    """Something that ran on a stream of one rank, in seconds."""

    stream: str
    name: str
    starts: float
    ends: float
    place: str = ""


@dataclass(frozen=True)
class SharedTimeline:
    """A rank's timeline, with its spans where they were asked for."""

    timeline: Timeline
    spans: tuple[StreamSpan, ...] = ()


class Rounds:
    """Agreements, one after another: what is ready when one begins may go when it ends."""

    def __init__(self, seconds: float, cycle: float) -> None:
        self.seconds, self.cycle = seconds, cycle
        self.starts = self.ends = -math.inf

    def granted(self, ready: float) -> float:
        """When a sum that is ready at ``ready`` may begin. Calls come in the order of time."""
        if not self.seconds:
            return ready
        if ready > self.starts:
            self.starts = max(self.ends, math.ceil(ready / self.cycle) * self.cycle if self.cycle else ready)
            self.ends = self.starts + self.seconds
        return self.ends


class ClusterReplay(Replay):
    """Replays one rank's events with the levers of a run; ``spans`` collects what ran where, for a trace."""

    def __init__(
        self,
        rank: int,
        machine: Machine,
        prices: Prices,
        levers: Levers,
        ranks: int,
        spans: list[StreamSpan] | None = None,
    ) -> None:
        super().__init__(rank, machine, prices)
        self.levers, self.ranks, self.spans = levers, ranks, spans
        self._rounds = Rounds(agreement_seconds(levers.control, ranks, machine), levers.cycle_ms * 1e-3)
        counted = machine.device.kind == "gpu" and ranks > 1  # on CPUs it is part of what operations cost
        self._begins = MESSAGE_US.value * 1e-6 if counted else 0.0
        self._links_busy: dict[str, tuple[str, float]] = {}  # by level: which channel uses it, and until when
        self._late: dict[int, UnderWay] = {}  # sums of the step before, with lag
        self._levels: dict[tuple[int, ...], tuple[Sequence[int], Sequence[LinkCost]]] = {}

    def take(self, event: Event) -> None:
        """The next event of the rank."""
        if isinstance(event, Waited) and self.levers.lag:
            self._wait_for_the_step_before(event)
            return
        before = self._now
        super().take(event)
        if self.spans is not None and isinstance(event, Computed):
            self.spans.append(StreamSpan("compute", event.name, before, self._now, event.place))
        elif self.spans is not None and isinstance(event, Waited) and self._now > before:
            self.spans.append(StreamSpan("waiting", str(event.label), before, self._now))

    def _wait_for_the_step_before(self, event: Waited) -> None:
        """With lag a step waits for the gradients of the step before, and leaves its own to the next."""
        begun = self._under_way.get(event.event)
        if begun is None or begun.kind != GRADIENTS:
            super().take(event)
            return
        earlier, self._late[event.event] = self._late.get(event.event), self._under_way.pop(event.event)
        if earlier is not None:
            self._wait(earlier)

    def communication_seconds(self, event: Begun | Summed) -> float:
        """Of a sum by the rings that were chosen; of all else as the planner has it."""
        if isinstance(event, Begun) or self.levers.rings == "nccl" or kind_of(event) != GRADIENTS:
            return super().communication_seconds(event)
        if self.levers.rings == "hybrid":
            return hybrid_seconds(self._machine, event.bytes, event.ranks)
        factors, links = self._rings(event.ranks)
        chunked = piped_seconds(factors, links, event.bytes, best_chunk(factors, links, event.bytes))
        return min(chunked, sum(level_seconds(factors, links, event.bytes)))

    def _rings(self, ranks: tuple[int, ...]) -> tuple[Sequence[int], Sequence[LinkCost]]:
        """Sizes and links of the rings over these ranks, worked out once: every bucket travels over the same."""
        if ranks not in self._levels:
            make = flat_ring if self.levers.rings == "flat" else level_rings
            self._levels[ranks] = make(self._machine, ranks)
        return self._levels[ranks]

    def scheduled(self, event: Begun | Summed) -> UnderWay:
        """After the agreement and what its channel carries; slower where another channel uses the same links."""
        kind, channel = kind_of(event), (event.world, event.label.channel)
        if kind == GRADIENTS:  # the thread that runs the program begins the sum
            self._now += self._begins
            self.timeline.exposed[kind] += self._begins
        ready = self._rounds.granted(self._now) if kind == GRADIENTS else self._now
        starts = max(ready, self._busy[channel])
        seconds = self.communication_seconds(event)
        level = self._level(event)
        user, until = self._links_busy.get(level.name, ("", 0.0))
        if user != event.label.channel and until > starts:
            seconds += min(seconds, until - starts)
        ends = self._busy[channel] = starts + seconds
        self._links_busy[level.name] = event.label.channel, max(until, ends)
        if self.spans is not None and seconds:
            self.spans.append(StreamSpan(kind, str(event.label), starts, ends))
            if ready > self._now:
                self.spans.append(
                    StreamSpan(
                        CONTROL, f"agreement on {event.label}", max(self._now, ready - self._rounds.seconds), ready
                    )
                )
        return UnderWay(kind, starts, ends)

    def _level(self, event: Begun | Summed) -> NetworkLevel:
        """The outermost level that the communication uses."""
        if isinstance(event, Summed):
            per_node = self._machine.devices_per_node
            inside = event.ranks[0] // per_node == event.ranks[-1] // per_node
            return self._machine.links[0 if inside else -1]
        used = [self._machine.link_between(self._rank, peer) for peer, _ in event.sends]
        return max(used or self._machine.links[:1], key=self._machine.links.index)


def flat_ring(machine: Machine, ranks: Sequence[int]) -> tuple[Sequence[int], Sequence[LinkCost]]:
    """One ring over all ranks, at the pace of its slowest link."""
    group = group_of(machine, ranks)
    link = group.outer or group.inner
    return (len(ranks),), (_cost(link, 1),)


def level_rings(machine: Machine, ranks: Sequence[int]) -> tuple[Sequence[int], Sequence[LinkCost]]:
    """Rings inside nodes, then between them, all rings of a level at once."""
    group = group_of(machine, ranks)
    if group.outer is None or group.nodes == len(ranks):
        return flat_ring(machine, ranks)
    inside = len(ranks) // group.nodes
    return (inside, group.nodes), (_cost(group.inner, 1), _cost(group.outer, min(inside, group.outer.shared_by)))


def hybrid_seconds(machine: Machine, size: int, ranks: Sequence[int]) -> float:
    """A sum inside each node, of the nodes by one rank or more of each, and back: all of a node share its port."""
    group = group_of(machine, ranks)
    if group.outer is None or group.nodes == len(ranks):
        return sum_seconds(machine, size, ranks)
    one_a_node = list({rank // machine.devices_per_node: rank for rank in ranks}.values())
    inside = level_seconds((len(ranks) // group.nodes,), (_cost(group.inner, 1),), size)
    return sum(inside) + sum_seconds(machine, size, one_a_node)


def ring_steps(factors: Sequence[int]) -> int:
    """Messages that a rank sends one after another in a sum over these levels."""
    return round(piped_seconds(factors, [LinkCost(1.0, 0.0)] * len(factors), 1.0, 1.0))


def _cost(link: NetworkLevel, flows: int) -> LinkCost:
    """Latency in seconds and seconds a byte, where ``flows`` rings share the link."""
    return LinkCost(link.latency_us.value * 1e-6, flows / (link.gb_per_s.value * 1e9))


def replayed(
    events: Iterable[Event],
    rank: int,
    machine: Machine,
    prices: Prices,
    levers: Levers,
    ranks: int,
    trace: bool = False,
) -> SharedTimeline:
    """One step of one rank: with lag, one in the middle of a run."""
    spans: list[StreamSpan] | None = [] if trace else None
    make = partial(ClusterReplay, rank, machine, prices, levers, ranks)
    if not levers.lag:
        running = make(spans)
        for event in events:
            running.take(event)
        return SharedTimeline(running.end(), tuple(spans or ()))
    running, kept = make(None), list(events)
    before = Timeline()
    for number in range(STEPS):
        if number == STEPS - 1:
            before, running.spans = running.snapshot(), spans
        for event in kept:
            running.take(event)
    return SharedTimeline(since(running.snapshot(), before), tuple(spans or ()))


def since(later: Timeline, earlier: Timeline) -> Timeline:
    """What the timeline gained."""
    kinds = {*later.exposed, *later.communication}
    return Timeline(
        later.seconds - earlier.seconds,
        later.compute - earlier.compute,
        {kind: later.exposed.get(kind, 0.0) - earlier.exposed.get(kind, 0.0) for kind in kinds},
        {kind: later.communication.get(kind, 0.0) - earlier.communication.get(kind, 0.0) for kind in kinds},
    )
