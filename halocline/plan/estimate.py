"""A first look at a mesh without recording it: the uncut step's operations, scaled to the tile of a rank.

One step of the uncut network is recorded; equal operations are counted, not repeated, so that repeated blocks cost
nothing more. For a mesh, each kind of operation is priced once at its local shape, with the halo that it would fetch.
Estimates order the candidates; what is recorded in full decides.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby, takewhile
from typing import NamedTuple

from ..arrangement import DATA, Arrangement
from ..world.events import Begun, Computed, Summed
from .collectives import exchange_seconds, sum_seconds
from .cost import Prices, key_of
from .gathering import ChainLayer
from .machine import Machine
from .recompute import BlockKind, blocks
from .recording import RecordedStep, Subject, busiest_rank, record_step
from .replay import kind_of
from .unrecordable import clear_recording_errors

SLOWED = 0.02  # of hidden communication: a rank does not compute at full speed beside it
BACKWARD = 3  # times its forward that an operation takes, with backward


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step and bytes of a device."""

    seconds: float
    memory: int


@dataclass
class OperationCount:
    """Operations that are alike, and how many the uncut step has."""

    event: Computed
    count: int = 0


class ForwardRun(NamedTuple):
    """Operations of forward that run one after another in one module, or in code between modules."""

    place: str
    events: tuple[Computed, ...]
    able: bool  # whether its input may be gathered
    voxels: int  # of one channel of its input
    elements: int  # of its input


