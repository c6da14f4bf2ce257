"""Meshes with an axis that cuts weights: which of them are worth recording, and with which layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..arrangement import DATA, Arrangement
from .auto_layout import LayoutChoice, best_layout
from .calls import Calls, record_calls
from .cost import Prices
from .machine import Machine
from .meshes import NoPlan, least_surface, meshes
from .recording import Subject

MODEL = "model"  # the axis
MOST_PARTS = 16  # over which a weight is cut
RECORDED = 4  # arrangements, the best by their estimates
BATCHES = 3  # sizes of a global batch that are recorded, the largest first
PER_MODEL_SIZE = 6  # meshes with the same number of parts of a weight that are estimated


@dataclass(frozen=True)
class ModelCut:
    """An arrangement that cuts weights, its estimate, and the samples of a step."""

    arrangement: Arrangement
    choice: LayoutChoice
    samples: int

    @property
    def seconds_per_sample(self) -> float:
        """By the estimate."""
        assert self.choice.chosen is not None
        return self.choice.chosen.seconds / self.samples

    @property
    def memory(self) -> int:
        """By the estimate."""
        assert self.choice.chosen is not None
        return self.choice.chosen.memory


def model_cuts(
    subject: Subject, machine: Machine, devices: int, batch: int | None, prices: Prices, kind: str = "auto"
) -> list[ModelCut]:
    """The best few arrangements with an axis ``model``: those that fit by time of a sample, then by memory.

    For each mesh of data, space and model the layout is chosen layer by layer (:mod:`.layout_search`).
    """
    wanted = list(_meshes(subject, devices, batch))
    sizes_of_batches = sorted({_samples(sizes, batch) for sizes in wanted}, reverse=True)[:BATCHES]
    recorded = {samples: _calls(subject, samples) for samples in sizes_of_batches}
    room = machine.device.memory_gb.value * 1e9
    found = [
        cut
        for sizes in wanted
        if (samples := _samples(sizes, batch)) in recorded
        if (cut := _cut(subject, machine, sizes, samples, recorded[samples], prices, kind)) is not None
    ]
    if kind == "auto-memory":
        return sorted(found, key=lambda cut: cut.memory)[:RECORDED]
    return sorted(found, key=lambda cut: (cut.memory > room, cut.seconds_per_sample))[:RECORDED]


def _samples(sizes: dict[str, int], batch: int | None) -> int:
    """Of a step over all ranks; one on each rank of the data axis unless the batch is given."""
    return sizes[DATA] if batch is None else batch


def _meshes(subject: Subject, devices: int, batch: int | None) -> Iterator[dict[str, int]]:
    """Data and space on what ``model`` leaves of the devices; ranks that share a weight are neighbours."""
    for parts in (n for n in range(2, min(MOST_PARTS, devices) + 1) if devices % n == 0):
        try:
            rest = least_surface(meshes(subject, devices // parts, batch), subject.volume)
        except NoPlan:
            continue
        for sizes in rest[:PER_MODEL_SIZE]:
            yield {**sizes, MODEL: parts}


def _calls(subject: Subject, samples: int) -> Calls:
    """Recorded once for a number of samples: meshes that share it share the record."""
    model = subject.meta_model().to(subject.dtype)
    return record_calls(model, _inputs(subject, samples), subject.around)


def _inputs(subject: Subject, samples: int) -> Sequence[Tensor]:
    return [torch.empty((samples, *shape[1:]), dtype=subject.dtype, device="meta") for shape in subject.shapes]


def _cut(
    subject: Subject, machine: Machine, sizes: dict[str, int], samples: int, calls: Calls, prices: Prices, kind: str
) -> ModelCut | None:
    """The best layout of the weights for one mesh; None where cutting none of them is best."""
    arrangement = Arrangement(sizes)
    volume = subject.shapes[0]
    cuts = [
        arrangement.cut(subject.letters if shape[2:] == volume[2:] and len(shape) == len(volume) else "N")
        for shape in subject.shapes
    ]
    priced = prices.on(machine, math.prod(sizes.values()))
    choice = best_layout(calls, sizes, cuts, [MODEL], machine, priced, kind, share=0.0)
    if choice is None or choice.chosen is None or not choice.layout:
        return None
    return ModelCut(replace(arrangement, layout=choice.layout), choice, samples)
