"""Which algorithm a sum takes, by its size: measured times of the algorithms and of the machine's levels.

A rank's exchange at level i costs ``latency_i + bytes x per_byte_i``; a sum of n bytes over levels p1 x p2 x ... takes
``2 (p_i - 1) (latency_i + n per_byte_i / (p1 ... p_i))`` at each of them, and in chunks little more than the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from ...world import Label, World
from ..buckets.cutting import LinkCost
from .algorithms import Round, Span
from .chunk_scheduler import Chunk, ChunkScheduler
from .levels import Levels

CHUNKS = (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22)  # bytes
SIZES = (1 << 10, 1 << 17, 1 << 21, 1 << 23)  # bytes of the sums that are tried
FLAT = "flat"
_PROBES = (1 << 10, 1 << 18)  # bytes of the exchanges that are timed on each level
_SMALL = 1 << 20  # bytes of a chunk
_TURNS, _REPEAT = 4, 4
_DOUBTFUL = 0.97  # of the flat sum's time: another algorithm must be better by more than the noise
_LABEL = Label("what a way costs", "backward", "control")

Try = Callable[[str, int], float]  # (algorithm, bytes) -> seconds of one sum


@dataclass(frozen=True)
class Costs:
    """Measured seconds of sums, the same on every rank, so that all choose the same algorithm."""

    tried: dict[str, tuple[float, ...]]  # by algorithm: seconds at the first few of SIZES

    def seconds(self, algorithm: str, size: int) -> float:
        """Predicted for a sum of so many bytes: linear between measured sizes, and beyond the last."""
        known = list(zip(SIZES, self.tried[algorithm], strict=False))
        (low, begin), (high, end) = known[0], known[-1]
        for (low, begin), (high, end) in pairwise(known):  # noqa: B007
            if size <= high:
                break
        slope = max(0.0, (end - begin) / (high - low)) if high > low else 0.0
        return begin + (size - low) * slope

    def best(self, size: int) -> str:
        """The fastest for so many bytes, among the algorithms that were tried at all sizes or at one as large."""
        all_sizes = len(SIZES)
        known = [name for name, times in self.tried.items() if len(times) == all_sizes or size <= SIZES[len(times) - 1]]
        return min(known or self.tried, key=lambda name: self.seconds(name, size) * (_DOUBTFUL if name == FLAT else 1))


def level_seconds(factors: Sequence[int], links: Sequence[LinkCost], size: float) -> list[float]:
    """Seconds that each level is busy with a sum of so many bytes.

    >>> [round(each) for each in level_seconds((2, 4), (LinkCost(1, 0), LinkCost(0, 1)), 8)]
    [2, 6]
    """
    return [
        2 * (factor - 1) * (link.latency + size * link.per_byte / prod(factors[: level + 1]))
        for level, (factor, link) in enumerate(zip(factors, links, strict=True))
    ]


def piped_seconds(factors: Sequence[int], links: Sequence[LinkCost], size: float, chunk: float) -> float:
    """Seconds of a sum in chunks: the slowest level is busy all the time, the others before and after."""
    chunk = min(chunk, size)
    busy = level_seconds(factors, links, chunk)
    return (size / chunk - 1) * max(busy) + sum(busy) if chunk else sum(busy)


def best_chunk(factors: Sequence[int], links: Sequence[LinkCost], size: int) -> int:
    """Bytes of a chunk: small ones fill the pipeline sooner, large ones need fewer messages. Where the sum is large
    enough, at least eight chunks, so that one that is late matters less."""
    few = [chunk for chunk in CHUNKS if chunk <= max(_SMALL, size // 8)]
    return min(few, key=lambda chunk: piped_seconds(factors, links, size, chunk))


# ---- measuring ----


def measured_links(scheduler: ChunkScheduler, world: World, levels: Levels) -> tuple[LinkCost, ...]:
    """The cost of an exchange at each level, with all its rings busy as in a sum. By all ranks together."""
    links = []
    for level in range(len(levels.factors)):
        small, large = (agreed(_ring_seconds(scheduler, levels, world.rank, level, size), world) for size in _PROBES)
        per_byte = max(1e-12, (large - small) / (_PROBES[1] - _PROBES[0]))
        links.append(LinkCost(max(1e-7, small - per_byte * _PROBES[0]), per_byte))
    return tuple(links)


def _ring_seconds(scheduler: ChunkScheduler, levels: Levels, rank: int, level: int, size: int) -> float:
    """Seconds of one exchange along a level's ring: the minimum of several tries, since waits for a processor vary."""
    stride, place = prod(levels.factors[:level]), levels.ranks.index(rank)
    count = levels.factors[level]
    own = place // stride % count
    after, before = (place + ((own + turn) % count - own) * stride for turn in (1, -1))
    each = Round(levels.ranks[after], Span(0, size), levels.ranks[before], Span(size, 2 * size))
    chunk = Chunk(torch.zeros(2 * size, dtype=torch.uint8), [each] * _TURNS)
    return min(timed(lambda: scheduler.begin([chunk], _LABEL).wait()) for _ in range(_REPEAT)) / _TURNS


def tried(names: Sequence[str], attempt: Try, world: World) -> dict[str, tuple[float, ...]]:
    """Seconds of each algorithm at SIZES; doubling only at the small ones. In turns, so that noise hits all alike."""
    seconds: dict[str, tuple[float, ...]] = dict.fromkeys(names, ())
    for name in names:
        attempt(name, SIZES[0])  # opens connections
    for number, size in enumerate(SIZES):
        taking_part = [name for name in names if name != "doubling" or number < 2]
        rounds = [[attempt(name, size) for name in taking_part] for _ in range(_REPEAT)]
        for name, times in zip(taking_part, zip(*rounds, strict=True), strict=True):
            seconds[name] += (agreed(min(times), world),)
    return seconds


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def agreed(seconds: float, world: World) -> float:
    """The slowest rank's time, on all ranks. By all together."""
    everyone = tuple(range(world.size))
    mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    return float(world.maximum(mine, everyone, _LABEL).item())