class Estimator:
    """Estimates for every mesh from one recording of the uncut step with one sample."""

    def __init__(self, subject: Subject, machine: Machine, prices: Prices) -> None:
        self.subject, self.machine, self.prices = subject, machine, prices
        with clear_recording_errors():
            self.uncut = record_step(subject, {DATA: 1, **dict.fromkeys(subject.volume, 1)}, 1, warm=0)
        operations = self.uncut.record.operations
        last = max((n for n, event in enumerate(operations) if event.phase == "backward"), default=len(operations))
        self.of_samples = self._counted(operations[: last + 1])
        self.of_weights = self._counted(operations[last + 1 :])  # the optimizer's: not cut
        self._seconds = lru_cache(maxsize=None)(prices.seconds)
        self._blocks = lru_cache(maxsize=None)(self._blocks_of_a_sample)
        self._runs = lru_cache(maxsize=None)(self._forward_runs)
        self._sum_over_all = lru_cache(maxsize=None)(
            lambda size, ranks: sum_seconds(machine, size, range(ranks), prices.load)
        )
        self.overhead: dict[str, float] = {}  # seconds by module that a recorded cut step has beyond the model
        self._overheads = 0.0, 0.0  # all of them: of statistics, and of slabs
        self._axes_learned = 1
        self._statistics: set[str] = set()  # modules that combine statistics, also of whole samples on a data axis
        self._volume = subject.volume
        self._modules = {name for name, part in self.uncut.model.named_modules() if not any(part.children())}

    def _counted(self, operations: Sequence[Computed]) -> list[OperationCount]:
        """Operations that cost the same at every cut are priced once, times how often they come."""
        alike: dict[object, OperationCount] = {}
        for event in operations:
            alike.setdefault(_kind(event), OperationCount(event)).count += 1
        return list(alike.values())

    def __call__(self, sizes: Mapping[str, int], local: int, multiple: int = 1) -> Estimate:
        """Of a mesh of these sizes, with ``local`` samples on each rank of the data axis, cut at a multiple."""
        tile, ranks = self._tile(sizes, multiple), math.prod(sizes.values())
        rank = busiest_rank(Arrangement(sizes), self._volume)
        compute = waits = halos = 0.0
        for each in self.of_samples:
            seconds, halo, statistics = self._cost(each.event, sizes, tile, local, rank)
            compute += each.count * seconds
            halos += each.count * halo
            waits += each.count * (max(0.0, halo - seconds) + statistics)
        backward = compute / 2
        gradients = self._sum_over_all(self.uncut.gradients, ranks)
        compute += sum(each.count * self._seconds(each.event) for each in self.of_weights)
        kept = self.uncut.weights + self.uncut.gradients + self.uncut.optimizer
        memory = kept + int(self.uncut.activations * local / math.prod(tile))
        of_statistics, of_slabs = self._overheads
        more = of_statistics * (ranks > 1) + of_slabs * self._axes_cut(sizes) / self._axes_learned
        loss = self.machine.overlap_loss
        slowed = (SLOWED if loss is None else loss.value) * halos
        return Estimate(compute + waits + more + slowed + max(0.0, gradients - backward), memory)

    def work_between_exchanges(self, sizes: Mapping[str, int], local: int) -> float:
        """Seconds that a rank computes for each halo exchange of its samples; infinite where there is none."""
        tile, compute, exchanges = self._tile(sizes, 1), 0.0, 0
        rank = busiest_rank(Arrangement(sizes), self._volume)
        for each in self.of_samples:
            seconds, halo, _ = self._cost(each.event, sizes, tile, local, rank)
            compute += each.count * seconds
            exchanges += each.count * (halo > 0)
        return compute / exchanges if exchanges else math.inf

    def learn(self, sizes: Mapping[str, int], local: int, recorded: RecordedStep) -> None:
        """Take over from a recorded cut step what its modules do beyond the model: small operations round each cut.

        They hardly depend on the mesh. A norm of a cut sample, say, is a dozen operations and two sums.
        """
        forward: dict[str, float] = defaultdict(float)
        backward, sums = 0.0, defaultdict[str, float](float)
        priced: dict[object, float] = {}
        for event in recorded.record.events:
            if isinstance(event, Computed):
                alike = event[3:4] + event[6:]  # the name, and all that follows the phase
                seconds = priced.get(alike)
                if seconds is None:
                    seconds = priced[alike] = self.prices.seconds(event)
                backward += seconds if event.phase == "backward" else 0.0
                forward[event.place] += seconds if event.phase == "forward" else 0.0
            elif isinstance(event, Begun | Summed) and kind_of(event) == "statistics":
                sums[event.label.place] += self._communication(event, recorded.record.rank)
        self._statistics, self._axes_learned = set(sums), self._axes_cut(sizes)
        within = sum(seconds for path, seconds in forward.items() if path in self._modules)
        both = 1 + backward / within if within else BACKWARD
        for layer in self.chain(sizes, local):
            if layer.place in self._modules:
                more = both * forward[layer.place] + sums[layer.place] - layer.cut
                self.overhead[layer.place] = max(0.0, more)
        both_kinds = [
            sum(seconds for path, seconds in self.overhead.items() if (path in self._statistics) is combined)
            for combined in (True, False)
        ]
        self._overheads = both_kinds[0], both_kinds[1]

    def _overhead_of(self, path: str, sizes: Mapping[str, int]) -> float:
        """Slabs come from each side of each cut axis; statistics are combined where there are ranks at all."""
        if path in self._statistics:
            return self.overhead.get(path, 0.0) if math.prod(sizes.values()) > 1 else 0.0
        return self.overhead.get(path, 0.0) * self._axes_cut(sizes) / self._axes_learned

    def _axes_cut(self, sizes: Mapping[str, int]) -> int:
        return sum(sizes.get(axis, 1) > 1 for axis in self._volume)

    def _communication(self, event: Begun | Summed, rank: int) -> float:
        """Seconds on this machine, beside ranks that compute."""
        if isinstance(event, Begun):
            return exchange_seconds(self.machine, rank, event.sends, self.prices.load)
        return sum_seconds(self.machine, event.bytes, event.ranks, self.prices.load)

    def _tile(self, sizes: Mapping[str, int], multiple: int) -> tuple[float, ...]:
        """By dim, how often the largest tile goes into the volume: its size counts, for the others wait for it."""
        found = []
        for axis, size in self._volume.items():
            largest = multiple * math.ceil(math.ceil(size / multiple) / sizes.get(axis, 1))
            found.append(size / min(size, largest))
        return tuple(found)

    def _cost(
        self, event: Computed, sizes: Mapping[str, int], tile: tuple[float, ...], local: int, rank: int
    ) -> tuple[float, float, float]:
        """Seconds of an operation at a rank's share, of its halo, and of the statistics that ranks combine."""
        ranks = math.prod(sizes.values())
        seconds = self._seconds(self._local(event, tile, local))
        halo = exchange_seconds(self.machine, rank, self._halo(event, sizes, tile, local, rank), self.prices.load)
        combined = "batch_norm" in event.name and ranks > 1
        return seconds, halo, self._sum_over_all(16 * event.shapes[0][1], ranks) if combined else 0.0

    @property
    def stride(self) -> int:
        """How much smaller the smallest input of a convolution is than the volume: cuts at multiples stay aligned.

        Inputs of one voxel do not count: they are pooled, as in squeeze and excitation, and not cut.
        """
        volume = tuple(self._volume.values())
        shrunk = [
            max(whole / part for whole, part in zip(volume, event.shapes[0][2:], strict=True))
            for event in (each.event for each in self.of_samples)
            if event.name == "convolution" and len(event.shapes[0]) == len(volume) + 2 and max(event.shapes[0][2:]) > 1
        ]
        return max(1, round(max(shrunk, default=1.0)))

    @property
    def can_gather(self) -> bool:
        """Is there a module whose input is smaller than the sample, so that it may be gathered?"""
        return any(run.able for run in self._runs())

    def chain(self, sizes: Mapping[str, int], local: int) -> list[ChainLayer]:
        """The modules in the order of forward, with what they cost where samples are cut, and where they are whole."""
        uncut, tile = (1.0,) * len(self._volume), self._tile(sizes, 1)
        rank = busiest_rank(Arrangement(sizes), self._volume)
        cost = lru_cache(maxsize=None)(lambda event: self._cost(event, sizes, tile, local, rank))
        enter = lru_cache(maxsize=None)(lambda elements: 2 * self._gather_seconds(elements * local, sizes, rank))
        more_kept = local * (1 - 1 / math.prod(tile))
        of_kind: dict[int, tuple[float, float, int]] = {}
        found: list[ChainLayer] = []
        for run in self._runs():
            if id(run.events) not in of_kind:  # equal runs share one tuple
                alone = [cost(event) for event in run.events]
                work = sum(self._seconds(self._local(event, uncut, local)) for event in run.events)
                waits = sum(max(0.0, halo - seconds) + statistics for seconds, halo, statistics in alone)
                cut = BACKWARD * sum(seconds for seconds, *_ in alone) + 2 * waits
                kept = int(sum(event.bytes for event in run.events) / 2 * more_kept)
                of_kind[id(run.events)] = cut, BACKWARD * work, kept
            cut, whole, kept = of_kind[id(run.events)]
            more = self._overhead_of(run.place, sizes) if run.place in self.overhead else 0.0
            whole += more if sizes[DATA] > 1 and run.place in self._statistics else 0.0
            first = enter(run.elements) if run.able else 0.0
            found.append(ChainLayer(run.place, run.able, run.voxels, cut + more, whole, first, kept))
        return found

    def _forward_runs(self) -> list[ForwardRun]:
        """Operations of forward, one after another in the same module; equal ones are one object."""
        inside = takewhile(lambda event: event.phase == "forward", self.uncut.record.operations)
        same: dict[tuple[Computed, ...], tuple[Computed, ...]] = {}
        runs = []
        for place, group in groupby(inside, key=lambda event: event.place):
            events = tuple(_plain(event) for event in group)
            runs.append((place, same.setdefault(events, events)))
        entries = Counter(place for place, _ in runs)
        dims, voxels = len(self._volume) + 2, math.prod(self._volume.values())
        whole_sample, found = voxels, list[ForwardRun]()
        volumes = {
            id(events): next((s for event in events for s in event.shapes if len(s) == dims and s[0] == 1), ())
            for events in same
        }
        for place, events in runs:
            volume = volumes[id(events)]
            voxels = math.prod(volume[2:]) if volume else voxels
            late = voxels < whole_sample  # a network that gathers at once might as well not be cut
            able = late and place in self._modules and entries[place] == 1 and bool(volume)
            found.append(ForwardRun(place, events, able, voxels, math.prod(volume)))
        return found

    def _gather_seconds(self, elements: int, sizes: Mapping[str, int], rank: int) -> float:
        """Each rank of the spatial axes sends its tile to all others."""
        parts = math.prod(sizes[axis] for axis in self._volume)
        first = rank - rank % parts  # the data axis is the first of a mesh
        size = elements * self.subject.dtype.itemsize // parts
        return exchange_seconds(
            self.machine, rank, [(first + n, size) for n in range(parts) if first + n != rank], self.prices.load
        )

    def compute(self, sizes: Mapping[str, int], axis: str, share: float) -> float:
        """Seconds of computation for one sample, cut by ``sizes`` but for ``axis``, along which it has this share."""
        tile = tuple(1 / share if name == axis else float(sizes[name]) for name in self._volume)
        local = [self._local(each.event, tile, 1) for each in self.of_samples]
        return sum(each.count * self._seconds(event) for each, event in zip(self.of_samples, local, strict=True))

    def _local(self, event: Computed, tile: tuple[float, ...], local: int) -> Computed:
        """The operation at a rank's share; numbers, place and time are cleared, so that like ones are priced once."""
        weight = _weight_of(event)
        shapes = tuple(
            shape if number == weight else self._tile_shape(shape, tile, local)
            for number, shape in enumerate(event.shapes)
        )
        return _shared(event, local / math.prod(tile), shapes)

    def _tile_shape(self, shape: tuple[int, ...], tile: tuple[float, ...], local: int) -> tuple[int, ...]:
        """Of a tensor of one sample; others, such as weights, stay."""
        if len(shape) != len(tile) + 2 or shape[0] != 1:
            return shape
        return (local, shape[1], *(math.ceil(size / parts) for size, parts in zip(shape[2:], tile, strict=True)))

    def _halo(
        self, event: Computed, sizes: Mapping[str, int], tile: tuple[float, ...], local: int, rank: int
    ) -> list[tuple[int, int]]:
        """Messages of a convolution: from its kernel, half of it on each side."""
        dims = len(tile)
        if "convolution" not in event.name or max(tile) == 1:
            return []
        weight = event.shapes[_weight_of(event) or 0]
        volume = self._tile_shape(event.shapes[1 if "backward" in event.name else 0], tile, local)
        if len(volume) != dims + 2 or len(weight) != dims + 2:
            return []
        element = 8 if str(event.dtype) == "torch.float64" else 2 if "16" in str(event.dtype) else 4
        strides, stride = {}, 1
        for axis in reversed(list(sizes)):
            strides[axis], stride = stride, stride * sizes[axis]
        messages = []
        for dim, axis in enumerate(self._volume):
            reach = (weight[2 + dim] - 1) // 2
            if sizes[axis] > 1 and reach:
                size = reach * math.prod(volume) // volume[2 + dim] * element
                peers = [rank - strides[axis]] + ([rank + strides[axis]] if sizes[axis] > 2 else [])
                messages += [(peer, size) for peer in peers]
        return messages

    def blocks(self, tile: int, local: int) -> list[BlockKind]:
        """Forward seconds and bytes kept for backward of the network's blocks, at a share of ``local / tile`` samples.

        Blocks that cost the same are one kind.
        """
        share = local / tile
        return [BlockKind(each.seconds * share, int(each.kept * share), each.paths) for each in self._blocks()]

    def _blocks_of_a_sample(self) -> list[BlockKind]:
        """Blocks that recomputing could leave out, those of equal seconds and bytes together: one sample, not cut."""
        paths = blocks(self.uncut.model)
        ends = {path.count(".") + 1 for path in paths}
        known = set(paths)

        @cache
        def owner(place: str) -> str | None:
            words = place.split(".")
            return next((path for end in ends if (path := ".".join(words[:end])) in known), None)

        costs: dict[str, tuple[float, float]] = {}
        for run in self._runs():
            path = owner(run.place)
            if path is not None:
                seconds, kept = costs.get(path, (0.0, 0.0))
                seconds += sum(self._seconds(event) for event in run.events)
                costs[path] = seconds, kept + sum(event.bytes for event in run.events) / 2
        kinds: dict[tuple[float, float], list[str]] = {}
        for path in paths:
            if path in costs:
                kinds.setdefault(costs[path], []).append(path)
        return [BlockKind(seconds, int(kept), tuple(alike)) for (seconds, kept), alike in kinds.items()]


def _weight_of(event: Computed) -> int | None:
    """Which operand of a convolution is its weight, which is never cut; None for other operations."""
    if "convolution" not in event.name:
        return None
    return 2 if "backward" in event.name else 1


def _kind(event: Computed) -> object:
    """What operations must share to be counted as one: all that decides their price, and the phase."""
    return key_of(event), event.phase


def _plain(event: Computed) -> Computed:
    """Without number, time and place, so that like operations are equal."""
    return event._replace(number=0, time=0.0, place="")


def _shared(event: Computed, share: float, shapes: tuple[tuple[int, ...], ...]) -> Computed:
    """A share of the work and bytes, at local shapes."""
    work, size = event.flops * share, int(event.bytes * share)
    return _plain(event)._replace(flops=work, bytes=size, shapes=shapes)
