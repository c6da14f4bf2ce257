"""A counter generator: 64 bits for each (seed, call, stream) and global index, worked out where they are wanted.

The index goes through the mixer of SplitMix64 from a start that the key gives; a second word of the key and one more
multiplication follow, so that two calls whose starts lie close share no run of numbers. All of it is int64 arithmetic
that wraps around, hence the same bits on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .._torch_private import cuda_kernel
from ..geometry import Box, Interval, shape_of, slices, whole

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring indices start far apart
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
_LAST = 0xD6E8FEB86659FD93

#: Indices at a time: what is in work at once stays in the cache of a CPU, and keeps a GPU busy.
_PORTION = {"cpu": 1 << 16, "meta": 1 << 62}
_PORTION_ELSEWHERE = 1 << 24


@dataclass(frozen=True)
class GlobalBox:
    """A box of a tensor of global ``shape``: what the tile at hand is of the whole."""

    shape: tuple[int, ...]
    box: Box

    @classmethod
    def all_of(cls, shape: tuple[int, ...]) -> GlobalBox:
        """The box that is the whole."""
        return cls(shape, tuple(map(whole, shape)))

    def leading(self, dims: int) -> GlobalBox:
        """The first dims alone: what is drawn once for all of the others."""
        return GlobalBox(self.shape[:dims], self.box[:dims])

    @property
    def empty(self) -> bool:
        """Of the whole, not of the tile: whether numbers are drawn must be the same on every rank."""
        return 0 in self.shape


def signed(word: int) -> int:
    """The int64 that has these 64 bits.

    >>> signed(2**64 - 1), signed(5)
    (-1, 5)
    """
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mixed(word: int) -> int:
    """The mixer of SplitMix64 on one word, in Python's integers."""
    for shift, factor in _MIX:
        word ^= word >> shift
        word = word * (factor or 1) & _WORD
    return word


def keys(seed: int, call: int, stream: int) -> tuple[int, int]:
    """Two words for the numbers of one stream of one call."""
    word = 0
    for part in (seed, call, stream):
        word = _mixed((word ^ (part & _WORD)) + _STEP & _WORD)
    return word, _mixed(word + _STEP & _WORD)


def bits(shape: tuple[int, ...], box: Box, key: tuple[int, int], device: torch.device) -> Tensor:
    """64 random bits for each index of ``box``, as int64."""
    head, tail = _starts(shape, box, key[0], device)
    if device.type == "cuda":
        return _one_kernel()(head, tail, torch.full((1,), signed(key[1]), device=device)).reshape(shape_of(box))
    # Starts are affine in the flat index, so that they need no array of indices.
    words = head + tail
    spare = torch.empty_like(words)
    for shift, factor in _MIX:
        _xor_shifted(words, shift, spare)
        if factor is not None:
            words.mul_(signed(factor))
    words.add_(signed(key[1])).mul_(signed(_LAST))
    return _xor_shifted(words, 32, spare)


def _xor_shifted(words: Tensor, shift: int, spare: Tensor) -> Tensor:
    """torch shifts the sign in from the left; the mask takes it off."""
    torch.bitwise_right_shift(words, shift, out=spare)
    return words.bitwise_xor_(spare.bitwise_and_((1 << 64 - shift) - 1))


@cache
def _one_kernel() -> Callable[..., Tensor]:
    """The same in one pass over a GPU's memory, which step by step takes some twenty."""
    steps = [f"z ^= z >> {shift};" + (f" z *= {factor}ULL;" if factor else "") for shift, factor in _MIX]
    last = f"z = (z + (unsigned long long)second) * {_LAST}ULL; z ^= z >> 32;"
    start = "unsigned long long z = (unsigned long long)head + (unsigned long long)tail;"
    body = " ".join([start, *steps, last, "return (T)z;"])
    return cuda_kernel(f"template <typename T> T words(T head, T tail, T second) {{ {body} }}")


def _starts(shape: tuple[int, ...], box: Box, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``key + flat global index * step``, as the sum of a column for all dims but the last and a row for that."""
    head = torch.full((1,) * len(shape), signed(key), dtype=torch.int64, device=device)
    tail = torch.zeros_like(head)
    stride = _STEP
    for dim in reversed(range(len(shape))):
        row = torch.arange(box[dim].lo, box[dim].hi, device=device).mul_(signed(stride))
        row = row.view(-1, *(1,) * (len(shape) - dim - 1))
        head, tail = (head + row, tail) if dim < len(shape) - 1 else (head, row)
        stride = stride * shape[dim] & _WORD
    return head, tail


def filled(place: GlobalBox, dtype: torch.dtype, device: torch.device, numbers: Callable[[Box], Tensor]) -> Tensor:
    """A new tile of ``numbers(box)``, made in portions: it needs little memory besides the tile."""
    tile = torch.empty(shape_of(place.box), dtype=dtype, device=device)
    for box in _portions(place.box, _PORTION.get(device.type, _PORTION_ELSEWHERE)):
        own = tuple(part.shift(-all_of.lo) for part, all_of in zip(box, place.box, strict=True))
        tile[slices(own)] = numbers(box)
    return tile


def _portions(box: Box, most: int) -> Iterator[Box]:
    """The box in slices of its first dims, none with more than ``most`` indices."""
    count = math.prod(shape_of(box))
    if count <= most:
        yield box
        return
    dim = next(d for d, interval in enumerate(box) if interval.size > 1)
    lo, hi = box[dim]
    # Slices of the first dim that has more than one index: contiguous in the tile.
    step = max(1, (hi - lo) * most // count)
    for start in range(lo, hi, step):
        yield from _portions((*box[:dim], Interval(start, min(start + step, hi)), *box[dim + 1 :]), most)
