"""Tensors that a model makes from another one: cut as that one is where the shape allows it, else whole.

Plain factories (``torch.zeros(x.shape)``, ``arange``, ``meshgrid``) see no sharded tensor. They give whole tensors,
which are right wherever they are used, and take their whole size on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...tensor import Cut, ShardedTensor, Sharding, undrawn, unwrap, wrap
from ..recipe import Recipe
from ..table import direct, refuse, rule
from .pointwise import elementwise


@rule(torch.empty_like)
def empty_like(*args: Any, **kwargs: Any) -> Recipe:
    """Cut as its model."""
    return elementwise(torch.empty_like, args, kwargs, inplace=False)


def alike(own: Sharding, shape: tuple[int, ...]) -> Sharding | None:
    """Cut as ``own``, of batch, channels and spatial dims, if the spatial dims are the same at the end of ``shape``.

    Batch and channels follow where they are the same too.
    """
    if shape == own.shape:
        return own
    # The last dims decide: a mask without channels is cut as its volume is.
    spatial = own.shape[2:]
    first = len(shape) - len(spatial)
    if not spatial or first < 0 or shape[first:] != spatial:
        return None
    cuts: list[Cut | None] = [*[None] * first, *own.cuts[2:]]
    for dim in (0, 1) if len(shape) == len(own.shape) else (0,):
        if dim < first and shape[dim] == own.shape[dim]:
            cuts[dim] = own.cuts[dim]
    return Sharding(own.mesh, shape, cuts)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Given as one argument or as several."""
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _new(
    function: Callable[..., Tensor], self: ShardedTensor, shape: tuple[int, ...], *rest: Any, **how: Any
) -> Tensor:
    """A new tensor cut as ``self`` is, where the shape allows it; else whole on every rank."""
    sharding = alike(self.sharding, shape)
    if sharding is None or not sharding.axes:
        whole = function(unwrap(self), shape, *rest, **how)
        return undrawn(whole, self.sharding) if function is Tensor.new_empty else whole
    return wrap(function(unwrap(self), sharding.tile_shape, *rest, **how), sharding)


def _register(function: Callable[..., Tensor]) -> None:
    """Register a factory method that takes nothing but a size."""

    def new(self: ShardedTensor, *given: Any, size: Any = None, **how: Any) -> Tensor:
        return _new(function, self, _size(given if size is None else (size,)), **how)

    direct(function, family="factory")(new)


for _function in (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty):
    _register(_function)


@direct(Tensor.new_full, family="factory")
def new_full(self: ShardedTensor, size: Any, fill_value: Any, **how: Any) -> Tensor:
    """Cut as ``self`` where the shape allows, else whole."""
    return _new(Tensor.new_full, self, tuple(size), fill_value, **how)


@direct(Tensor.new_tensor, family="factory")
def new_tensor(self: ShardedTensor, data: Any, **how: Any) -> Tensor:
    """A whole tensor of the values that are handed in."""
    if isinstance(data, ShardedTensor):
        raise refuse(Tensor.new_tensor, "it copies a cut tensor as if it were whole", "use x.detach().clone()")
    return unwrap(self).new_tensor(data, **how)
