"""Which samples make up each batch. Depends on seed and epoch alone, so that it is the same for every mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ...errors import DataError
from ...geometry import whole
from ...random.generator import bits, keys

#: What the numbers of a seed are drawn for; each has a stream of its own.
ORDER_STREAM, GEOMETRY_STREAM, VALUE_STREAM = 1, 2, 3


class Step(NamedTuple):
    """A batch of the whole run: the epoch, its number in it, and the samples in order."""

    epoch: int
    number: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """Which samples each step of a run has: a function of the seed and the epoch, the same for every mesh."""

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise DataError(f"a batch needs at least 1 sample, not {self.batch}")
        if not self.steps:
            why = f"{self.samples} samples make no batch of {self.batch}"
            raise DataError(f"{why}; give more data, a smaller batch, or drop_last=False")

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def step(self, tick: int) -> Step:
        """The batch at ``tick``, counted from the first of epoch 0."""
        epoch, number = divmod(tick, self.steps)
        order = self.permutation(epoch)
        return Step(epoch, number, order[number * self.batch : (number + 1) * self.batch])

    def permutation(self, epoch: int) -> tuple[int, ...]:
        """The samples of an epoch, in order."""
        return _permutation(self.samples, self.seed, epoch) if self.shuffle else tuple(range(self.samples))


@lru_cache(maxsize=4)
def _permutation(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    # The order of random words: a permutation that any machine computes alike.
    words = bits((samples,), (whole(samples),), keys(seed, epoch, ORDER_STREAM), torch.device("cpu"))
    return tuple(words.argsort(stable=True).tolist())
