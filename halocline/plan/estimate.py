"""A first look at a mesh without recording it: the uncut step's operations, scaled to the tile of a rank.

One step of the uncut network is recorded; equal operations are counted, not repeated, so that repeated blocks cost
nothing more. For a mesh, each kind of operation is priced once at its local shape, with the halo that it would fetch.
Estimates order the candidates; what is recorded in full decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..arrangement import DATA
from ..world.events import Computed
from .collectives import exchange_seconds, sum_seconds
from .cost import Prices, key_of
from .machine import Machine
from .recording import RecordedStep, Subject, middle_rank, record_step

SLOWED = 0.02  # of hidden communication: a rank does not compute at full speed beside it


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
        self.uncut: RecordedStep = record_step(subject, {DATA: 1, **dict.fromkeys(subject.volume, 1)}, 1, warm=0)
        operations = self.uncut.record.operations
        last = max((n for n, event in enumerate(operations) if event.phase == "backward"), default=len(operations))
        self.of_samples = self._counted(operations[: last + 1])
        self.of_weights = self._counted(operations[last + 1 :])  # the optimizer's: not cut
        self._seconds = lru_cache(maxsize=None)(self._priced)

    def _counted(self, operations: Sequence[Computed]) -> list[OperationCount]:
        alike: dict[object, OperationCount] = {}
        for event in operations:
            alike.setdefault((key_of(event), event.phase), OperationCount(event)).count += 1
        return list(alike.values())

    def __call__(self, sizes: Mapping[str, int], local: int) -> Estimate:
        """Of a mesh of these sizes, with ``local`` samples on each rank of the data axis."""
        tile = tuple(sizes.get(axis, 1) for axis in self.subject.volume)
        rank, everyone = middle_rank(sizes), range(math.prod(sizes.values()))
        compute = waits = halos = 0.0
        for each in self.of_samples:
            seconds = self._seconds(self._local(each.event, tile, local))
            compute += each.count * seconds
            halo = exchange_seconds(self.machine, rank, self._halo(each.event, sizes, tile, local, rank))
            halos += each.count * halo
            waits += each.count * max(0.0, halo - seconds)
            if "batch_norm" in each.event.name and len(everyone) > 1:
                waits += each.count * sum_seconds(self.machine, 16 * each.event.shapes[0][1], everyone)
        backward = compute / 2
        gradients = sum_seconds(self.machine, self.uncut.gradients, everyone)
        compute += sum(each.count * self._seconds(each.event) for each in self.of_weights)
        kept = self.uncut.weights + self.uncut.gradients + self.uncut.optimizer
        memory = kept + self.uncut.activations * local // math.prod(tile)
        return Estimate(compute + waits + SLOWED * halos + max(0.0, gradients - backward), memory)

    def compute(self, share: float) -> float:
        """Seconds of computation for a share of one sample, cut along its first dim in space."""

        def cut(shape: tuple[int, ...]) -> tuple[int, ...]:
            of_sample = len(shape) > 2 and shape[0] == 1
            return (*shape[:2], max(1, math.ceil(shape[2] * share)), *shape[3:]) if of_sample else shape

        local = [_shared(each.event, share, tuple(map(cut, each.event.shapes))) for each in self.of_samples]
        return sum(each.count * self._seconds(event) for each, event in zip(self.of_samples, local, strict=True))

    def _priced(self, event: Computed) -> float:
        return self.prices.seconds(event)

    def _local(self, event: Computed, tile: tuple[int, ...], local: int) -> Computed:
        """The operation at a rank's share; numbers, place and time are cleared, so that like ones are priced once."""
        shapes = tuple(self._tile_shape(shape, tile, local) for shape in event.shapes)
        return _shared(event, local / math.prod(tile), shapes)

    def _tile_shape(self, shape: tuple[int, ...], tile: tuple[int, ...], local: int) -> tuple[int, ...]:
        """Of a tensor of one sample; others, such as weights, stay."""
        if len(shape) != len(tile) + 2 or shape[0] != 1:
            return shape
        return (local, shape[1], *(-(-size // parts) for size, parts in zip(shape[2:], tile, strict=True)))

    def _halo(
        self, event: Computed, sizes: Mapping[str, int], tile: tuple[int, ...], local: int, rank: int
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
        seconds: dict[str, float] = defaultdict(float)
        kept: dict[str, int] = defaultdict(int)
        owner = lru_cache(maxsize=None)(
            lambda place: next((p for p in paths if place == p or place.startswith(f"{p}.")), None)
        )
        for event in self.uncut.record.operations:
            path = owner(event.place)
            if path is not None and event.phase == "forward":
                seconds[path] += self.prices.seconds(event) * local / tile
                kept[path] += int(event.bytes / 2 * local / tile)
        return {path: (seconds[path], kept[path]) for path in paths if path in seconds}


def _shared(event: Computed, share: float, shapes: tuple[tuple[int, ...], ...]) -> Computed:
    work, size = event.flops * share, int(event.bytes * share)
    return event._replace(number=0, time=0.0, place="", flops=work, bytes=size, shapes=shapes)
