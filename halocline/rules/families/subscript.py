"""What stands between the brackets of ``x[...]``, read as torch reads it.

An index becomes a list with one item for each dim of the tensor and for each new dim: a number, a slice, None, or a
tensor of positions or of truth values, which covers as many dims as it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index as as_int
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tensor import ShardedTensor
from ..table import refuse

Basic = int | slice | None
#: An integer, a slice, a new dim, or a tensor of positions.
Item = Basic | Tensor


def is_basic(index: Any) -> bool:
    """Integers, slices, new dims and an ellipsis alone: their places are known without looking at any value."""
    return all(_is_basic(item) for item in index) if type(index) is tuple else _is_basic(index)


def _is_basic(item: Any) -> bool:
    """Is one item an integer, a slice of integers, a new dim or an ellipsis?"""
    kind = type(item)
    if kind is slice:
        return not any(isinstance(end, Tensor) for end in (item.start, item.stop, item.step))
    return kind is int or item is None or item is Ellipsis


def items_of(index: Any, ndim: int) -> list[Any]:
    """One item a dim of the tensor, and a None for each new dim; a mask stands for as many dims as it has."""
    given = _without_truths([_read(item) for item in _as_tuple(index)])
    named = sum(_dims_of(item) for item in given)
    if named > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    rest = [slice(None)] * (ndim - named)
    if not any(item is Ellipsis for item in given):
        return given + rest
    # As in torch, the first ellipsis takes the rest; further ones take one dim each.
    place = next(place for place, item in enumerate(given) if item is Ellipsis)
    after = [slice(None) if item is Ellipsis else item for item in given[place + 1 :]]
    spare = sum(item is Ellipsis for item in given[place + 1 :])
    return given[:place] + rest[: len(rest) - spare] + after


def _as_tuple(index: Any) -> tuple[Any, ...]:
    """A list with a slice, a new dim or an ellipsis in it can be nothing but a tuple."""
    if isinstance(index, list) and any(isinstance(item, slice) or item is None or item is Ellipsis for item in index):
        return tuple(index)
    if isinstance(index, list) and any(not isinstance(item, (int, float, np.generic)) for item in index):
        raise refuse(
            "indexing", "torch reads a list of anything but numbers now as a tuple, now as a tensor", "say which it is"
        )
    return index if isinstance(index, tuple) else (index,)


def _read(item: Any) -> Any:
    """As an integer, a slice, None, an ellipsis, a truth value, or a tensor of at least one dim."""
    if item is None or item is Ellipsis or isinstance(item, (bool, int)):
        return item
    if isinstance(item, slice):
        return slice(*(None if end is None else as_int(end) for end in (item.start, item.stop, item.step)))
    if isinstance(item, np.bool_):
        return bool(item)
    if hasattr(item, "__index__") and not isinstance(item, (Tensor, np.ndarray)):
        return as_int(item)
    if not isinstance(item, Tensor):
        item = torch.as_tensor(item if not isinstance(item, range) else list(item))
        item = item.long() if item.numel() == 0 and item.dtype != torch.bool else item
    # torch still takes bytes for a mask.
    if item.dtype == torch.uint8:
        item = item.bool()
    if item.dtype.is_floating_point or item.dtype.is_complex:
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if item.ndim == 0:
        return bool(item) if item.dtype == torch.bool else int(item)
    return item


def _without_truths(items: list[Any]) -> list[Any]:
    """``x[True]`` is a new dim; whatever else truth values mean between brackets has a size that depends on them."""
    truths = [item for item in items if isinstance(item, bool)]
    if truths and (not all(truths) or any(isinstance(item, Tensor) for item in items)):
        raise refuse("indexing", "a truth value takes all of a tensor or nothing, and so decides its size", "use an if")
    return [None if isinstance(item, bool) else item for item in items]


def is_mask(item: Any) -> bool:
    """A tensor of truth values, which takes some elements of the dims it covers."""
    return isinstance(item, Tensor) and item.dtype == torch.bool


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if is_mask(item) else 1


def located(items: Sequence[Any], shape: Sequence[int]) -> list[Item]:
    """The same with positions in place of masks: those of a whole mask are the same on every rank."""
    located_items: list[Item] = []
    dim = 0
    for item in items:
        if is_mask(item):
            located_items += _positions(item, tuple(shape[dim : dim + item.ndim]))
        else:
            located_items.append(item)
        dim += _dims_of(item)
    return located_items


def _positions(mask: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The positions at which a whole mask is true."""
    if isinstance(mask, ShardedTensor):
        raise refuse(
            "indexing",
            "how much a cut mask takes depends on values that lie on other ranks",
            "use torch.where(mask, value, x) with a value for each place, or index with hc.gather(mask)",
        )
    if tuple(mask.shape) != shape:
        raise IndexError(f"The shape of the mask {list(mask.shape)} does not match that of the indexed dims {shape}")
    return iter(mask.nonzero(as_tuple=True))
