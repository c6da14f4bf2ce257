"""The state of a pipeline as one device would have it: by name, whole, on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..geometry import slices
from ..rules import gather
from ..tensor import ShardedTensor
from ..world import Label, Mesh, World
from ..world.text import broadcast_text
from .part import PartOfModel

_LABEL = Label("the state of a pipeline", "state_dict", "control")


def state_dict(
    model: nn.Module, part: PartOfModel, lane: int | None, meshes: Sequence[Mesh], names: Sequence[frozenset[str]]
) -> dict[str, Tensor]:
    """All tensors of the model, each from the first lane that has it."""
    own = part.tensors()
    found: dict[str, Tensor] = {}
    shapes = dict((*model.named_parameters(), *model.named_buffers()))
    for name, shape in shapes.items():
        home = next(n for n, mine in enumerate(names) if name in mine)
        found[name] = _from_lane(own.get(name) if lane == home else None, shape, meshes[home])
    by_identity = {id(tensor): name for name, tensor in shapes.items()}
    state = model.state_dict(keep_vars=True)
    return {name: found[by_identity[id(tensor)]] for name, tensor in state.items() if id(tensor) in by_identity}


def _from_lane(tensor: Tensor | None, like: Tensor, mesh: Mesh) -> Tensor:
    """A tensor that the ranks of ``mesh`` hold, whole on every rank of the world."""
    world = mesh.world.outermost
    if tensor is not None:
        whole = gather(tensor.detach()) if isinstance(tensor, ShardedTensor) else tensor.detach()
        value = whole.contiguous().cpu()
    else:
        value = torch.zeros(like.shape, dtype=like.dtype)
    root = mesh.members[0]
    ranks = (root, *(rank for rank in range(world.size) if rank != root))
    return world.broadcast(value, ranks, _LABEL).clone() if world.size > 1 else value.clone()


def take_state(part: PartOfModel, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's tensors, or its tiles of them, out of a state dict of the whole model."""
    missing = [name for name in part.state_dict() if name not in state]
    if missing:
        raise KeyError(f"the state dict lacks {', '.join(missing[:5])}")
    with torch.no_grad():
        for name, tensor in part.tensors().items():
            if name in state:
                _put(tensor, state[name])


def _put(tensor: Tensor, whole: Tensor) -> None:
    if isinstance(tensor, ShardedTensor):
        tensor._tile.detach().copy_(whole[slices(tensor.sharding.box)])
    else:
        tensor.copy_(whole)


def optimizer_state(
    part: PartOfModel, lane: int | None, meshes: Sequence[Mesh], names: Sequence[frozenset[str]], model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The optimizer's state by parameter, from the first lane that has it."""
    own, found = dict(part.named_parameters()), dict[str, dict[str, Any]]()
    for name in dict(model.named_parameters()):
        home = next(n for n, mine in enumerate(names) if name in mine)
        state = optimizer.state.get(own[name], {}) if lane == home else {}
        told = _told(meshes[home].world.outermost, meshes[home].members[0], _described(state))
        entries: dict[str, Any] = {}
        for key, description in told.items():
            if "number" in description:
                entries[key] = description["number"]
            else:
                like = torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]))
                entries[key] = _from_lane(state.get(key), like, meshes[home])
        if entries:
            found[name] = entries
    return found


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else {"number": value}
        for key, value in state.items()
    }


def _told(world: World, root: int, described: dict[str, Any]) -> dict[str, Any]:
    if world.size == 1:
        return described
    text = broadcast_text(world, root, json.dumps(described), _LABEL, 1 << 14)
    return dict(json.loads(text))


def take_optimizer_state(
    part: PartOfModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give an optimizer of this rank's parameters their part of a whole state."""
    for name, parameter in part.named_parameters():
        if name not in state:
            continue
        entries: dict[str, Any] = {}
        for key, value in state[name].items():
            if isinstance(value, Tensor) and tuple(value.shape) == tuple(parameter.shape) and value.ndim:
                with torch.no_grad():
                    entries[key] = torch.zeros_like(parameter, dtype=value.dtype)
                _put(entries[key], value.to(parameter.device))
            else:
                entries[key] = value.clone() if isinstance(value, Tensor) else value
        optimizer.state[parameter] = entries
