"""The strides that a sharded tensor would have on one rank, which decide where torch's functions copy.

``x[:, :, :4].contiguous()`` is a copy on one rank, since the crop has gaps; a tile that lies wholly inside the crop has
none. So a view that is not dense remembers its strides on one rank, and everything else is dense in the order of its
tile's dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.layout import channels_last_of, memory_format_of, suggests_channels_last
from .sharded import ShardedTensor

Strides = tuple[int, ...]


def dense_strides(shape: tuple[int, ...], like: Tensor) -> Strides:
    """Without gaps, the dims in the order in which they lie in ``like``, where the stride of a dim of one says nothing.

    >>> dense_strides((2, 3, 8), torch.zeros(2, 4, 3).transpose(1, 2))
    (24, 1, 3)
    """
    # Dims of size one have any stride: the memory format decides.
    form = memory_format_of(like)
    if form is not torch.contiguous_format or like.is_contiguous():
        form = channels_last_of(like) if suggests_channels_last(like) else form
        return torch.empty(shape, device="meta", memory_format=form).stride()
    steps = like.stride()
    # From the outermost dim in memory to the innermost.
    order = sorted(range(len(shape)), key=lambda dim: (-steps[dim], dim))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def one_rank_strides(tensor: ShardedTensor) -> Strides:
    """The strides that the tensor would have on one rank."""
    if tensor._strides is not None:
        return tensor._strides
    return dense_strides(tensor.sharding.shape, tensor._tile)


def on_one_rank(tensor: Tensor) -> Tensor:
    """A tensor without values that has the shape, strides and dtype of ``tensor`` on one rank."""
    if isinstance(tensor, ShardedTensor):
        shape, strides = tensor.sharding.shape, one_rank_strides(tensor)
        return torch.empty_strided(shape, strides, dtype=tensor._tile.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
