"""What is simulated: a network, a machine, how many devices, how samples are cut, and how gradients travel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..arrangement import DATA, Arrangement
from ..errors import HaloclineError, did_you_mean
from ..plan.api import check_devices
from ..plan.machine import Device, Machine, load_machine
from ..plan.recording import Subject
from .levers import CONTROLS, RINGS, Levers

#: Steps of all parameters at once, as training on GPUs has them.
OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


class ScenarioError(HaloclineError, ValueError):
    """A simulation that cannot be meant."""


@dataclass(frozen=True)
class Scenario:
    """One run. ``local`` samples are on each rank of the data axis; ``cut`` are the spatial axes, the rest is data."""

    name: str
    subject: Subject
    machine: Machine
    devices: int
    local: int = 1
    cut: Mapping[str, int] = field(default_factory=dict)
    levers: Levers = field(default_factory=Levers)
    #: Bytes of one sample on disk, by default those of its tensors; 0: samples stay in the hosts' memory.
    input_bytes: int | None = None
    #: How fast the devices are on this network, over what their description says; fitted to a measured rate.
    pace: float = 1.0

    def __post_init__(self) -> None:
        check_devices(self.machine, self.devices)
        if self.local < 1:
            raise ScenarioError(f"each rank of the data axis has one sample or more, not {self.local}")
        for what, value, known in (
            ("control", self.levers.control, CONTROLS),
            ("rings", self.levers.rings, RINGS),
            ("wire", self.levers.wire, (None, "bf16", "fp16")),
        ):
            if value not in known:
                names = ", ".join(str(each) for each in known if each is not None)
                raise ScenarioError(
                    f"no {what} {value!r}{did_you_mean(str(value), filter(None, known))}; it is {names}"
                )
        axes = list(self.subject.volume)
        for axis, size in self.cut.items():
            if axis not in axes:
                told = f"no axis {axis!r} to cut{did_you_mean(axis, axes)}"
                raise ScenarioError(f"{told}; the axes of this network's input are {', '.join(axes)}")
            if not 1 <= size <= self.subject.volume[axis]:
                raise ScenarioError(f"{axis}={size}: the input has {self.subject.volume[axis]} along it")
        if self.devices % self.replica:
            raise ScenarioError(
                f"{self.devices:,} devices do not divide into replicas of {self.replica} "
                f"({', '.join(f'{axis}={size}' for axis, size in self.cut.items())}); use a multiple of {self.replica}"
            )

    @property
    def replica(self) -> int:
        """Devices that share a sample."""
        return math.prod(self.cut.values())

    @property
    def samples(self) -> int:
        """Of a step, over all ranks."""
        return self.local * (self.devices // self.replica)

    @property
    def arrangement(self) -> Arrangement:
        """The mesh: devices that do not share a sample are data parallel."""
        axes = {axis: self.cut.get(axis, 1) for axis in self.subject.volume}
        return Arrangement({DATA: self.devices // self.replica, **axes})

    def options(self) -> dict[str, Any]:
        """Arguments of ``hc.distribute``."""
        chosen: dict[str, Any] = {}
        if not self.levers.grouping:
            named = list(self.subject.meta_model().named_parameters())
            # Sums go in the order of the buckets, and backward has the last parameters first.
            chosen["buckets"] = [[name] for name, parameter in reversed(named) if parameter.requires_grad]
        if self.levers.wire:
            # As many bytes in either format; what leaves the range of fp16 would be sent again, and no step has values.
            chosen["wire"] = "bf16"
        return chosen

    def on(self, devices: int) -> Scenario:
        """The same on another number of devices, with as many samples on each: weak scaling."""
        return replace(self, devices=devices)

    def with_levers(self, **changes: object) -> Scenario:
        """The same with some levers set otherwise."""
        return replace(self, levers=self.levers.with_(**changes))


def local_batch(batch: int, devices: int, replica: int = 1) -> int:
    """Samples on each rank of the data axis, of a batch over all."""
    if batch % (devices // replica or 1):
        raise ScenarioError(
            f"a batch of {batch:,} does not divide over {devices // replica:,} ranks of the data axis; use a multiple "
            "of that, or --local for samples on each"
        )
    return batch // (devices // replica or 1)


def changed_machine(
    machine: Machine,
    bandwidth: float = 1.0,
    latency: float = 1.0,
    compute: float = 1.0,
    card: str | None = None,
    spread: float = 1.0,
) -> Machine:
    """What if: links of other speed, devices of another machine, or faster and less unequal ones."""
    for name, factor in (("bandwidth", bandwidth), ("latency", latency), ("compute", compute), ("spread", spread)):
        if not factor > 0:
            raise ScenarioError(f"--{name} {factor:g}: it is a factor above zero, such as 2 for twice as much")
    device = load_machine(card).device if card else machine.device
    links = tuple(
        link.model_copy(
            update={
                "gb_per_s": _scaled(link.gb_per_s, bandwidth),
                "latency_us": _scaled(link.latency_us, latency),
            }
        )
        for link in machine.links
    )
    variation = machine.variation
    if variation is not None and spread != 1.0:
        changes = {name: _scaled(value, spread) for name, value in variation if value is not None}
        variation = variation.model_copy(update=changes)
    update = {"device": _paced(device, compute), "links": links, "variation": variation}
    return machine.model_copy(update=update)


def _paced(device: Device, factor: float) -> Device:
    """The device with arithmetic and memory of another speed."""
    if factor == 1.0:
        return device
    peaks = {name: _scaled(peak, factor) for name, peak in device.peak_tflops.items()}
    return device.model_copy(update={"peak_tflops": peaks, "memory_gb_per_s": _scaled(device.memory_gb_per_s, factor)})


def _scaled(quantity: Any, factor: float) -> Any:
    """A quantity times a factor, its range too."""
    ends = {
        end: None if value is None else value * factor
        for end, value in (("low", quantity.low), ("high", quantity.high))
    }
    return quantity.model_copy(update={"value": quantity.value * factor, **ends})
