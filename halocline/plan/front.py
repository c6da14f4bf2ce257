"""What a picture of a plan shows beside its candidates: other numbers of devices, and memory over a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..arrangement import DATA
from ..program.memory import MemoryCurve
from .candidate import Candidate, reading_seconds
from .cost import Prices
from .estimate import Estimator
from .machine import Machine
from .meshes import NoPlan, least_surface, meshes
from .options import Option, options
from .recording import Subject, record_step

COUNTS = 3  # halvings and doublings of the number of devices


@dataclass(frozen=True)
class FrontPoint:
    """An option that was estimated, not recorded; ``seconds`` are for a sample, ``memory`` of a device."""

    arrangement: str
    devices: int
    seconds: float
    memory: int
    fits: bool


def over_devices(
    subject: Subject,
    machine: Machine,
    best: Candidate,
    prices: Prices,
    batch: int | None,
    input_bytes: int | None = None,
) -> list[FrontPoint]:
    """The best estimates of each mesh of half and twice as many devices, and so on, all of equal devices.

    Estimates are corrected by what recording says of the best candidate, without reading; where reading the samples
    takes longer, its time counts. ``input_bytes`` are those of one sample on disk.
    """
    estimator = Estimator(subject, machine, prices.on(machine, best.arrangement.ranks))
    local = best.samples // best.sizes[DATA]
    own = estimator(best.sizes, local, best.arrangement.multiple)
    slower, larger = best.timeline.seconds / own.seconds, best.recorded.memory / own.memory
    room = machine.device.memory_gb.value * 1e9
    points: list[FrontPoint] = []
    for power in range(-COUNTS, COUNTS + 1):
        devices = int(best.arrangement.ranks * 2.0**power)
        if not 1 <= devices <= machine.devices or devices != best.arrangement.ranks * 2.0**power:
            continue
        for option in _estimated(estimator, devices, batch):
            memory = int(option.estimate.memory * larger)
            reading = reading_seconds(subject, machine, option.arrangement, option.local, input_bytes)
            seconds = max(option.estimate.seconds * slower, reading) / option.samples
            points.append(FrontPoint(str(option.arrangement), devices, seconds, memory, memory <= room))
    return points


def _estimated(estimator: Estimator, devices: int, batch: int | None) -> list[Option]:
    """Options for so many devices, none where no mesh divides them; reading is not counted."""
    try:
        wanted = least_surface(meshes(estimator.subject, devices, batch), estimator.subject.volume)
    except NoPlan:
        return []
    return options(estimator, wanted, batch, (), input_bytes=0)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, by the first."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def memory_curve(subject: Subject, candidate: Candidate) -> list[int]:
    """Bytes of one rank after each operation of a step, with what it keeps between steps."""
    step, curve = candidate.recorded, MemoryCurve()
    local = candidate.samples // candidate.sizes[DATA]
    record_step(subject, candidate.sizes, local, step.record.rank, beside=curve, arrangement=candidate.arrangement)
    kept = step.memory - step.activations
    return [kept + size for size in curve.points]
