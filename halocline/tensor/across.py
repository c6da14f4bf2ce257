"""From a sharding on one mesh to a sharding on another, of which the ranks may be others and of another number."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import ShardingError
from ..geometry import Box, Crossing, plan_crossing, whole
from ..world import CrossingRoute, Label, MoveAcross
from .place import here
from .sharded import unwrap, wrap
from .sharding import Sharding


def boxes_of(sharding: Sharding) -> dict[int, Box]:
    """What each rank of the mesh owns, by its number in the world that all ranks joined."""
    mesh, found = sharding.mesh, {}
    for rank, member in enumerate(mesh.members):
        at = mesh.coordinates_of(rank)
        found[member] = tuple(
            cut.partition.piece(at[cut.axis]) if cut else whole(size)
            for size, cut in zip(sharding.shape, sharding.cuts, strict=True)
        )
    return found


def replicas(sharding: Sharding) -> int:
    """How many ranks hold each element."""
    return sharding.mesh.size // sharding.mesh.count(sharding.axes)


@lru_cache(maxsize=1024)
def crossing_between(old: Sharding, new: Sharding) -> Crossing:
    """The same on all ranks of both meshes."""
    if old.shape != new.shape:
        raise ShardingError(f"a tensor of {list(old.shape)} cannot become one of {list(new.shape)} on another mesh")
    return plan_crossing(boxes_of(old), boxes_of(new))


def move_across(
    tensor: Tensor | None, old: Sharding, new: Sharding, dtype: torch.dtype, key: str | None = None
) -> Tensor:
    """The tensor, cut as ``old`` on one mesh (None on ranks outside it), as ``new`` on another; by the ranks of both.

    Differentiable: ranks outside ``new`` get an empty tensor, from which their part of backward starts. By default
    the ranks count their moves between these meshes, which all of them must make in the same order; ``key`` is for
    callers with an order of their own.
    """
    world = old.mesh.world.outermost
    key = world.next_crossing(old.mesh.members, new.mesh.members) if key is None else key
    route = CrossingRoute(world, crossing_between(old, new), key, Label("moving to another mesh", here()),
                          dtype, torch.device("cpu") if tensor is None else tensor.device)  # fmt: skip
    tile = torch.empty(0, dtype=dtype) if tensor is None else unwrap(tensor)
    if tensor is None and torch.is_grad_enabled() and dtype.is_floating_point:
        tile.requires_grad_()
    moved: Tensor = MoveAcross.apply(tile.contiguous(), route, replicas(old) / replicas(new), False)
    if not new.mesh.is_member:
        return moved
    return wrap(moved, new) if new.axes else moved
