"""Which mesh for so many devices: every factorization of them, priced by replaying what a rank would do.

Candidates are first thinned by geometry alone: for each size of the data axis, the spatial cuts with the least surface.
Of these a first step is recorded and replayed, and of the best of them the steady one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import HaloclineError
from ..program import dry
from .cost import Prices
from .machine import Machine
from .measure import Catalogue, measure
from .recording import STEADY, RecordedStep, Subject, record_step
from .replay import Timeline, replay

MARGIN = 0.03  # a plan must be predicted so much faster than plain data parallel to take its place
FINALISTS = 4  # candidates whose steady step is recorded
PER_DATA_SIZE = 2  # spatial cuts that are recorded for each size of the data axis


class NoPlan(HaloclineError):
    """No cut fits. The message names the limit, and the smallest change that would do."""


@dataclass(frozen=True)
class Candidate:
    """A mesh with its predicted step. ``samples`` are those of all ranks in one step."""

    sizes: Mapping[str, int]
    samples: int
    timeline: Timeline
    recorded: RecordedStep
    fits: bool

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
        """Plain data parallel: no sample is cut."""
        return all(size == 1 for axis, size in self.sizes.items() if axis != "data")

    def __str__(self) -> str:
        return mesh_text(self.sizes)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Such as "data=4 depth=2": axes of one rank are left out."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def factorizations(count: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to write ``count`` as a product over ``axes``."""
    if len(axes) == 1:
        yield {axes[0]: count}
        return
    for first in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
        for rest in factorizations(count // first, axes[1:]):
            yield {axes[0]: first, **rest}


def surface(sizes: Mapping[str, int], volume: Mapping[str, int]) -> float:
    """Elements of one rank's tile that lie on a cut, per element of the tile: the least possible traffic of a halo."""
    return sum(2 * sizes[axis] / volume[axis] for axis in volume if sizes[axis] > 1)


def meshes(subject: Subject, devices: int, batch: int | None) -> list[dict[str, int]]:
    """Meshes worth recording. ``batch`` is the number of samples of a step; None: one on each rank of the data axis."""
    axes = ["data", *subject.volume]
    legal = [
        sizes
        for sizes in factorizations(devices, axes)
        if all(sizes[axis] <= subject.volume[axis] for axis in subject.volume)
        and (batch is None or batch % sizes["data"] == 0)
    ]
    if not legal:
        most = math.prod(subject.volume.values())
        reason = (
            f"a sample of {' x '.join(map(str, subject.volume.values()))} voxels can be cut over {most} devices at most"
        )
        divides = "" if batch is None else f", and the data axis must divide a batch of {batch}"
        raise NoPlan(f"no mesh for {devices} devices: {reason}{divides}; plan for fewer devices, or a larger batch")
    by_data: dict[int, list[dict[str, int]]] = {}
    for sizes in sorted(legal, key=lambda sizes: surface(sizes, subject.volume)):
        by_data.setdefault(sizes["data"], []).append(sizes)
    return [sizes for group in by_data.values() for sizes in group[:PER_DATA_SIZE]]


def search(
    subject: Subject,
    machine: Machine,
    devices: int,
    batch: int | None = None,
    prices: Prices | None = None,
    device: torch.device | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Candidate]:
    """Candidates, the best first: those that fit by time for a sample, then the others by memory."""
    prices = prices or Prices(machine.device)
    wanted = meshes(subject, devices, batch)
    total, candidates = len(wanted) + min(FINALISTS, len(wanted)), []
    for sizes in wanted:
        candidates.append(price(subject, machine, sizes, batch, prices, device, warm=0))
        tell(len(candidates), total)
    candidates.sort(key=_rank)
    plain = [each for each in candidates[FINALISTS:] if each.is_plain]
    for number, each in enumerate([*candidates[:FINALISTS], *plain]):
        candidates[candidates.index(each)] = price(subject, machine, each.sizes, batch, prices, device)
        tell(len(wanted) + number + 1, total + len(plain))
    return sorted(candidates, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Those that fit first, by time; the others by memory."""
    return not candidate.fits, candidate.seconds_per_sample if candidate.fits else candidate.recorded.memory


def price(
    subject: Subject,
    machine: Machine,
    sizes: Mapping[str, int],
    batch: int | None,
    prices: Prices,
    device: torch.device | None = None,
    warm: int = STEADY,
) -> Candidate:
    """One mesh, recorded and replayed. With ``device``, operations are timed there first, at their own shapes."""
    local = 1 if batch is None else batch // sizes["data"]
    if device is None:
        recorded = record_step(subject, sizes, local, warm=warm)
    else:
        with dry(0, 1):
            catalogue = Catalogue()
        recorded = record_step(subject, sizes, local, warm=warm, beside=catalogue)
        measure(catalogue.calls, prices.measured, device)
    rank = recorded.record.rank
    timeline = replay(recorded.record.events, rank, machine, prices)
    fits = recorded.memory <= machine.device.memory_gb.value * 1e9
    return Candidate(sizes, local * sizes["data"], timeline, recorded, fits)


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
