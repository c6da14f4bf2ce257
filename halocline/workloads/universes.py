"""Universes by chance: cubes of matter at four redshifts, Gaussian random fields whose power spectra four numbers set.

All redshifts have a spectrum of one shape, of waves some sixteen voxels long and longer, and differ in its height:

    log deviation at redshift z = REACH * (amplitude + growth * (-1, -1, 1, 1)[z] + bend * (1, -1, -1, 1)[z]
                                           + wiggle * (-1, 1, -1, 1)[z]),

with the four numbers between -0.5 and 0.5. These are the targets. Redshifts lie far apart along the line of sight, so
that each has waves of its own.

What can be known of them is a matter of how many waves there are to see. A Gaussian field of N independent waves tells
the logarithm of its deviation up to a variance of 1 / (2 N), and N grows with the volume: a guess from an eighth of a
cube misses eight times as much, and somewhat more, since it does not see waves longer than itself (``scatter``).
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
from ..random.generator import GlobalBox

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[np.float32]

PARAMETERS = ("amplitude", "growth", "bend", "wiggle")
SHAPES = np.array([[1, 1, 1, 1], [-1, -1, 1, 1], [1, -1, -1, 1], [-1, 1, -1, 1]], np.float64)  # over the redshifts
REDSHIFTS = SHAPES.shape[1]
REACH = 0.5
CUT = 0.06  # cycles a voxel: power falls as exp(-2 (k / CUT)^2)
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
    cubes = Generated(Cubes(seed, size), samples, (REDSHIFTS, size, size, size), "CDHW")
    return {"x": Field(cubes), "y": Field(Generated(Targets(seed), samples, (len(PARAMETERS),), "C"))}


def targets(seed: int, sample: int) -> Floats:
    """The parameters of one universe."""
    drawn = Draw(GlobalBox.all_of((len(PARAMETERS),)), _CPU, (seed, sample)).uniform(torch.float64)
    return drawn.sub_(0.5).numpy()


def deviations(parameters: Floats) -> Floats:
    """Of the field at each redshift."""
    return np.asarray(np.exp(REACH * parameters @ SHAPES))


def scatter(size: int) -> float:
    """Variance of the guess at a parameter from how much a cube fluctuates, and nothing else."""
    power = _spectrum(size)
    # The effective number of independent waves.
    waves = _both(power, size).sum() ** 2 / _both(power**2, size).sum()
    return float(1 / (2 * waves) / (REDSHIFTS * REACH**2))


@lru_cache(maxsize=2 * REDSHIFTS)
def _channel(cubes: Cubes, sample: int, redshift: int) -> Array:
    """One redshift of one universe: white noise, shaped in Fourier space."""
    shape = (cubes.size,) * 3
    white = Draw(GlobalBox.all_of(shape), _CPU, (cubes.seed, sample)).normal(torch.float32, 10 + 2 * redshift)
    waves = np.fft.rfftn(white.numpy(), axes=(0, 1, 2)) * _share(cubes.size)
    deviation = deviations(targets(cubes.seed, sample))[redshift]
    return np.asarray(deviation * np.fft.irfftn(waves, shape, axes=(0, 1, 2)), np.float32)


@lru_cache(maxsize=2)
def _share(size: int) -> Array:
    """What is kept of each wave's modulus, for a field of variance one."""
    power = _spectrum(size)
    return np.asarray(np.sqrt(power / (_both(power, size).sum() / size**3)), np.float32)


def _spectrum(size: int) -> Floats:
    """Without the mean, which is the same in all universes."""
    k, half = np.fft.fftfreq(size), np.fft.rfftfreq(size)
    power = np.exp(-2 * (k[:, None, None] ** 2 + k[:, None] ** 2 + half**2) / CUT**2)
    power[0, 0, 0] = 0.0
    return np.asarray(power)


def _both(of_half: Floats, size: int) -> Floats:
    """Real fields are given by half of their waves: the others, opposite to these, count too."""
    half = np.fft.rfftfreq(size)
    return np.asarray(of_half * np.where((half > 0) & (half < 0.5), 2, 1))
