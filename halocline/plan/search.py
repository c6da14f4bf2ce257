"""Which arrangement for so many devices: estimated for every factorization, recorded and replayed for the best few.

The axes that a mesh may have are those of ``factorizations``: data and the dims of the volume. Further axes, of the
model or of stages, join there, in :data:`halocline.arrangement.AXIS_OF_LETTER` and in :class:`Estimator`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..arrangement import DATA, Arrangement
from ..errors import PlanError
from ..program import dry
from .cost import Prices
from .estimate import Estimate, Estimator
from .machine import Machine
from .measure import Catalogue, measure
from .recompute import blocks, least_work
from .recording import RecordedStep, Subject, middle_rank, record_step
from .replay import Replay, Timeline, replay
from .shares import uneven_points

MARGIN = 0.03  # a plan must be predicted so much faster than plain data parallel to take its place
FINALISTS = 4  # candidates that are recorded and fit
PER_DATA_SIZE = 4  # spatial cuts, of the least surface, that are estimated for each size of the data axis
AT_LEAST = 2  # candidates that are recorded, so that there is one to compare with
ALIKE = 2  # of these, how many are recorded
HOPELESS = 1.03  # times the best time from which on a candidate is not recorded, by its corrected estimate
ROOM = 1.1  # times the memory up to which an estimate may be too high


class NoPlan(PlanError):
    """No cut fits. The message names the limit, and the smallest change that would do."""


@dataclass(frozen=True)
class Candidate:
    """An arrangement with its predicted step. ``samples`` are those of all ranks in one step."""

    arrangement: Arrangement
    samples: int
    timeline: Timeline
    recorded: RecordedStep
    fits: bool

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.arrangement.sizes

    @property
    def seconds_per_sample(self) -> float:
        return self.timeline.seconds / self.samples

    @property
    def binds(self) -> str:
        """What the step is bound by: the largest of its terms."""
        terms = {"compute": self.timeline.compute, **self.timeline.exposed}
        return "memory" if not self.fits else max(terms, key=lambda name: terms[name])

    @property
    def is_plain(self) -> bool:
        """Plain data parallel: no sample is cut, and nothing else is changed."""
        plain = all(size == 1 for axis, size in self.sizes.items() if axis != DATA)
        return plain and not (self.arrangement.recompute or self.arrangement.gather)

    def __str__(self) -> str:
        return str(self.arrangement)


@dataclass(frozen=True)
class Option:
    """An arrangement that may be worth recording."""

    arrangement: Arrangement
    samples: int
    estimate: Estimate

    @property
    def seconds_per_sample(self) -> float:
        return self.estimate.seconds / self.samples


def factorizations(count: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to write ``count`` as a product over ``axes``."""
    if len(axes) == 1:
        yield {axes[0]: count}
        return
    for first in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
        for rest in factorizations(count // first, axes[1:]):
            yield {axes[0]: first, **rest}


def meshes(subject: Subject, devices: int, batch: int | None) -> list[dict[str, int]]:
    """Every mesh that the samples allow. ``batch`` samples a step; None: one on each rank of the data axis."""
    legal = [
        sizes
        for sizes in factorizations(devices, [DATA, *subject.volume])
        if all(sizes[axis] <= subject.volume[axis] for axis in subject.volume)
        and (batch is None or batch % sizes[DATA] == 0)
    ]
    if not legal:
        most = math.prod(subject.volume.values())
        reason = (
            f"a sample of {' x '.join(map(str, subject.volume.values()))} voxels can be cut over {most} devices at most"
        )
        divides = "" if batch is None else f", and the data axis must divide a batch of {batch}"
        raise NoPlan(f"no mesh for {devices} devices: {reason}{divides}; plan for fewer devices, or a larger batch")
    return legal


def least_surface(legal: Sequence[dict[str, int]], volume: Mapping[str, int]) -> list[dict[str, int]]:
    """For each size of the data axis the cuts with the least surface: their halos are the smallest there are."""
    by_data: dict[int, list[dict[str, int]]] = {}
    for sizes in sorted(legal, key=lambda sizes: surface(sizes, volume)):
        by_data.setdefault(sizes[DATA], []).append(sizes)
    return [sizes for group in by_data.values() for sizes in group[:PER_DATA_SIZE]]


def surface(sizes: Mapping[str, int], volume: Mapping[str, int]) -> float:
    """Elements of one rank's tile that lie on a cut, per element of the tile."""
    return sum(2 * sizes[axis] / volume[axis] for axis in volume if sizes[axis] > 1)


def search(
    subject: Subject,
    machine: Machine,
    devices: int,
    batch: int | None = None,
    prices: Prices | None = None,
    device: torch.device | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
    speeds: Sequence[float] = (),
) -> list[Candidate]:
    """Candidates, the best first: those that fit by time for a sample, then the others by memory."""
    prices = prices or Prices(machine.device)
    wanted = least_surface(meshes(subject, devices, batch), subject.volume)
    estimator = Estimator(subject, machine, prices)
    queue = options(estimator, wanted, batch, speeds)
    found = Findings(machine)
    for option in worth_recording(queue, machine):
        if found.is_hopeless(option):
            continue
        found.add(option, price(subject, machine, option.arrangement, batch, prices, device, speeds=speeds))
        tell(len(found.candidates), FINALISTS)
    return sorted(found.candidates, key=_rank)


class Findings:
    """What was recorded so far, and what it says of the estimates of the rest."""

    def __init__(self, machine: Machine) -> None:
        self._room = machine.device.memory_gb.value * 1e9
        self.candidates: list[Candidate] = []
        self._memory, self._time = 1.0, 1.0  # recorded over estimated: the least seen so far
        self._recorded: Counter[tuple[int, bool]] = Counter()

    def add(self, option: Option, candidate: Candidate) -> None:
        """Correct the estimates by a recorded candidate."""
        memory, seconds = candidate.recorded.memory / option.estimate.memory, candidate.timeline.seconds
        first = not self.candidates
        self._memory = memory if first else min(self._memory, memory)
        self._time = min(math.inf if first else self._time, seconds / option.estimate.seconds)
        self.candidates.append(candidate)
        self._recorded[_kind(option)] += 1

    def is_hopeless(self, option: Option) -> bool:
        """Would it not fit, be too slow, or be like those that were recorded?"""
        fitting = [each.seconds_per_sample for each in self.candidates if each.fits]
        if not self.candidates:
            return False
        if not fitting:
            return option.estimate.memory * self._memory > self._room
        return (
            len(fitting) >= FINALISTS
            or option.estimate.memory * self._memory > self._room
            or (len(fitting) >= AT_LEAST and option.seconds_per_sample * self._time > HOPELESS * min(fitting))
            or self._recorded[_kind(option)] >= ALIKE
        )


def _kind(option: Option) -> tuple[int, bool]:
    return option.arrangement.sizes[DATA], bool(option.arrangement.recompute)


def options(
    estimator: Estimator, wanted: Sequence[Mapping[str, int]], batch: int | None, speeds: Sequence[float]
) -> list[Option]:
    """Every mesh, and those that do not fit also with modules that recompute; the best estimate first."""
    found: list[Option] = []
    room = int(estimator.machine.device.memory_gb.value * 1e9)
    paths = blocks(estimator.subject.meta_model())
    for sizes in wanted:
        local = 1 if batch is None else batch // sizes[DATA]
        estimate, samples = estimator(sizes, local), local * sizes[DATA]
        points = uneven_points(sizes, estimator.subject.volume, speeds, estimator.compute) if speeds else {}
        option = Option(Arrangement(sizes, points), samples, estimate)
        found.append(option)
        if estimate.memory > room / ROOM:
            recomputing = with_recomputation(estimator, option, paths, local, room)
            found += [recomputing] if recomputing else []
    return sorted(found, key=lambda option: option.seconds_per_sample)


def with_recomputation(
    estimator: Estimator, option: Option, paths: Sequence[str], local: int, room: int
) -> Option | None:
    """The same with the modules whose recomputation makes it fit in the least time; None where nothing does."""
    tile = math.prod(size for axis, size in option.arrangement.sizes.items() if axis != DATA)
    costs = estimator.by_module(paths, tile, local)
    again = least_work(costs, int(option.estimate.memory * ROOM) - room)
    if not again:
        return None
    freed = sum(costs[path][1] for path in again) - max(costs[path][1] for path in again)
    seconds = option.estimate.seconds + sum(costs[path][0] for path in again)
    estimate = Estimate(seconds, option.estimate.memory - freed)
    return Option(replace(option.arrangement, recompute=again), option.samples, estimate)


def worth_recording(queue: Sequence[Option], machine: Machine) -> list[Option]:
    """Those that may fit, in the order of their estimates, plain data parallel first; else the leanest."""
    room = machine.device.memory_gb.value * 1e9
    fitting = [option for option in queue if option.estimate.memory <= ROOM * room]
    plain = [option for option in fitting if _is_plain(option.arrangement)]
    rest = [option for option in fitting if option not in plain]
    return [*plain, *rest] if fitting else sorted(queue, key=lambda option: option.estimate.memory)[:2]


def _is_plain(arrangement: Arrangement) -> bool:
    return not arrangement.recompute and all(size == 1 for axis, size in arrangement.sizes.items() if axis != DATA)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Those that fit first, by time; the others by memory."""
    return not candidate.fits, candidate.seconds_per_sample if candidate.fits else candidate.recorded.memory


def price(
    subject: Subject,
    machine: Machine,
    arrangement: Arrangement,
    batch: int | None,
    prices: Prices,
    device: torch.device | None = None,
    speeds: Sequence[float] = (),
) -> Candidate:
    """One arrangement, recorded and replayed. With ``device``, operations are timed there first, at their own shapes.

    With ``speeds``, every rank is recorded, and the slowest counts.
    """
    sizes = arrangement.sizes
    local = 1 if batch is None else batch // sizes[DATA]
    ranks = range(len(speeds)) if speeds else (middle_rank(sizes),)
    steps: list[tuple[Timeline, RecordedStep]] = []
    for rank in ranks:
        paced = prices.on(machine, arrangement.ranks, speeds[rank] if speeds else 1.0)
        catalogue = None
        if device is not None:
            with dry(0, 1):
                catalogue = Catalogue()
        recorded = record_step(
            subject, sizes, local, rank, beside=catalogue, arrangement=arrangement, pricing=Replay(rank, machine, paced)
        )
        if catalogue is not None and device is not None:
            measure(catalogue.calls, prices.measured, device)
        steps.append((replay(recorded.record.events, rank, machine, paced), recorded))
    timeline, recorded = max(steps, key=lambda step: step[0].seconds)
    memory = max(recorded.memory for _, recorded in steps)
    return Candidate(
        arrangement, local * sizes[DATA], timeline, recorded, memory <= machine.device.memory_gb.value * 1e9
    )


def chosen(candidates: Sequence[Candidate], machine: Machine) -> Candidate:
    """The best that fits; plain data parallel unless something is predicted to be clearly better."""
    fitting = [each for each in candidates if each.fits]
    if not fitting:
        least = min(candidates, key=lambda each: each.recorded.memory)
        raise NoPlan(
            f"no cut over {math.prod(least.sizes.values())} devices fits: the leanest, {least}, needs "
            f"{least.recorded.memory / 1e9:.1f} GB a device, and {machine.device.name} has "
            f"{machine.device.memory_gb.value:g}; use more devices, or one with more memory"
        )
    plain = [each for each in fitting if each.is_plain]
    best = fitting[0]
    if plain and best.seconds_per_sample > (1 - MARGIN) * plain[0].seconds_per_sample:
        return plain[0]
    return best
