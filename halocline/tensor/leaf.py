"""Leaves that are whole on some axis: what a rank holds of their gradient is a share, whose mean is the gradient."""

from __future__ import annotations

from torch import Tensor

from ..world import AVERAGED, Label, Route, Sum
from .place import here
from .sharding import Sharding


def mean_over_whole_axes(gradient: Tensor, sharding: Sharding) -> Tensor:
    """The gradient of a tensor cut so; ``gradient`` is what this rank holds of it."""
    mesh, others = sharding.mesh, _whole_axes(sharding)
    if not others:
        return gradient
    share = 1.0 / mesh.count(others)
    route = Route(mesh.world, mesh.ranks_along(others), Label("mean of a gradient", here()))
    return Sum.apply(gradient, route, (share, share))


def _whole_axes(sharding: Sharding) -> list[str]:
    """The axes on which several ranks hold the same tile."""
    mesh = sharding.mesh
    return [axis for axis in mesh.names if mesh.sizes[axis] > 1 and axis not in sharding.axes]


def watch_leaf(tile: Tensor, sharding: Sharding) -> None:
    """Take the mean of a leaf's gradient as it arrives, on its way into ``.grad`` or out of ``autograd.grad``."""
    if tile.requires_grad and tile.is_leaf and not getattr(tile, AVERAGED, False):
        # Later checks see by this mark that the gradient is averaged.
        setattr(tile, AVERAGED, True)
        if _whole_axes(sharding):  # a hook costs time in every backward
            tile.register_hook(lambda gradient: mean_over_whole_axes(gradient, sharding))
