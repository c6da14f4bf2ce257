"""One arrangement with its predicted step: recorded, replayed, and priced at both ends of what is assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..arrangement import DATA, Arrangement
from ..program import dry
from .cost import Prices
from .machine import Machine
from .measure import Catalogue, measure
from .ranges import at_end
from .recording import RecordedStep, Subject, busiest_rank, record_step
from .replay import Replay, Timeline, replay

MARGIN = 0.03  # a plan must be predicted so much faster than plain data parallel to take its place
INPUT = "input"  # the verdict where reading takes longer than the step


@dataclass(frozen=True)
class Candidate:
    """An arrangement with its predicted step. ``samples`` are those of all ranks in one step."""

    arrangement: Arrangement
    samples: int
    timeline: Timeline
    recorded: RecordedStep
    fits: bool
    input_seconds: float = 0.0  # to read the samples of one step; the loader reads ahead, beside the step
    low_seconds: float = 0.0  # with every assumed constant of the machine at its better end
    high_seconds: float = 0.0

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.arrangement.sizes

    @property
    def seconds(self) -> float:
        """Of a step in a long run: its own, or those of reading its samples where that takes longer."""
        return max(self.timeline.seconds, self.input_seconds)

    @property
    def seconds_per_sample(self) -> float:
        """A step's seconds over the samples of all ranks: what candidates with different batches are compared by."""
        return self.seconds / self.samples

    @property
    def binds(self) -> str:
        """What the step is bound by: the largest of its terms."""
        if not self.fits:
            return "memory"
        if self.input_seconds > self.timeline.seconds:
            return INPUT
        terms = {"compute": self.timeline.compute, **self.timeline.exposed}
        return max(terms, key=lambda name: terms[name])

    @property
    def is_plain(self) -> bool:
        """Plain data parallel: no sample is cut, and nothing else is changed."""
        return is_plain(self.arrangement)

    def __str__(self) -> str:
        return str(self.arrangement)


class RefusedCut(NamedTuple):
    """An arrangement that cannot be recorded, and why: a rule refuses to cut one of the network's operations so."""

    arrangement: Arrangement
    reason: str


def is_plain(arrangement: Arrangement) -> bool:
    """Plain data parallel: no sample is cut, and nothing else is changed."""
    plain = all(size == 1 for axis, size in arrangement.sizes.items() if axis != DATA)
    return plain and not (arrangement.recompute or arrangement.gather or arrangement.layout)


def price(
    subject: Subject,
    machine: Machine,
    arrangement: Arrangement,
    batch: int | None,
    prices: Prices,
    device: torch.device | None = None,
    speeds: Sequence[float] = (),
    input_bytes: int | None = None,
) -> Candidate:
    """One arrangement, recorded and replayed. With ``device``, operations are timed there first, at their own shapes.

    With ``speeds``, every rank is recorded, and the slowest counts. ``input_bytes`` are those of one sample on disk.
    """
    sizes = arrangement.sizes
    local = 1 if batch is None else batch // sizes[DATA]
    steps: list[tuple[Timeline, RecordedStep, float]] = []
    for rank in range(len(speeds)) if speeds else (busiest_rank(arrangement, subject.volume),):
        catalogue = None
        if device is not None:
            with dry(0, 1):
                catalogue = Catalogue()
        speed = speeds[rank] if speeds else 1.0
        paced = prices.on(machine, arrangement.ranks, speed)
        pricing = Replay(rank, machine, paced)
        recorded = record_step(subject, sizes, local, rank, beside=catalogue, arrangement=arrangement, pricing=pricing)
        if catalogue is not None and device is not None:
            measure(catalogue.calls, prices.measured, device)
        steps.append((replay(recorded.record.events, rank, machine, paced), recorded, speed))
    timeline, slowest, speed = max(steps, key=lambda step: step[0].seconds)
    ends = []
    for better in (True, False):
        end = at_end(machine, better)
        there = prices if end is machine else Prices(end.device, prices.measured)
        line = replay(slowest.record.events, slowest.record.rank, end, there.on(end, arrangement.ranks, speed))
        ends.append(max(line.seconds, reading_seconds(subject, end, arrangement, local, input_bytes)))
    return Candidate(
        arrangement,
        local * sizes[DATA],
        timeline,
        slowest,
        max(recorded.memory for _, recorded, _ in steps) <= machine.device.memory_gb.value * 1e9,
        reading_seconds(subject, machine, arrangement, local, input_bytes),
        min(ends),
        max(ends),
    )


def sample_bytes(subject: Subject) -> int:
    """Of one sample with its targets, as tensors."""
    inputs = sum(math.prod(shape) for shape in subject.shapes) * subject.dtype.itemsize
    return inputs + sum(math.prod(target.shape) * target.dtype.itemsize for target in subject.targets)


def reading_seconds(
    subject: Subject, machine: Machine, arrangement: Arrangement, local: int, input_bytes: int | None = None
) -> float:
    """Seconds in which a node's storage delivers what its ranks need for a step: each rank reads its own tile."""
    ranks = min(arrangement.ranks, machine.devices_per_node)
    share = local * arrangement.sizes.get(DATA, 1) / arrangement.ranks
    size = sample_bytes(subject) if input_bytes is None else input_bytes
    return ranks * share * size / (machine.storage.gb_per_s_per_node.value * 1e9)
