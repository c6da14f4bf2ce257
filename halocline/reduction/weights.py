"""The same values everywhere, to begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..world import Label, World


def same_weights(tensors: list[Tensor], world: World) -> None:
    """Give every rank the values that rank 0 has."""
    everyone = tuple(range(world.size))
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for same in by_kind.values():
            flat = torch.cat([t.reshape(-1) for t in same])
            values = world.broadcast(flat, everyone, Label("rank 0's weights", "distribute"))
            for tensor, part in zip(same, values.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))
