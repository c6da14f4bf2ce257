"""One step of a whole cluster: each class of ranks recorded and replayed once, and the slowest of all ranks sampled."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from ..geometry import Partition
from ..plan.candidate import reading_seconds
from ..plan.collectives import chosen_algorithm
from ..plan.cost import MULTIPLY, Key, Prices
from ..plan.recording import RecordedStep, record_step
from ..plan.replay import Replay, Timeline, kind_of
from ..plan.unrecordable import clear_recording_errors
from .replaying import CONTROL, GRADIENTS, SharedTimeline, StreamSpan, replayed
from .scenario import Scenario
from .variation import Delays, slowest

MOST = 4  # classes of ranks that are recorded: those with most work, and the one with least
STRAGGLERS, INPUT = "stragglers", "input"


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same: by where their tile lies in a sample."""

    name: str  # such as "depth first, height inner"
    rank: int  # one of them
    count: int
    recorded: RecordedStep
    line: SharedTimeline

    @property
    def timeline(self) -> Timeline:
        return self.line.timeline

    @property
    def spans(self) -> tuple[StreamSpan, ...]:
        return self.line.spans


@dataclass(frozen=True)
class Simulation:
    """A step in a long run, as all devices together have it."""

    scenario: Scenario
    classes: tuple[RankClass, ...]
    delays: Delays
    input_seconds: float
    agreement: float  # exposed seconds that agreeing on gradients costs
    base: Simulation | None = None  # the same on fewer devices, by which efficiency is counted

    @property
    def slowest_class(self) -> RankClass:
        """The class that the others wait for: the step is as long as its."""
        return max(self.classes, key=lambda each: each.timeline.seconds)

    @property
    def quiet_seconds(self) -> float:
        """Of a step in which all ranks are equal."""
        return self.slowest_class.timeline.seconds

    @property
    def seconds(self) -> float:
        """The mean step."""
        return max(self.quiet_seconds + self.delays.mean, self.input_seconds)

    @property
    def band(self) -> tuple[float, float]:
        """Nine steps of ten lie in it."""
        low, high = self.delays.band
        return max(self.quiet_seconds + low, self.input_seconds), max(self.quiet_seconds + high, self.input_seconds)

    @property
    def rate(self) -> float:
        """Samples a second and device."""
        return self.scenario.samples / self.scenario.devices / self.seconds

    @property
    def efficiency(self) -> float:
        """This rate over that of the base."""
        return 1.0 if self.base is None else self.rate / self.base.rate

    @property
    def efficiency_band(self) -> tuple[float, float]:
        """Efficiency in the slowest and the fastest of nine steps of ten; the base is taken at its mean."""
        low, high = self.band
        mean = self.seconds
        return self.efficiency * mean / high, self.efficiency * mean / low

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of the mean step that are not computation, by cause; with the computation they add up to it."""
        found = {kind: seconds for kind, seconds in self.slowest_class.timeline.exposed.items() if seconds > 0}
        if self.agreement:
            found[GRADIENTS] = max(0.0, found.get(GRADIENTS, 0.0) - self.agreement)
            found[CONTROL] = self.agreement
        found[STRAGGLERS] = self.delays.mean
        found[INPUT] = max(0.0, self.input_seconds - self.quiet_seconds - self.delays.mean)
        return {kind: seconds for kind, seconds in found.items() if seconds > 1e-9}

    @property
    def flops(self) -> float:
        """Floating-point operations of convolutions and products that one device has in a step."""
        return sum(each.flops for each in self.slowest_class.recorded.record.operations if each.name in MULTIPLY)

    @property
    def sustained_flops(self) -> float:
        """FLOP/s of all devices in the mean step."""
        return self.flops * self.scenario.devices / self.seconds

    @property
    def peak_flops(self) -> float:
        """FLOP/s of all devices while they compute."""
        return self.flops * self.scenario.devices / self.slowest_class.timeline.compute

    @property
    def algorithm(self) -> str:
        """How the largest sum of gradients travels."""
        sums = [each for each in self.slowest_class.recorded.record.sums if kind_of(each) == GRADIENTS]
        if not sums or self.scenario.devices == 1:
            return "none"
        if self.scenario.levers.rings != "nccl":
            return f"{self.scenario.levers.rings} rings"
        largest = max(sums, key=lambda each: each.bytes)
        return chosen_algorithm(self.scenario.machine, largest.bytes, largest.ranks)

    @property
    def gradient_messages(self) -> int:
        """Sums of gradients in a step."""
        return sum(kind_of(each) == GRADIENTS for each in self.slowest_class.recorded.record.sums)


@dataclass
class Recordings:
    """Recorded steps that several simulations share: the record does not depend on levers that only the replay sees."""

    known: dict[object, RecordedStep] = field(default_factory=dict)
    #: Measured seconds of operations, which count before all else.
    measured: dict[Key, float] = field(default_factory=dict)

    def prices(self, scenario: Scenario) -> Prices:
        """Of one device among those of the run."""
        prices = Prices(scenario.machine.device, self.measured)
        return prices.on(scenario.machine, scenario.devices, scenario.pace)

    def of(self, scenario: Scenario, rank: int) -> RecordedStep:
        """The step of ``rank``, with gradients in the buckets that they would have on the machine."""
        levers, machine = scenario.levers, scenario.machine
        key = (
            scenario.name, id(scenario.subject), scenario.devices, scenario.local, tuple(scenario.cut.items()), rank,
            levers.grouping, levers.wire, scenario.pace, machine.model_dump_json(exclude={"variation"}),
        )  # fmt: skip
        if key not in self.known:
            prices = self.prices(scenario)
            with clear_recording_errors():
                self.known[key] = record_step(
                    scenario.subject,
                    scenario.arrangement.sizes,
                    scenario.local,
                    rank,
                    arrangement=scenario.arrangement,
                    pricing=Replay(rank, machine, prices),
                    options=scenario.options(),
                    plain=scenario.replica == 1,
                )
        return self.known[key]


def simulate(
    scenario: Scenario,
    base: int | None = None,
    seed: int = 0,
    trace: bool = False,
    recordings: Recordings | None = None,
) -> Simulation:
    """A step of the scenario, and of the same on ``base`` devices (by default one replica) to count efficiency by."""
    recordings = recordings or Recordings()
    found = _simulated(scenario, seed, trace, recordings)
    base = scenario.replica if base is None else base
    if base == scenario.devices:
        return found
    plain = scenario.on(base)
    return Simulation(**{**vars(found), "base": _simulated(plain, seed, False, recordings)})


def _simulated(scenario: Scenario, seed: int, trace: bool, recordings: Recordings) -> Simulation:
    """One step without a base: replays each class of ranks, and samples the slowest of all ranks around it.

    What agreement costs is the difference to the same step with planned sums.
    """
    prices = recordings.prices(scenario)
    classes = []
    for name, rank, count in rank_classes(scenario):
        recorded = recordings.of(scenario, rank)
        facts = recorded.record.events, rank, scenario.machine, prices
        line = replayed(*facts, scenario.levers, scenario.devices, trace)
        classes.append(RankClass(name, rank, count, recorded, line))
    slow = max(classes, key=lambda each: each.timeline.seconds)
    agreement = 0.0
    if scenario.levers.control != "planned" and scenario.devices > 1:
        free = scenario.levers.with_(control="planned")
        quiet = replayed(slow.recorded.record.events, slow.rank, scenario.machine, prices, free, scenario.devices)
        agreement = max(0.0, slow.timeline.seconds - quiet.timeline.seconds)
    delays = slowest(scenario.machine, slow.timeline.compute, scenario.devices, seed)
    reading = reading_seconds(
        scenario.subject, scenario.machine, scenario.arrangement, scenario.local, scenario.input_bytes
    )
    return Simulation(scenario, tuple(classes), delays, reading, agreement)


def rank_classes(scenario: Scenario) -> list[tuple[str, int, int]]:
    """Name, a rank and the number of ranks of each class, those with most work first; at most ``MOST``."""
    sizes = scenario.arrangement.sizes
    places = {axis: _places(scenario.subject.volume.get(axis), size) for axis, size in sizes.items()}
    found = []
    for chosen in itertools.product(*places.values()):
        rank = 0
        for size, place in zip(sizes.values(), chosen, strict=True):
            rank = rank * size + place.index
        work = math.prod(place.extent for place in chosen)
        words = [f"{axis} {place.name}" for axis, place in zip(sizes, chosen, strict=True) if place.name]
        count = math.prod(place.count for place in chosen)
        neighbours = sum(place.name.startswith("inner") for place in chosen)
        found.append((work, neighbours, ", ".join(words) or "all ranks", rank, count))
    found.sort(key=lambda each: (-each[0], -each[1], each[3]))
    kept = found if len(found) <= MOST else [*found[: MOST - 1], found[-1]]
    return [(name, rank, count) for _, _, name, rank, count in kept]


@dataclass(frozen=True)
class _Place:
    """Ranks of one axis whose tiles are alike: the index of one of them, the extent of its tile, and their count."""

    name: str
    index: int
    extent: int
    count: int


@lru_cache(maxsize=256)
def _places(extent: int | None, size: int) -> tuple[_Place, ...]:
    """Where ranks of an axis differ: at its ends and, where it does not divide, in the size of their tiles."""
    if extent is None:
        return (_Place("", size // 2, 1, size),)
    points = Partition.even(extent, size).points
    pieces = [end - begin for begin, end in pairwise(points)]
    if size == 1:
        return (_Place("", 0, extent, 1),)
    kinds: dict[tuple[str, int], list[int]] = {}
    for index, piece in enumerate(pieces):
        name = "first" if index == 0 else "last" if index == size - 1 else "inner"
        kinds.setdefault((name, piece), []).append(index)
    told = "" if len(set(pieces)) == 1 else " of {}"
    return tuple(
        _Place(name + told.format(piece), ranks[len(ranks) // 2], piece, len(ranks))
        for (name, piece), ranks in kinds.items()
    )
