"""Synthetic weather with the statistics of Kurth et al. 2018, who had theirs from a climate model.

A sample is a map of 16 channels with storms and rivers of vapour; the labels say which pixel belongs to which. Samples
follow each other in time: storms and rivers are born, move and pass, on smooth noise that drifts.

Any box of a sample is computed by itself, with the bits that it has in the whole: sums, products and quotients round
alike everywhere, and sines are tabulated along a whole dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Field, Generated
from ..geometry import Box, Interval, shape_of
from ..random.draw import Draw
from ..random.generator import GlobalBox, keys
from .workload import Batch

Array = np.ndarray[Any, Any]
Plane = tuple[Interval, Interval]

CLASSES = 3
BACKGROUND, STORM, RIVER = range(CLASSES)
FREQUENCIES = (0.982, 0.001, 0.017)
#: 1 / sqrt(frequency) scaled to sum 1, of the 98.24, 0.07 and 1.69 % in the paper's data.
WEIGHTS = (0.0218, 0.8120, 0.1662)


class Traits(NamedTuple):
    """What a storm and a river are seen by, or how strongly a channel shows each, its smooth noise being about 1."""

    core: Any = 0.0
    swirl_x: Any = 0.0
    swirl_y: Any = 0.0
    vapour: Any = 0.0
    flow_x: Any = 0.0
    flow_y: Any = 0.0


#: The channels by their names in the climate model: vapour, winds, humidity, pressures, temperatures, rain, heights.
CHANNELS = {
    "TMQ": Traits(core=2, vapour=4),
    "U850": Traits(swirl_x=6, flow_x=2),
    "V850": Traits(swirl_y=6, flow_y=2),
    "UBOT": Traits(swirl_x=5, flow_x=1),
    "VBOT": Traits(swirl_y=5, flow_y=1),
    "QREFHT": Traits(core=1, vapour=2),
    "PS": Traits(core=-3),
    "PSL": Traits(core=-4),
    "T200": Traits(core=2),
    "T500": Traits(core=2, vapour=0.5),
    "PRECT": Traits(core=3, vapour=2),
    "TS": Traits(core=-0.5),
    "TREFHT": Traits(vapour=0.5),
    "Z1000": Traits(core=-3),
    "Z200": Traits(core=1),
    "ZBOT": Traits(core=-1),
}

#: A map that two cores train on within a minute or two; its halves can be halved four times.
SMALL = {"height": 96, "width": 128, "storms": 1, "rivers": 2}
SMALL_TRAINING = {
    "batch": 2,
    "steps": 200,
    "samples": 400,
    "validation": 24,
    "cut": ("H", "W"),
    "lr": 0.005,
    "optimizer": "adam",
    "schedule": "cosine",
}
#: Two samples a GPU on 1536 of them, for a hundred epochs.
FULL_TRAINING = {
    "batch": 3072,
    "steps": 1600,
    "samples": 50_000,
    "validation": 6_000,
    "cut": ("H", "W"),
    "lr": 0.0064,
    "optimizer": "larc",
}

LIFE = 20  # samples from the birth of a storm or river to its end
WAVES = 6  # in the smooth noise of a channel
FINEST = 6  # the most of them that fit along a dim
GRAIN = 0.3  # standard deviation of the noise of single pixels
SLENDER = 8.0  # length of a river over its width
_STORMS, _RIVERS, _WAVES, _GRAIN = range(4)  # streams of random numbers


def drawn(seed: int, stream: int, index: int, *shape: int) -> Array:
    """Numbers in [0, 1), others for each stream and index."""
    draw = Draw(GlobalBox.all_of(shape), torch.device("cpu"), (seed, keys(stream, index, 0)[0]))
    return draw.uniform(torch.float64).numpy()


def grain(seed: int, sample: int, shape: tuple[int, ...], box: Box) -> Array:
    """Noise of variance 1 on every pixel, by its global index."""
    draw = Draw(GlobalBox(shape, box), torch.device("cpu"), (seed, keys(_GRAIN, sample, 0)[0]))
    return (draw.uniform(torch.float32).numpy() - np.float32(0.5)) * np.float32(math.sqrt(12))


def wave(down: float, across: float, phase: float, size: tuple[int, int], box: Plane) -> Array:
    """``cos 2 pi (down * y + across * x + phase)`` on a box of a map, where y and x go from 0 to 1."""
    rows = 2 * math.pi * (down * np.arange(size[0]) / size[0] + phase)
    columns = 2 * math.pi * across * np.arange(size[1]) / size[1]
    even = _on(np.cos(rows), box[0])[:, None] * _on(np.cos(columns), box[1])
    return even - _on(np.sin(rows), box[0])[:, None] * _on(np.sin(columns), box[1])


def _on(table: Array, part: Interval) -> Array:
    return table[slice(*part)].astype(np.float32)


@dataclass(frozen=True)
class Event:
    """A storm or a river in the middle of its way: of this area, centre and strength, turned and bent (if a river)."""

    area: float
    y: float
    x: float
    strength: float
    angle: float
    bend: float

    def offsets(self, width: int, box: Plane) -> tuple[Array, Array]:
        """From the centre to pixels, the short way round the globe: a column and a row."""
        across = (np.arange(*box[1]) - self.x + width / 2) % width - width / 2
        return (np.arange(*box[0]) - self.y)[:, None], across[None]


class Storm(Event):
    """A round vortex: low pressure, a warm core, winds around it."""

    def distance(self, width: int, box: Plane) -> Array:
        """From the centre, squared: 1 at the rim of what is labelled."""
        down, across = self.offsets(width, box)
        return (down * down + across * across) * (math.pi / self.area)

    def traits(self, width: int, box: Plane) -> Traits:
        """What the storm adds to each trait on a box: a warm core, and wind that circles it."""
        down, across = self.offsets(width, box)
        core = self.strength / (1 + self.distance(width, box)) ** 2
        wind = core * math.sqrt(math.pi / self.area)
        return Traits(core=core, swirl_x=-down * wind, swirl_y=across * wind)


class River(Event):
    """A long filament of vapour, and the wind along it."""

    def distance(self, width: int, box: Plane) -> Array:
        """Squared, 1 at the rim of what is labelled: of an ellipse bent along a parabola, which keeps its area."""
        down, across = self.offsets(width, box)
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        reach = math.sqrt(self.area * SLENDER / math.pi)
        along, aside = (cos * across + sin * down) / reach, (cos * down - sin * across) / reach
        aside = (aside - self.bend * along * along) * SLENDER
        return along * along + aside * aside

    def traits(self, width: int, box: Plane) -> Traits:
        """What the river adds to each trait on a box: vapour, and wind along it."""
        far = self.distance(width, box)
        vapour = self.strength / (1 + far * far)
        return Traits(vapour=vapour, flow_x=math.cos(self.angle) * vapour, flow_y=math.sin(self.angle) * vapour)


@dataclass(frozen=True)
class Weather:
    """A map that closes round in x. Storms and rivers, so many at any time, are as large as their share asks for."""

    seed: int
    height: int
    width: int
    storms: int
    rivers: int

    def __post_init__(self) -> None:
        if min(self.storms, self.rivers) < 1:
            raise ValueError(f"{self.storms} storms and {self.rivers} rivers: there must be at least one of each")

    def at(self, sample: int) -> tuple[list[Storm], list[River]]:
        """The storms and rivers of a sample."""
        return (
            [Storm(*self._event(_STORMS, slot, sample, STORM, self.storms)) for slot in range(self.storms)],
            [River(*self._event(_RIVERS, slot, sample, RIVER, self.rivers)) for slot in range(self.rivers)],
        )

    def _event(self, stream: int, slot: int, sample: int, label: int, count: int) -> tuple[float, ...]:
        """What is now in a slot of a stream. One follows another, and slots change at different times."""
        # Slots are born at different samples, so that not all change at once.
        life, age = divmod(sample + slot * LIFE // count, LIFE)
        y, x, drift_y, drift_x, strength, angle, bend = drawn(self.seed, stream, life * count + slot, 7).tolist()
        area = FREQUENCIES[label] * self.height * self.width / count
        gone = age / LIFE
        y = 0.3 + 0.4 * y + 0.1 * (drift_y - 0.5) * gone
        x = x + (drift_x - 0.5) * gone
        strength = (0.7 + 0.3 * math.sin(math.pi * gone)) * (0.8 + 0.4 * strength)
        return area, y * self.height, x * self.width, strength, math.pi * (angle - 0.5) * 0.7, 0.8 * (bend - 0.5)

    def labels(self, sample: int, box: Box) -> Array:
        """The class of each pixel of a box; a storm lies over a river."""
        plane = (box[0], box[1])
        classes = np.full(shape_of(box), BACKGROUND)
        storms, rivers = self.at(sample)
        for river in rivers:
            classes[river.distance(self.width, plane) < 1] = RIVER
        for storm in storms:
            classes[storm.distance(self.width, plane) < 1] = STORM
        return classes

    def channels(self, sample: int, box: Box) -> Array:
        """A box of the channels: grain, smooth noise, and how strongly each channel shows each trait."""
        plane = (box[1], box[2])
        shown = grain(self.seed, sample, (len(CHANNELS), self.height, self.width), box) * np.float32(GRAIN)
        seen = [event.traits(self.width, plane) for events in self.at(sample) for event in events]
        # Each trait summed over all storms and rivers, once for all channels.
        together = [sum(each) for each in zip(*seen, strict=True)]
        responses = list(CHANNELS.values())
        for place, channel in enumerate(range(*box[0])):
            shown[place] += self._smooth(channel, sample, plane)
            shown[place] += sum(r * trait for r, trait in zip(responses[channel], together, strict=True) if r)
        return shown

    def _smooth(self, channel: int, sample: int, plane: Plane) -> Array:
        """Waves that drift with time, of variance 1 together."""
        total = np.zeros(shape_of(plane), np.float32)
        for down, across, phase, speed in drawn(self.seed, _WAVES, channel, WAVES, 4).tolist():
            across = round((2 * across - 1) * FINEST)  # a whole number, for the map closes round
            phase += (speed - 0.5) * sample / LIFE
            total += wave((2 * down - 1) * FINEST, across, phase, (self.height, self.width), plane)
        return total * np.float32(math.sqrt(2 / WAVES))


def fields(
    samples: int, seed: int = 0, height: int = 768, width: int = 1152, storms: int = 6, rivers: int = 6
) -> dict[str, Field]:
    """``x``: 16 channels of a map; ``y``: the class of each pixel."""
    weather = Weather(seed, height, width, storms, rivers)
    shape = (len(CHANNELS), height, width)
    return {
        "x": Field(Generated(weather.channels, samples, shape, "CHW")),
        "y": Field(Generated(weather.labels, samples, shape[1:], "HW", "int64")),
    }


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy in which storms count most; unweighted, a network would learn to see background everywhere."""
    weight = torch.tensor(WEIGHTS, dtype=output.dtype, device=output.device)
    return F.cross_entropy(output, batch["y"], weight)
