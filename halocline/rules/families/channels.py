"""Norms of tensors whose channels are cut, as after a permute: for the call, the cut moves to another dim."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...geometry import Partition
from ...tensor import Cut, ShardedTensor, Sharding, here, unwrap
from ...world import Label
from ..api import cut_like


def whole_channels(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``norm(input, ...)`` see all channels of dim 1; its result is cut as its input was."""

    @wraps(norm)
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, ShardedTensor) or input.ndim < 2 or input.sharding.cuts[1] is None:
            return norm(input, *args, **kwargs)
        own = input.sharding
        moved = cut_like(input, _moved(own))
        _count(norm.__name__, input, moved)
        run = norm if isinstance(moved, ShardedTensor) else getattr(F, norm.__name__)
        return cut_like(run(moved, *args, **kwargs), own)

    return call


def _count(name: str, input: ShardedTensor, moved: Tensor) -> None:
    """As the executor counts shuffles and gathers."""
    world, label = input.sharding.mesh.world, Label(name, here())
    before, after = (unwrap(tensor).numel() for tensor in (input, moved))
    if isinstance(moved, ShardedTensor) and moved.sharding.axes == input.sharding.axes:
        world.redistributed("shuffle", label)
    else:
        world.redistributed("gather", label, (after - before) * input.element_size())


def _moved(own: Sharding) -> Sharding:
    """With the channels' cut on a spatial dim that is long enough; whole along that axis where there is none.

    Not on the batch, whose axis tells replicas apart.
    """
    cut = own.cuts[1]
    assert cut is not None
    cuts: list[Cut | None] = [None if dim == 1 else other for dim, other in enumerate(own.cuts)]
    ranks = own.mesh.sizes[cut.axis]
    free = [dim for dim in range(2, len(own.shape)) if cuts[dim] is None and own.shape[dim] >= ranks]
    if free:
        dim = min(free, key=lambda d: (own.shape[d] % ranks != 0, d))
        cuts[dim] = Cut(cut.axis, Partition.even(own.shape[dim], ranks))
    return Sharding(own.mesh, own.shape, cuts)
