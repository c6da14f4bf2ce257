"""What is measured: when gradients become ready, and what a sum costs."""

from __future__ import annotations

import time
from statistics import median

import torch

from ..world import Label, World
from .grouping import Link

_SMALL, _LARGE = 1 << 10, 1 << 18  # elements of float32: where latency rules, and where the wire does
_OLD = 0.7  # weight of what was known before
_LOOK = (2, 4, 8)  # steps after which the plan is looked at; then every sixteenth
_EVERY = 16


class Clock:
    """Ready times by parameter in seconds after the first of a pass, averaged over passes."""

    def __init__(self, parameters: int) -> None:
        self.times = [0.0] * parameters
        self.link: Link | None = None
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

    def learn_link(self, sums: int, size: int, seconds: float) -> None:
        """So many sums, one after the other, took so long."""
        if self.link is None or sums < 1 or size < 1 << 20:
            return
        per_byte = max(1e-12, (seconds - sums * self.link.latency) / size)
        self.link = Link(self.link.latency, _OLD * self.link.per_byte + (1 - _OLD) * per_byte)

    @property
    def time_to_look(self) -> bool:
        return self.passes in _LOOK or self.passes % _EVERY == 0


def measured_link(world: World, everyone: tuple[int, ...], channel: str) -> Link:
    """A few sums of two sizes. The least of the small ones: what waits for a processor is not the wire's."""
    if world.size == 1:
        return Link()
    small = min(_timed(world, everyone, channel, _SMALL) for _ in range(5))
    large = median(_timed(world, everyone, channel, _LARGE) for _ in range(3))
    return Link.fitted((4 * _SMALL, small), (4 * _LARGE, large))


def _timed(world: World, everyone: tuple[int, ...], channel: str, elements: int) -> float:
    probe = torch.zeros(elements, device="cpu")
    started = time.perf_counter()
    world.begin_sum(probe, everyone, Label("what a sum costs", "backward", channel)).wait()
    return time.perf_counter() - started
