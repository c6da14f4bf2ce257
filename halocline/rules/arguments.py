"""Arguments of `hc.shard` and its kin that are of another type, or in another order: told with what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import MeshError, ShardingError
from ..world import Mesh


def check_call(name: str, tensor: Any, mesh: Any, dims: Any) -> None:
    """``name(tensor, mesh, {dim: axis})``, or an error that says what is amiss."""
    if isinstance(mesh, Tensor) or isinstance(tensor, Mesh):
        raise MeshError(f"hc.{name} takes the tensor first, then the mesh: hc.{name}(tensor, mesh, {{2: 'depth'}})")
    if not isinstance(tensor, Tensor):
        values = "array" if type(tensor).__name__ == "ndarray" else "values"
        raise ShardingError(f"hc.{name} takes a torch tensor, not {_kind(tensor)}; give torch.as_tensor({values})")
    if not isinstance(mesh, Mesh):
        raise MeshError(f"hc.{name}: the mesh is {_kind(mesh)}; make one with hc.Mesh(depth=2)")
    check_dims(name, dims, mesh)


def check_dims(name: str, dims: Any, mesh: Mesh) -> None:
    """Dims are integers and axes are named by the mesh, or an error says which are not."""
    if not isinstance(dims, Mapping):
        raise ShardingError(f"hc.{name}: dims is {_kind(dims)}; map dims of the tensor to axes, such as {{2: 'depth'}}")
    for dim, axis in dims.items():
        if isinstance(dim, str) and isinstance(axis, int):
            turned = {value: key for key, value in dims.items()}
            raise ShardingError(
                f"hc.{name}: dims={dict(dims)} maps axes to dims; it maps dims of the tensor to axes of the mesh, so "
                f"write {turned}"
            )
        if not isinstance(dim, int) or isinstance(dim, bool) or not isinstance(axis, str):
            raise ShardingError(
                f"hc.{name}: dims={dict(dims)} has {dim!r}: {axis!r}; it maps numbers of dims to names of axes, such "
                f"as {{2: {next(iter(mesh.sizes), 'depth')!r}}}"
            )


def _kind(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    prefix = "" if module in ("builtins", "halocline") else f"{module}."
    return f"a {prefix}{type(value).__name__}"
