"""What is measured: when gradients become ready, and what a sum costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...world import Label, World
from ..buckets.cutting import LinkCost

_PROBE, _PIECES, _REPEAT = 1 << 19, 8, 3  # elements of float32, in how many messages, how often
_DEAREST = 32  # more than this part of the probe's time a message costs only where processes wait for a processor
_OLD = 0.7  # weight of what was known before
_LOOK = (2, 4, 8)  # steps after which the plan is looked at; then every thirty-second
_EVERY = 32


class Clock:
    """Ready times by parameter in seconds after the first of a pass, and when the next forward needs it in seconds
    after it needs the first (less than 0: not known), averaged over passes."""

    def __init__(self, parameters: int) -> None:
        self.times = [0.0] * parameters
        self.needs = [-1.0] * parameters
        self.link: LinkCost | None = None
        self.passes = 0

    def learn(self, ready: dict[int, float]) -> None:
        if not ready:
            return
        start = min(ready.values())
        for index, moment in ready.items():
            new = moment - start
            # The first pass finds its memory, and much else, for the first time: it does not count long.
            self.times[index] = _OLD * self.times[index] + (1 - _OLD) * new if self.passes > 1 else new
        self.passes += 1

    def learn_needs(self, needs: dict[int, float]) -> None:
        for index, moment in needs.items():
            known = self.needs[index]
            self.needs[index] = moment if known < 0 else _OLD * known + (1 - _OLD) * moment

    def learn_link(self, sums: int, size: int, seconds: float) -> None:
        """So many sums, one after the other, took so long."""
        if self.link is None or sums < 1 or size < 1 << 20:
            return
        per_byte = max(1e-12, (seconds - sums * self.link.latency) / size)
        self.link = LinkCost(self.link.latency, _OLD * self.link.per_byte + (1 - _OLD) * per_byte)

    @property
    def time_to_look(self) -> bool:
        return self.passes in _LOOK or self.passes % _EVERY == 0


class FixedClock(Clock):
    """For sums that are the same from run to run: times follow from the order in which gradients come and their sizes,
    and what a sum costs is a guess. Nothing is measured."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(len(sizes))
        self._sizes = sizes
        self.link = LinkCost()

    def learn(self, ready: dict[int, float]) -> None:
        """In the order in which they came."""
        self.passes += 1
        moment = 0.0
        for index in ready:
            self.times[index] = moment
            moment += self._sizes[index] * LinkCost().per_byte

    def learn_needs(self, needs: dict[int, float]) -> None:
        """They stay unknown."""

    def learn_link(self, sums: int, size: int, seconds: float) -> None:
        """It stays a guess."""

    @property
    def time_to_look(self) -> bool:
        return False


def measured_link(world: World, ranks: tuple[int, ...]) -> LinkCost:
    """What one more message costs in a stream of them, and what a byte does: as one sum, and as many at once.

    That is less than the latency of a message by itself, for the next is under way while one is waited for.
    """
    if len(ranks) == 1:
        return LinkCost()
    # The least of each: what waits for a processor is not the wire's.
    one = min(_timed(world, ranks, 1) for _ in range(_REPEAT))
    many = min(_timed(world, ranks, _PIECES) for _ in range(_REPEAT))
    latency = min(max(1e-6, (many - one) / (_PIECES - 1)), one / _DEAREST)
    return LinkCost(latency, max(1e-12, (one - latency) / (4 * _PROBE)))


def _timed(world: World, ranks: tuple[int, ...], pieces: int) -> float:
    probe = torch.zeros(_PROBE, device="cpu").chunk(pieces)
    label = Label("what a sum costs", "backward", "probes")  # never in a row with gradients
    clock = world.events.clock
    started = clock()
    under_way = [world.begin_sum(piece, ranks, label) for piece in probe]
    for pending in under_way:
        pending.wait()
    return clock() - started
