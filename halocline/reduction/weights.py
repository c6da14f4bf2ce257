"""The same initial values on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..world import Label, Mesh, World, ranks_with_same


def same_weights(tensors: Iterable[Tensor], world: World, ranks: tuple[int, ...] | None = None) -> None:
    """Give ``ranks`` (default: all) the values that the first of them has. By these ranks together."""
    ranks = tuple(range(world.size)) if ranks is None else ranks
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for same in by_kind.values():
            flat = torch.cat([t.reshape(-1) for t in same])
            values = world.broadcast(flat, ranks, Label("the first rank's weights", "distribute"))
            for tensor, part in zip(same, values.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


def share_weights(tensors: Iterable[Tensor], mesh: Mesh) -> None:
    """Broadcast each tensor's initial values over the axes on which it is whole. By all ranks together."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(ranks_with_same(tensor, mesh), []).append(tensor.detach())
    for ranks, members in groups.items():
        same_weights(members, mesh.world, ranks)
