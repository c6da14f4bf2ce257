"""Measurements that bucket plans are made from: when gradients become ready, and what a sum costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...world import Label, World
from ..buckets.cutting import LinkCost

_PROBE, _PIECES, _REPEAT = 1 << 19, 8, 3  # elements of float32, in how many messages, how often
_DEAREST = 32  # a message costs at most 1/32 of the probe; more is measured only where processes wait for a processor
_OLD = 0.7  # weight of earlier measurements in a running mean
_LOOK, _EVERY = (2, 4, 8), 32  # passes after which the plan is reviewed; then after every thirty-second


class Clock:
    """Running means over passes, by parameter: ``times`` at which gradients are ready, in seconds after the first of
    the pass, and ``needs``, at which the next forward needs each parameter, in seconds after the first (negative: not
    known); and the cost of a sum."""

    def __init__(self, parameters: int) -> None:
        self.times = [0.0] * parameters
        self.needs = [-1.0] * parameters
        self.link: LinkCost | None = None
        self.passes = 0

    def learn(self, ready: dict[int, float]) -> None:
        """Take in the moments of one pass, by parameter."""
        if not ready:
            return
        start = min(ready.values())
        for index, moment in ready.items():
            new = moment - start
            # The first passes allocate memory and warm caches up, so their times are replaced and not averaged.
            self.times[index] = _OLD * self.times[index] + (1 - _OLD) * new if self.passes > 1 else new
        self.passes += 1

    def learn_needs(self, needs: dict[int, float]) -> None:
        """Take in when one forward needed each parameter."""
        for index, moment in needs.items():
            known = self.needs[index]
            self.needs[index] = moment if known < 0 else _OLD * known + (1 - _OLD) * moment

    def learn_link(self, sums: int, size: int, seconds: float) -> None:
        """So many sums, one after another, of ``size`` bytes in all took so long."""
        if self.link is None or sums < 1 or size < 1 << 20:
            return
        per_byte = max(1e-12, (seconds - sums * self.link.latency) / size)
        self.link = LinkCost(self.link.latency, _OLD * self.link.per_byte + (1 - _OLD) * per_byte)

    @property
    def time_to_look(self) -> bool:
        """Should the plan be reviewed after this pass? The same on all ranks."""
        return self.passes in _LOOK or self.passes % _EVERY == 0


class FixedClock(Clock):
    """A clock for plans that are the same in every run: times follow from the order in which gradients come and from
    their sizes in bytes, and the cost of a sum is a guess. Nothing is measured."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(len(sizes))
        self._sizes = sizes
        self.link = LinkCost()

    def learn(self, ready: dict[int, float]) -> None:
        """Only the order counts, which is the dict's."""
        self.passes += 1
        moment = 0.0
        for index in ready:
            self.times[index] = moment
            moment += self._sizes[index] * LinkCost().per_byte

    def learn_needs(self, needs: dict[int, float]) -> None:
        """Needs stay unknown."""

    def learn_link(self, sums: int, size: int, seconds: float) -> None:
        """The cost stays a guess."""

    @property
    def time_to_look(self) -> bool:
        """Never."""
        return False


def measured_link(world: World, ranks: tuple[int, ...]) -> LinkCost:
    """The cost of one more message in a stream of them, and of a byte, from one large sum and many small ones.

    That is less than the latency of a single message, since the next is under way while one is waited for. By ``ranks``
    together.
    """
    if len(ranks) == 1:
        return LinkCost()
    # The minimum of several tries: waits for a processor do not count.
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
