"""Universes by chance: cubes of matter at four redshifts, whose fluctuations four numbers set.

Short waves, some ten voxels long, are a Gaussian random field with one power spectrum. How strong they are is modulated
by three waves as long as the cube, one along each dim, as long waves of matter modulate the growth of short ones:

    log deviation at (d, h, w) = amplitude + depth sin(2 pi d) + height sin(2 pi h) + width sin(2 pi w),

with d, h, w from 0 to 1 through the cube. These four are the targets. Redshifts lie far apart along the line of sight:
each has short waves of its own, a known growth apart.

What a part of a cube can tell: the amplitude, with the scatter of the fewer short waves in it. Of the long waves it
cannot tell the sign: half of one looks like the other half of its opposite, and a part does not say which half it is.
The best answer for them from an eighth of a cube is their mean, zero, and its error their variance. From a whole cube
all four are known to the scatter of its short waves. So nothing is hidden from parts but what is longer than they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ..data import Field, Generated
from ..geometry import Box, slices
from ..random.draw import Draw
from ..random.generator import Place

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[np.float32]

PARAMETERS = ("amplitude", "depth", "height", "width")
REACH = 0.5  # each parameter is between minus and plus this
GROWTH = (0.7, 0.8, 0.9, 1.0)  # from redshift to redshift
CUT = 0.1  # cycles a voxel: power falls as exp(-2 (k / CUT)^2)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Targets:
    """The parameters of a universe, each uniform in -0.5 ... 0.5."""

    seed: int

    def __call__(self, sample: int, box: Box) -> Array:
        return targets(self.seed, sample)[slices(box)].astype(np.float32)


@dataclass(frozen=True)
class Cubes:
    """Matter at four redshifts. A channel is made whole, since a Fourier transform has no parts; the last are kept."""

    seed: int
    size: int

    def __call__(self, sample: int, box: Box) -> Array:
        return np.stack([_channel(self, sample, c)[slices(box[1:])] for c in range(*box[0])])


def universes(samples: int, seed: int = 0, size: int = 64) -> dict[str, Field]:
    """``x``: cubes of ``size`` voxels a side at four redshifts; ``y``: their parameters."""
    cubes = Generated(Cubes(seed, size), samples, (len(GROWTH), size, size, size), "CDHW")
    return {"x": Field(cubes), "y": Field(Generated(Targets(seed), samples, (len(PARAMETERS),), "C"))}


def targets(seed: int, sample: int) -> Floats:
    drawn = Draw(Place.all_of((len(PARAMETERS),)), _CPU, (seed, sample)).uniform(torch.float64)
    return drawn.sub_(0.5).numpy()


def deviation(parameters: Floats, size: int) -> Floats:
    """Of the short waves at every place of a cube."""
    amplitude, *heights = 2 * REACH * parameters
    wave = np.sin(2 * np.pi * (np.arange(size) + 0.5) / size)
    depth, height, width = (np.exp(h * wave) for h in heights)
    return np.asarray(np.exp(amplitude) * depth[:, None, None] * height[:, None] * width)


@lru_cache(maxsize=2 * len(GROWTH))
def _channel(cubes: Cubes, sample: int, redshift: int) -> Array:
    shape = (cubes.size,) * 3
    white = Draw(Place.all_of(shape), _CPU, (cubes.seed, sample)).normal(torch.float32, 10 + 2 * redshift)
    share = _share(cubes.size)
    field = np.fft.irfftn(np.fft.rfftn(white.numpy(), axes=(0, 1, 2)) * share, shape, axes=(0, 1, 2))
    return np.asarray(GROWTH[redshift] * deviation(targets(cubes.seed, sample), cubes.size) * field, np.float32)


@lru_cache(maxsize=2)
def _share(size: int) -> Array:
    """What is kept of each wave's modulus: the root of the power spectrum, for a field of variance one.

    The mean is left out: it is the same in all universes.
    """
    k, half = np.fft.fftfreq(size), np.fft.rfftfreq(size)
    share = np.exp(-(k[:, None, None] ** 2 + k[:, None] ** 2 + half**2) / CUT**2)
    share[0, 0, 0] = 0.0
    twice = np.where((half > 0) & (half < 0.5), 2, 1)  # a wave's opposite is not among these
    return np.asarray(share / np.sqrt((twice * share**2).sum() / size**3), np.float32)
