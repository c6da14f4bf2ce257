"""Synthetic CT scans: a body with an organ, and lesions in the organ.

A body is an ellipsoid with a spine, a second organ that looks almost like the first, and the organ itself: a large
ellipsoid whose surface is deformed by waves. Lesions are small balls within it, darker than the organ and as dark as
much of the rest. Edges are as wide as the scanner's blur; noise is drawn by voxel.

Everything is computed voxel by voxel from coordinates, with sums and products alone, so that a box of a volume costs
its own voxels and has the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..data import Field, Generated
from ..geometry import Box
from ..random.draw import Draw
from ..random.generator import GlobalBox

Floats = npt.NDArray[np.float64]

BACKGROUND, ORGAN, LESION = range(3)
AIR, TISSUE, SPINE, NEIGHBOUR, LIVER, TUMOUR = -1.0, 0.0, 0.9, 0.3, 0.45, 0.1  # intensities
BLUR = 1.5  # width of an edge, in voxels
NOISE = 0.15
LESIONS = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ellipsoid:
    """Where ``distance`` is below one. Lengths are shares of the volume's side; ``waves`` deform the surface."""

    centre: Floats
    radii: Floats
    waves: Floats | None = None  # for each dim height, number and phase

    def depth(self, axes: list[Floats]) -> Floats:
        """How far inside each voxel lies, about in shares of the side: above zero inside, below it outside."""
        square: Floats = sum(
            (((x - c) / r) ** 2 for x, c, r in zip(axes, self.centre, self.radii, strict=True)), start=np.zeros(())
        )
        if self.waves is not None:
            for x, (height, number, phase) in zip(axes, self.waves, strict=True):
                square = square * (1 + height * np.sin(2 * np.pi * (number * x + phase)))
        return np.asarray((1 - np.sqrt(square)) * self.radii.min())


@dataclass(frozen=True)
class Body:
    """One sample: the shapes in it."""

    body: Ellipsoid
    spine: Ellipsoid
    neighbour: Ellipsoid
    organ: Ellipsoid
    lesions: tuple[Ellipsoid, ...]

    def layers(self) -> Iterator[tuple[Ellipsoid, float]]:
        """What lies over what, with its intensity."""
        yield self.body, TISSUE
        yield self.spine, SPINE
        yield self.neighbour, NEIGHBOUR
        yield self.organ, LIVER
        yield from ((lesion, TUMOUR) for lesion in self.lesions)


@dataclass(frozen=True)
class Scans:
    """Intensities: air is -1, soft tissue 0."""

    seed: int
    size: int

    def __call__(self, sample: int, box: Box) -> npt.NDArray[np.float32]:
        axes = _axes(self.size, box[1:])
        volume = np.full(tuple(i.size for i in box[1:]), AIR)
        for shape, intensity in body(self.seed, sample).layers():
            # A linear edge: cheap, and the same bits for every box.
            share = np.clip(0.5 + shape.depth(axes) * (self.size / BLUR), 0.0, 1.0)
            volume = volume + share * (intensity - volume)
        noise = Draw(GlobalBox((1, *(self.size,) * 3), box), _CPU, (self.seed, sample)).normal(torch.float64, 10)
        return np.asarray(volume + NOISE * noise.numpy(), np.float32)


@dataclass(frozen=True)
class OrganLabels:
    """The class of each voxel: background, organ or lesion."""

    seed: int
    size: int

    def __call__(self, sample: int, box: Box) -> npt.NDArray[np.int64]:
        axes, one = _axes(self.size, box), body(self.seed, sample)
        labels = np.where(one.organ.depth(axes) > 0, ORGAN, BACKGROUND)
        for lesion in one.lesions:
            labels = np.where(lesion.depth(axes) > 0, LESION, labels)
        return labels.astype(np.int64)


def volumes(samples: int, seed: int = 0, size: int = 32) -> dict[str, Field]:
    """``x``: scans of ``size`` voxels a side; ``y``: the classes of their voxels."""
    scans = Generated(Scans(seed, size), samples, (1, size, size, size), "CDHW")
    return {"x": Field(scans), "y": Field(Generated(OrganLabels(seed, size), samples, (size,) * 3, "DHW", "int64"))}


def body(seed: int, sample: int) -> Body:
    """The shapes of one sample, drawn by its number."""
    chance = _Chance(seed, sample)
    organ = Ellipsoid(
        chance.about([0.5, 0.48, 0.36], 0.04),
        chance.about([0.30, 0.24, 0.22], 0.03),
        np.stack([chance.about([0.2] * 3, 0.1), chance.about([1.5] * 3, 0.7), chance.about([0.5] * 3, 0.5)], 1),
    )
    return Body(
        Ellipsoid(chance.about([0.5] * 3, 0.02), chance.about([0.9, 0.42, 0.46], 0.03)),
        Ellipsoid(chance.about([0.5, 0.82, 0.5], 0.02), chance.about([2.0, 0.07, 0.07], 0.01)),
        Ellipsoid(chance.about([0.5, 0.5, 0.76], 0.05), chance.about([0.18, 0.12, 0.11], 0.03)),
        organ,
        tuple(_lesion(chance, organ) for _ in range(LESIONS)),
    )


def _lesion(chance: _Chance, organ: Ellipsoid) -> Ellipsoid:
    """Well inside, whatever the waves do to the surface."""
    return Ellipsoid(organ.centre + organ.radii * chance.about([0.0] * 3, 0.45), chance.about([0.08] * 3, 0.025))


class _Chance:
    """Numbers for one sample, in the order in which they are asked for."""

    def __init__(self, seed: int, sample: int) -> None:
        self._numbers = Draw(GlobalBox.all_of((128,)), _CPU, (seed, sample)).uniform(torch.float64).numpy()
        self._used = 0

    def about(self, middles: list[float], reach: float) -> Floats:
        """One number for each middle, no further from it than ``reach``."""
        drawn = self._numbers[self._used : self._used + len(middles)]
        self._used += len(middles)
        return np.asarray(np.array(middles) + reach * (2 * drawn - 1))


def _axes(size: int, box: Box) -> list[Floats]:
    """The coordinate of each voxel's middle along each dim, in shares of the side, ready to broadcast."""
    dims = len(box)
    return [
        ((np.arange(size) + 0.5) / size)[i.lo : i.hi].reshape(-1, *(1,) * (dims - d - 1)) for d, i in enumerate(box)
    ]
