"""The minimum effective task granularity, METG: the shortest task at which a runtime still reaches half the best rate.

By Task Bench's rule: ranks and tasks stay, the iterations of the kernel shrink. A task's granularity is wall time x
cores / tasks; efficiency is the rate over the best that was measured; METG(50 %) is the granularity where efficiency
crosses one half, interpolated in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

HALF = 0.5


@dataclass(frozen=True)
class GranularityPoint:
    """One number of iterations: seconds a task takes of a core, and its share of the best rate."""

    iterations: int
    granularity: float
    efficiency: float


def metg(points: Sequence[GranularityPoint], share: float = HALF) -> float | None:
    """Seconds; None if efficiency does not cross ``share`` between these points.

    >>> def task(seconds): return GranularityPoint(1, seconds + 1e-5, seconds / (seconds + 1e-5))
    >>> round(metg([task(2.0**-n) for n in range(10, 22)]) * 1e6, 1)  # twice the 10 us that every task loses
    20.0
    """
    ordered = sorted(points, key=lambda point: point.iterations, reverse=True)
    crossing = [(above, below) for above, below in pairwise(ordered) if below.efficiency < share]
    if not crossing or crossing[0][0].efficiency < share:
        return None
    above, below = crossing[0]
    part = math.log(share / below.efficiency) / math.log(above.efficiency / below.efficiency)
    return math.exp(math.log(below.granularity) + part * math.log(above.granularity / below.granularity))


@dataclass(frozen=True)
class Curve:
    """One runtime on one pattern: its points by the medians of several rounds, its METG, and that of each round."""

    pattern: str
    runtime: str
    cores: int
    tasks: int
    points: tuple[GranularityPoint, ...]
    metg: float | None
    rounds: tuple[float | None, ...]

    @property
    def overhead(self) -> float:
        """Seconds that a task of the smallest size takes of a core beyond its work."""
        least = min(self.points, key=lambda point: point.iterations)
        return least.granularity * (1 - least.efficiency)

    def limit(self, tasks_per_core: float) -> float | None:
        """Seconds below which no strong scaling brings so many tasks on each core: the limit line."""
        return None if self.metg is None else self.metg * tasks_per_core


def curve(
    pattern: str, runtime: str, cores: int, tasks: int, walls: Sequence[Sequence[float]], sizes: Sequence[int],
    best: float,
) -> Curve:  # fmt: skip
    """From each round's seconds by size; ``best`` is iterations a second and core, the best that was measured."""

    def points(seconds: Sequence[float]) -> tuple[GranularityPoint, ...]:
        grains = [each * cores / tasks for each in seconds]
        return tuple(GranularityPoint(s, g, s / g / best) for s, g in zip(sizes, grains, strict=True))

    usual = points([median(column) for column in zip(*walls, strict=True)])
    return Curve(pattern, runtime, cores, tasks, usual, metg(usual), tuple(metg(points(wall)) for wall in walls))
