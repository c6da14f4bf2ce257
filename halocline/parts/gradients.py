"""Gradients over several stages: sums of parameters that stages share, and one norm to clip by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..layout import Layout, layout_of
from ..reduction.owners import leaf_behind
from ..tensor import Sharding
from ..tensor.across import crossing_between
from ..world import CrossingRoute, Label, Mesh, World, cross, ranks_with_same
from .part import PartOfModel

Tied = Mapping[str, tuple[int, ...]]


def sum_tied(
    tied: Tied, meshes: Sequence[Mesh], part: PartOfModel, lane: int | None, layouts: Sequence[Layout],
    model: nn.Module, key: str,
) -> None:  # fmt: skip
    """Each parameter of several lanes gets the sum of their gradients: the first lane adds, and tells the others."""
    shapes = dict(model.named_parameters())
    for name, lanes in tied.items():
        if lane not in lanes:
            continue
        leaf = leaf_behind(part.tensors()[name])
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        lie = {n: _sharding(name, shapes[name], meshes[n], layouts[n], model) for n in lanes}
        first, others = lanes[0], lanes[1:]
        for other in others:
            if lane in (first, other):
                moved = _move(leaf.grad if lane == other else None, lie[other], lie[first], leaf, f"{key}/{name}/sum")
                leaf.grad = leaf.grad + moved if lane == first and moved is not None else leaf.grad
        for other in others:
            if lane in (first, other):
                moved = _move(leaf.grad if lane == first else None, lie[first], lie[other], leaf, f"{key}/{name}/told")
                leaf.grad = moved if lane == other else leaf.grad


def _move(tile: Tensor | None, old: Sharding, new: Sharding, like: Tensor, key: str) -> Tensor | None:
    label = Label("sum of a shared parameter's gradient", key, "gradients")
    name = f"{key}/{old.mesh.members}/{new.mesh.members}"
    route = CrossingRoute(old.mesh.world.outermost, crossing_between(old, new), name, label, like.dtype, like.device)
    pending = cross(route, tile)
    pending.wait()
    return pending.tensor


def _sharding(name: str, parameter: Tensor, mesh: Mesh, layout: Layout, model: nn.Module) -> Sharding:
    single = nn.Module()
    single.register_parameter("p", nn.Parameter(parameter.detach(), False))
    dims = [dims for pattern, dims in layout.items() if fnmatchcase(name, pattern)]
    made = layout_of(single, mesh, {"p": dims[-1]}) if dims else {}
    return made.get("p") or Sharding(mesh, tuple(parameter.shape), (None,) * parameter.ndim)


def clip_gradients(
    part: PartOfModel, mesh: Mesh | None, elsewhere: set[str], world: World, max_norm: float, norm_type: float
) -> Tensor:
    """Scale gradients to a common norm. Each element counts once: ``elsewhere`` are those that another lane counts."""
    leaves = {name: leaf_behind(parameter) for name, parameter in part.named_parameters()}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    total = torch.zeros(1, dtype=torch.float64)
    for name, gradient in gradients.items():
        if name in elsewhere or mesh is None:
            continue
        share = 1.0 / len(ranks_with_same(part.tensors()[name], mesh))
        size = torch.linalg.vector_norm(gradient.detach().double(), norm_type).cpu()
        if math.isinf(norm_type):
            total = torch.maximum(total, size)
        else:
            total += share * size**norm_type
    label, everyone = Label("norm of all gradients", "clip_grad_norm_", "control"), tuple(range(world.size))
    if math.isinf(norm_type):
        norm = world.maximum(total, everyone, label)
    else:
        norm = world.sum(total, everyone, label) ** (1 / norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm.reshape(())
