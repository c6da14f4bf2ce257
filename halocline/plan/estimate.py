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
from functools import lru_cache
from itertools import groupby, takewhile

from ..arrangement import DATA, Arrangement
from ..world.events import Begun, Computed, Summed
from .collectives import exchange_seconds, sum_seconds
from .cost import Prices, key_of
from .gathering import ChainLayer
from .machine import Machine
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
        self._seconds = lru_cache(maxsize=None)(self._priced)
        self._by_module = lru_cache(maxsize=None)(self._by_module_of_a_sample)
        self._runs = lru_cache(maxsize=None)(self._forward_runs)
        self._sum_over_all = lru_cache(maxsize=None)(
            lambda size, ranks: sum_seconds(machine, size, range(ranks), prices.load)
        )
        self.overhead: dict[str, float] = {}  # seconds by module that a recorded cut step has beyond the model
        self._axes_learned = 1
        self._statistics: set[str] = set()  # modules that combine statistics, also of whole samples on a data axis
        self.model = subject.meta_model()
        self._modules = {name for name, module in self.model.named_modules() if not list(module.children())}

    def _counted(self, operations: Sequence[Computed]) -> list[OperationCount]:
        alike: dict[object, OperationCount] = {}
        for event in operations:
            alike.setdefault(_kind(event), OperationCount(event)).count += 1
        return list(alike.values())

    def __call__(self, sizes: Mapping[str, int], local: int, multiple: int = 1) -> Estimate:
        """Of a mesh of these sizes, with ``local`` samples on each rank of the data axis, cut at a multiple."""
        tile, ranks = self._tile(sizes, multiple), math.prod(sizes.values())
        compute = waits = halos = 0.0
        for each in self.of_samples:
            seconds, halo, statistics = self._cost(each.event, sizes, tile, local)
            compute += each.count * seconds
            halos += each.count * halo
            waits += each.count * (max(0.0, halo - seconds) + statistics)
        backward = compute / 2
        gradients = self._sum_over_all(self.uncut.gradients, ranks)
        compute += sum(each.count * self._seconds(each.event) for each in self.of_weights)
        kept = self.uncut.weights + self.uncut.gradients + self.uncut.optimizer
        memory = kept + int(self.uncut.activations * local / math.prod(tile))
        more = sum(self._overhead_of(path, sizes) for path in self.overhead)
        loss = self.machine.overlap_loss
        slowed = (SLOWED if loss is None else loss.value) * halos
        return Estimate(compute + waits + more + slowed + max(0.0, gradients - backward), memory)

    def work_between_exchanges(self, sizes: Mapping[str, int], local: int) -> float:
        """Seconds that a rank computes for each halo exchange of its samples; infinite where there is none."""
        tile, compute, exchanges = self._tile(sizes, 1), 0.0, 0
        for each in self.of_samples:
            seconds, halo, _ = self._cost(each.event, sizes, tile, local)
            compute += each.count * seconds
            exchanges += each.count * (halo > 0)
        return compute / exchanges if exchanges else math.inf

    def learn(self, sizes: Mapping[str, int], local: int, recorded: RecordedStep) -> None:
        """Take over from a recorded cut step what its modules do beyond the model: small operations round each cut.

        They hardly depend on the mesh. A norm of a cut sample, say, is a dozen operations and two sums.
        """
        forward: dict[str, float] = defaultdict(float)
        backward, sums = 0.0, defaultdict[str, float](float)
        for event in recorded.record.events:
            if isinstance(event, Computed):
                seconds = self.prices.seconds(event)
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

    def _overhead_of(self, path: str, sizes: Mapping[str, int]) -> float:
        """Slabs come from each side of each cut axis; statistics are combined where there are ranks at all."""
        if path in self._statistics:
            return self.overhead.get(path, 0.0) if math.prod(sizes.values()) > 1 else 0.0
        return self.overhead.get(path, 0.0) * self._axes_cut(sizes) / self._axes_learned

    def _axes_cut(self, sizes: Mapping[str, int]) -> int:
        return sum(sizes.get(axis, 1) > 1 for axis in self.subject.volume)

    def _communication(self, event: Begun | Summed, rank: int) -> float:
        if isinstance(event, Begun):
            return exchange_seconds(self.machine, rank, event.sends, self.prices.load)
        return sum_seconds(self.machine, event.bytes, event.ranks, self.prices.load)

    def _tile(self, sizes: Mapping[str, int], multiple: int) -> tuple[float, ...]:
        """By dim, how often the largest tile goes into the volume: its size counts, for the others wait for it."""
        found = []
        for axis, size in self.subject.volume.items():
            largest = multiple * math.ceil(math.ceil(size / multiple) / sizes.get(axis, 1))
            found.append(size / min(size, largest))
        return tuple(found)

    def _cost(
        self, event: Computed, sizes: Mapping[str, int], tile: tuple[float, ...], local: int
    ) -> tuple[float, float, float]:
        """Seconds of an operation at a rank's share, of its halo, and of the statistics that ranks combine."""
        ranks, rank = math.prod(sizes.values()), busiest_rank(Arrangement(sizes), self.subject.volume)
        seconds = self._seconds(self._local(event, tile, local))
        halo = exchange_seconds(self.machine, rank, self._halo(event, sizes, tile, local, rank), self.prices.load)
        combined = "batch_norm" in event.name and ranks > 1
        return seconds, halo, self._sum_over_all(16 * event.shapes[0][1], ranks) if combined else 0.0

    @property
    def stride(self) -> int:
        """How much smaller the smallest input of a convolution is than the volume: cuts at multiples stay aligned."""
        volume = tuple(self.subject.volume.values())
        shrunk = [
            max(whole / part for whole, part in zip(volume, event.shapes[0][2:], strict=True))
            for event in (each.event for each in self.of_samples)
            if event.name == "convolution" and len(event.shapes[0]) == len(volume) + 2
        ]
        return max(1, round(max(shrunk, default=1.0)))

    def chain(self, sizes: Mapping[str, int], local: int) -> list[ChainLayer]:
        """The modules in the order of forward, with what they cost where samples are cut, and where they are whole."""
        uncut, tile = (1.0,) * len(self.subject.volume), self._tile(sizes, 1)
        cost = lru_cache(maxsize=None)(lambda event: self._cost(event, sizes, tile, local))
        parts = math.prod(tile)
        found: list[ChainLayer] = []
        runs = self._runs()
        folded: dict[int, tuple[float, float]] = {}
        entries = Counter(path for path, _ in runs)
        voxels = whole_sample = math.prod(self.subject.volume.values())
        for path, events in runs:
            volumes = [s for event in events for s in event.shapes if len(s) == len(uncut) + 2 and s[0] == 1]
            voxels = math.prod(volumes[0][2:]) if volumes else voxels
            cut = self._overhead_of(path, sizes)
            whole = cut if sizes[DATA] > 1 and path in self._statistics else 0.0
            if id(events) not in folded:  # equal runs are one object
                alone = [cost(event) for event in events]
                work = sum(self._seconds(self._local(event, uncut, local)) for event in events)
                waits = sum(max(0.0, halo - seconds) + statistics for seconds, halo, statistics in alone)
                folded[id(events)] = BACKWARD * sum(seconds for seconds, *_ in alone) + 2 * waits, BACKWARD * work
            cut, whole = cut + folded[id(events)][0], whole + folded[id(events)][1]
            late = voxels < whole_sample  # a network that gathers at once might as well not be cut
            able = late and path in self._modules and entries[path] == 1 and bool(volumes)
            enter = 2 * self._gather_seconds(math.prod(volumes[0]) * local, sizes) if able else 0.0
            kept = int(sum(event.bytes for event in events) / 2 * local * (1 - 1 / parts))
            found.append(ChainLayer(path, able, voxels, cut, whole, enter, kept))
        return found

    def _forward_runs(self) -> list[tuple[str, tuple[Computed, ...]]]:
        """Operations of forward, one after another in the same module."""
        inside = takewhile(lambda event: event.phase == "forward", self.uncut.record.operations)
        runs = groupby(inside, key=lambda event: event.place)
        same: dict[tuple[Computed, ...], tuple[Computed, ...]] = {}
        plain = [(path, tuple(_plain(event) for event in events)) for path, events in runs]
        return [(path, same.setdefault(events, events)) for path, events in plain]

    def _gather_seconds(self, elements: int, sizes: Mapping[str, int]) -> float:
        """Each rank of the spatial axes sends its tile to all others."""
        parts = math.prod(sizes[axis] for axis in self.subject.volume)
        rank = busiest_rank(Arrangement(sizes), self.subject.volume)
        first = rank - rank % parts  # the data axis is the first of a mesh
        size = elements * self.subject.dtype.itemsize // parts
        return exchange_seconds(
            self.machine, rank, [(first + n, size) for n in range(parts) if first + n != rank], self.prices.load
        )

    def compute(self, share: float) -> float:
        """Seconds of computation for a share of one sample, cut along its first dim in space."""

        def cut(shape: tuple[int, ...]) -> tuple[int, ...]:
            of_sample = len(shape) > 2 and shape[0] == 1
            return (*shape[:2], max(1, math.ceil(shape[2] * share)), *shape[3:]) if of_sample else shape

        local = [_shared(each.event, share, tuple(map(cut, each.event.shapes))) for each in self.of_samples]
        return sum(each.count * self._seconds(event) for each, event in zip(self.of_samples, local, strict=True))

    def _priced(self, event: Computed) -> float:
        return self.prices.seconds(event)

    def _local(self, event: Computed, tile: tuple[float, ...], local: int) -> Computed:
        """The operation at a rank's share; numbers, place and time are cleared, so that like ones are priced once."""
        shapes = tuple(self._tile_shape(shape, tile, local) for shape in event.shapes)
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
        weight = event.shapes[2 if "backward" in event.name else 1]
        volume = self._tile_shape(event.shapes[1 if "backward" in event.name else 0], tile, local)
        if len(volume) != dims + 2 or len(weight) != dims + 2:
            return []
        element = 8 if str(event.dtype) == "torch.float64" else 2 if "16" in str(event.dtype) else 4
        strides, stride = {}, 1
        for axis in reversed(list(sizes)):
            strides[axis], stride = stride, stride * sizes[axis]
        messages = []
        for dim, axis in enumerate(self.subject.volume):
            reach = (weight[2 + dim] - 1) // 2
            if sizes[axis] > 1 and reach:
                size = reach * math.prod(volume) // volume[2 + dim] * element
                peers = [rank - strides[axis]] + ([rank + strides[axis]] if sizes[axis] > 2 else [])
                messages += [(peer, size) for peer in peers]
        return messages

    def by_module(self, paths: Sequence[str], tile: int, local: int) -> dict[str, tuple[float, int]]:
        """Forward seconds and bytes kept for backward of each module, at a share of ``local / tile`` samples."""
        share = local / tile
        whole = self._by_module(tuple(paths))
        return {path: (seconds * share, int(kept * share)) for path, (seconds, kept) in whole.items()}

    def _by_module_of_a_sample(self, paths: tuple[str, ...]) -> dict[str, tuple[float, float]]:
        seconds: dict[str, float] = defaultdict(float)
        kept: dict[str, float] = defaultdict(float)
        owner = lru_cache(maxsize=None)(
            lambda place: next((p for p in paths if place == p or place.startswith(f"{p}.")), None)
        )
        for event in self.uncut.record.operations:
            path = owner(event.place)
            if path is not None and event.phase == "forward":
                seconds[path] += self._seconds(_plain(event))
                kept[path] += event.bytes / 2
        return {path: (seconds[path], kept[path]) for path in paths if path in seconds}


def _kind(event: Computed) -> object:
    return key_of(event), event.phase


def _plain(event: Computed) -> Computed:
    """Without number, time and place, so that like operations are equal."""
    return event._replace(number=0, time=0.0, place="")


def _shared(event: Computed, share: float, shapes: tuple[tuple[int, ...], ...]) -> Computed:
    work, size = event.flops * share, int(event.bytes * share)
    return _plain(event)._replace(flops=work, bytes=size, shapes=shapes)
