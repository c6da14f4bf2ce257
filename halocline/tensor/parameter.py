"""Parameters that are cut: each rank holds its tile, and the tile is the leaf of the autograd graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._torch_private import gradient_hooks, post_accumulate_hooks, take_place
from ..errors import MeshError
from ..world import AVERAGED
from .sharded import ShardedTensor, wrap
from .sharding import Sharding


def become_cut(parameter: nn.Parameter, tile: Tensor, sharding: Sharding, name: str) -> None:
    """Make a parameter, in place, one of which this rank holds ``tile``: the same object, which optimizers may hold.

    Nothing averages its gradient yet: the caller sees to that.
    """
    if parameter.grad is not None or gradient_hooks(parameter) or post_accumulate_hooks(parameter):
        raise MeshError(
            f"{name} has a gradient or hooks, and is to be cut; call hc.distribute before the first backward, and "
            "register hooks after it"
        )
    leaf = tile.detach().requires_grad_(parameter.requires_grad)
    # As the mark is there, wrap adds no hook that takes the mean of each gradient as it arrives.
    setattr(leaf, AVERAGED, True)
    with torch.enable_grad():
        shell = wrap(leaf, sharding)
    delattr(leaf, AVERAGED)
    parameter.__class__ = ShardedTensor  # type: ignore[assignment]
    parameter.sharding, parameter._tile, parameter._is_param = sharding, leaf, True  # type: ignore[attr-defined]
    take_place(parameter, shell)
