"""Transforms of values: element by element, on each rank's own tile, in place where possible.

A transform is called with the tile of one sample (a torch tensor that is not cut further) and :class:`At`, which says
what the tile is of the whole. It must do the same to an element whatever tile the element lies in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ...geometry import Box
from ...random.draw import Draw
from ...random.generator import GlobalBox, keys
from .order import VALUE_STREAM


@dataclass(frozen=True)
class At:
    """``box`` of a sample of global ``shape``, with ``dims`` by name, in one epoch of a run with that seed."""

    dims: str
    shape: tuple[int, ...]
    box: Box
    sample: int
    epoch: int
    seed: int

    def draw(self, number: int) -> Draw:
        """Random numbers by global index, other ones for each sample, epoch and ``number``."""
        key = keys(self.seed, self.epoch, VALUE_STREAM)[0]
        return Draw(GlobalBox(self.shape, self.box), torch.device("cpu"), (key, keys(self.sample, number, 0)[0]))

    def along(self, letter: str, numbers: Sequence[float], like: Tensor) -> Tensor:
        """``numbers``, one for each index of a dim, as a tensor that broadcasts against the tile."""
        if letter not in self.dims:
            if len(numbers) != 1:
                raise DataError(f"{len(numbers)} numbers were given for {letter}, and the data have dims {self.dims}")
            return torch.tensor(numbers, dtype=like.dtype)
        dim = self.dims.index(letter)
        if len(numbers) not in (1, self.shape[dim]):
            raise DataError(f"{len(numbers)} numbers were given, and {letter} has size {self.shape[dim]}")
        # This tile's part of them.
        own = numbers if len(numbers) == 1 else numbers[slice(*self.box[dim])]
        return torch.tensor(own, dtype=like.dtype).reshape(-1, *(1,) * (len(self.dims) - dim - 1))


Value = Callable[[Tensor, At], Tensor]


def _floating(tile: Tensor, what: str) -> None:
    if not (tile.is_floating_point() or tile.is_complex()):
        raise DataError(f"{what}: the data are {tile.dtype}; ask for dtype=torch.float32 in their Field")


@dataclass(frozen=True)
class Scale:
    """``value * factor + offset``."""

    factor: float
    offset: float = 0.0

    def __call__(self, tile: Tensor, at: At) -> Tensor:
        _floating(tile, "Scale")
        return tile.mul_(self.factor).add_(self.offset)


@dataclass(frozen=True)
class Normalize:
    """``(value - mean) / std``, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (*self.mean, *self.std))) or not all(self.std):
            raise DataError(f"Normalize: mean {self.mean} and std {self.std} would make values that are not finite")

    @classmethod
    def standard(cls, statistics: Any) -> Normalize:
        """To mean 0 and standard deviation 1 by :class:`halocline.data.Statistics`; a constant channel to 0."""
        return cls(tuple(statistics.mean), tuple(std or 1.0 for std in statistics.std))

    @classmethod
    def minmax(cls, statistics: Any) -> Normalize:
        """To 0 ... 1."""
        spans = (high - low for low, high in zip(statistics.min, statistics.max, strict=True))
        return cls(tuple(statistics.min), tuple(span or 1.0 for span in spans))

    def __call__(self, tile: Tensor, at: At) -> Tensor:
        _floating(tile, "Normalize")
        return tile.sub_(at.along("C", self.mean, tile)).div_(at.along("C", self.std, tile))


@dataclass(frozen=True)
class Noise:
    """Normal noise of that standard deviation, drawn by global index.

    Several in one field need different ``number``s.
    """

    sigma: float
    number: int = 0

    def __call__(self, tile: Tensor, at: At) -> Tensor:
        _floating(tile, "Noise")
        return tile.add_(at.draw(self.number).normal(tile.dtype).mul_(self.sigma))


@dataclass(frozen=True)
class Recode:
    """Gives classes other numbers: ``Recode({4: 3})``; classes that are not named stay."""

    codes: Mapping[int, int]

    def __call__(self, tile: Tensor, at: At) -> Tensor:
        was = tile.clone()
        for old, new in self.codes.items():
            tile[was == old] = new
        return tile
