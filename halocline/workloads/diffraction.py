"""Synthetic 4D-STEM: scans of a thin specimen by a convergent beam of electrons, computed from the physics.

The specimen is a lattice of atoms, randomly turned, shifted and displaced; each atom is a Gaussian in the projected
potential. The beam is a disc of plane waves out of focus, aimed at each place of the scan in turn. The specimen shifts
the wave's phase in proportion to the potential. The camera counts the squared modulus of the Fourier transform of the
wave behind the specimen, with the noise of counting electrons.

The defocus is chosen such that a pixel of the camera is a pixel of the specimen: the disc is then a shadow image of
what the beam falls on, blurred by diffraction and shifted from place to place. A phase by itself leaves no trace in a
count; only its changes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ..data import Field, Generated
from ..geometry import Box, slices, whole
from ..random.draw import Draw
from ..random.generator import GlobalBox

Floats = npt.NDArray[np.float64]
Waves = npt.NDArray[np.complex128]

APERTURE = 0.45  # the disc's radius, in cycles a pixel
KEPT = 64  # patterns, potentials and beams that are kept once made
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scan:
    """What is fixed for all samples. Lengths are in pixels."""

    seed: int
    size: int
    scan: int  # places along each side; their number is the square
    step: float  # between places
    spacing: float  # of atoms
    atom: float  # the width of one
    phase: float  # at its middle, in radians
    electrons: float  # a pixel of the disc, on average


@dataclass(frozen=True)
class Patterns:
    """Roots of counts, of mean about one in the disc. A pattern is made whole, by its transform; the last are kept."""

    scan: Scan

    def __call__(self, sample: int, box: Box) -> npt.NDArray[np.float32]:
        return np.stack([_pattern(self.scan, sample, place)[slices(box[1:])] for place in range(*box[0])])


@dataclass(frozen=True)
class Potentials:
    """The projected potential, in units of the phase of one atom and with the mean taken off: no count shows that."""

    scan: Scan

    def __call__(self, sample: int, box: Box) -> npt.NDArray[np.float32]:
        whole_map = _potential(self.scan, sample)
        return (whole_map - whole_map.mean())[None][slices(box)].astype(np.float32)


def scans(
    samples: int,
    seed: int = 0,
    size: int = 32,
    scan: int = 4,
    step: float = 2.0,
    spacing: float = 8.0,
    atom: float = 1.6,
    phase: float = 0.8,
    electrons: float = 100.0,
) -> dict[str, Field]:
    """ "x": ``scan`` x ``scan`` patterns of ``size`` x ``size`` as channels; "y": the potential, of the same size."""
    fixed = Scan(seed, size, scan, step, spacing, atom, phase, electrons)
    patterns = Generated(Patterns(fixed), samples, (scan * scan, size, size), "CHW")
    return {"x": Field(patterns), "y": Field(Generated(Potentials(fixed), samples, (1, size, size), "CHW"))}


@lru_cache(maxsize=KEPT)
def _potential(scan: Scan, sample: int) -> Floats:
    """The whole map of a sample: a Gaussian for each atom."""
    axis = np.arange(scan.size)
    total = np.zeros((scan.size, scan.size))
    for row, column, height in _atoms(scan, sample):
        total += height * np.outer(_bump(axis - row, scan.atom), _bump(axis - column, scan.atom))
    return total


def _bump(distance: Floats, width: float) -> Floats:
    return np.asarray(np.exp(-0.5 * (distance / width) ** 2))


def _atoms(scan: Scan, sample: int) -> Floats:
    """Row, column and height of every atom that can be seen: a square lattice, turned, shifted and shaken."""
    turn, *shift = _uniform(scan, sample, (3,), 0)
    reach = int(scan.size / scan.spacing) + 2
    nodes = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2), -1).reshape(-1, 2)
    shaken = nodes + shift + 0.12 * _normal(scan, sample, nodes.shape, 1)
    sine, cosine = np.sin(turn * np.pi / 2), np.cos(turn * np.pi / 2)
    places = scan.size / 2 + scan.spacing * shaken @ np.array([[cosine, -sine], [sine, cosine]])
    heights = 0.5 + _uniform(scan, sample, (len(nodes), 1), 3)
    seen = np.all((places > -3 * scan.atom) & (places < scan.size + 3 * scan.atom), 1)
    return np.concatenate([places, heights], 1)[seen]


@lru_cache(maxsize=KEPT)
def _pattern(scan: Scan, sample: int, place: int) -> npt.NDArray[np.float32]:
    """What the camera shows while the beam stands at one place."""
    # A thin specimen changes the phase of the wave only.
    wave = _beam(scan, place) * np.exp(1j * scan.phase * _potential(scan, sample))
    expected = np.abs(np.fft.fftshift(np.fft.fft2(wave, norm="ortho"))) ** 2 * scan.electrons
    return _counted(scan, sample, place, expected)


def _counted(scan: Scan, sample: int, place: int, expected: Floats) -> npt.NDArray[np.float32]:
    """Poisson's noise by its normal approximation, which at a hundred electrons is near; the root makes it even."""
    shape = (scan.scan**2, scan.size, scan.size)
    here = GlobalBox(shape, (whole(place + 1)._replace(lo=place), *map(whole, shape[1:])))
    noise = Draw(here, _CPU, (scan.seed, sample)).normal(torch.float64, 10).numpy()[0]
    counts = np.maximum(expected + np.sqrt(expected) * noise, 0.0)
    return np.sqrt(counts / scan.electrons).astype(np.float32)


@lru_cache(maxsize=KEPT)
def _beam(scan: Scan, place: int) -> Waves:
    """The wave that falls on the specimen: the disc's plane waves, out of step by the square of their angle."""
    k = np.fft.fftfreq(scan.size)
    square = k[:, None] ** 2 + k**2
    # A wave from k goes through (size * k) pixels from the axis: the camera's pixel and the specimen's are then one.
    defocus = np.exp(-1j * np.pi * scan.size * square)
    row, column = (scan.step * (i - (scan.scan - 1) / 2) for i in divmod(place, scan.scan))
    aimed = np.exp(-2j * np.pi * (k[:, None] * (row + scan.size / 2) + k * (column + scan.size / 2)))
    return np.asarray(np.fft.ifft2((square <= APERTURE**2) * defocus * aimed, norm="ortho"))


def _uniform(scan: Scan, sample: int, shape: tuple[int, ...], stream: int) -> Floats:
    return Draw(GlobalBox.all_of(shape), _CPU, (scan.seed, sample)).uniform(torch.float64, stream).numpy()


def _normal(scan: Scan, sample: int, shape: tuple[int, ...], stream: int) -> Floats:
    return Draw(GlobalBox.all_of(shape), _CPU, (scan.seed, sample)).normal(torch.float64, stream).numpy()
