"""``hc.annotate``: how an intermediate result is to lie on the mesh, said in the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .._torch_private import running_modules
from ..errors import ShardingError
from ..tensor import Cut, ShardedTensor, Sharding, enter, here, make_sharding
from ..world import Label, Mesh
from .api import cut_like
from .partial import PARTIAL, PartialMark, PartialTensor, complete, into_parts, scatter
from .recipe import WHOLE, Link

_MESH = "_halocline_mesh"


class OwnMesh:
    """The mesh that a model was distributed over, kept on the model. A copy of the model has None instead."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def remember_mesh(model: nn.Module, mesh: Mesh) -> None:
    """Let :func:`annotate` find the mesh inside the model's forward."""
    model.__dict__[_MESH] = OwnMesh(mesh)


def annotate(
    tensor: Tensor, dims: Mapping[int, str | Link] | Link | PartialMark, *, mesh: Mesh | None = None
) -> Tensor:
    """Have a tensor lie otherwise from here on: dims that are named are cut along an axis or made whole.

        y = hc.annotate(y, {1: "model"})       # cut dim 1 over the ranks of axis model
        y = hc.annotate(y, {1: hc.WHOLE})      # every rank has all of dim 1
        y = hc.annotate(y, hc.WHOLE)           # all of it
        y = hc.annotate(y, hc.PARTIAL)         # a sum of parts, one on each rank of the axes on which it is whole

    Other dims stay as they are; an axis that cut another dim moves here. What must move, moves, and its adjoint in
    backward. The mesh is that of the tensor or, for a plain one, of the distributed model that is running. Where there
    is none, the tensor is returned as it is: the same model runs on one device.
    """
    if isinstance(tensor, PartialTensor):
        return _of_parts(tensor, dims)
    mesh = tensor.sharding.mesh if isinstance(tensor, ShardedTensor) else mesh or _running_mesh()
    if mesh is None:
        return tensor
    if dims is PARTIAL:
        return into_parts(tensor, mesh)
    sharding = _wanted(tensor, dims, mesh)
    if not isinstance(tensor, ShardedTensor):
        if not sharding.axes:
            return tensor
        tensor = enter(tensor, mesh, sharding.axes, Label("annotate", here()))
    return tensor if getattr(tensor, "sharding", None) is sharding else cut_like(tensor, sharding)


def _of_parts(tensor: PartialTensor, dims: Any) -> Tensor:
    """A sum that waits: it goes on waiting, is received in tiles, or is completed first."""
    if dims is PARTIAL:
        return tensor
    mesh, whole = tensor._sharding.mesh, dims == WHOLE
    goal = tensor._sharding if whole else _wanted(tensor._part, dims, mesh)
    scattered = None if whole else scatter(tensor, goal)
    return annotate(complete(tensor), dims, mesh=mesh) if scattered is None else scattered


def _running_mesh() -> Mesh | None:
    marks = (module.__dict__.get(_MESH) for module in running_modules())
    return next((mark.mesh for mark in marks if mark is not None), None)


def _wanted(tensor: Tensor, dims: Any, mesh: Mesh) -> Sharding:
    """The sharding with the annotated dims changed. Dims that keep their axis keep their points."""
    shape = tuple(tensor.shape)
    if dims == WHOLE:
        return Sharding(mesh, shape, (None,) * len(shape))
    if not isinstance(dims, Mapping):
        raise ShardingError(f"hc.annotate takes {{dim: axis}}, {{dim: hc.WHOLE}} or hc.WHOLE, and was given {dims!r}")
    old: tuple[Cut | None, ...] = tensor.sharding.cuts if isinstance(tensor, ShardedTensor) else (None,) * len(shape)
    split = make_sharding(mesh, shape, {dim: axis for dim, axis in dims.items() if isinstance(axis, str)})
    named = {dim % len(shape) for dim in dims if -len(shape) <= dim < len(shape)}
    if len(named) != len(dims):
        raise ShardingError(f"hc.annotate: {dict(dims)} does not name dims of a tensor of {len(shape)} dims once each")
    cuts = []
    for dim, (before, after) in enumerate(zip(old, split.cuts, strict=True)):
        kept = before if before is not None and dim not in named and before.axis not in split.axes else None
        same = before is not None and after is not None and before.axis == after.axis
        cuts.append(before if same else after or kept)
    return Sharding(mesh, shape, cuts)
