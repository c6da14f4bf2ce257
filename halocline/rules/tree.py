"""Whatever a model takes or gives, cut and gathered: every tensor in a structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import ShardingError
from ..tree import map_tensors, tensors_in
from ..world import Mesh
from . import api


def shard_inputs(
    inputs: Any, mesh: Mesh, dims: Mapping[int, str], *, multiple: int = 1, check: bool | None = None
) -> Any:
    """Cut whatever a model takes: the first tensor as ``dims`` says, others of its spatial size alike, the rest whole.

    Space is counted from the end (``{0: "data", -3: "depth"}``), so that a target without channels is cut as its volume
    is. A tensor is cut along ``data`` if its first dim is the batch. ``check`` as in :func:`shard`.
    """
    tensors = tensors_in(inputs)
    if not tensors:
        raise ShardingError("there is no tensor among these inputs")
    first = tensors[0]
    space = {dim: axis for dim, axis in dims.items() if dim < 0}
    batch = {dim: axis for dim, axis in dims.items() if dim >= 0}
    if any(dim > 0 for dim in batch):
        raise ShardingError(f"count spatial dims from the end (width is -1), the batch as 0; got {dict(dims)}")
    trailing = tuple(first.shape[min([*space, 2 - first.ndim]) :]) if space else ()

    def place(tensor: Tensor) -> Tensor:
        """One tensor of the structure, cut along the axes whose sizes it shares with the first."""
        mine = dict(space) if space and tuple(tensor.shape[-len(trailing) :]) == trailing else {}
        if batch and tensor.ndim and tensor.shape[0] == first.shape[0] and tensor.ndim > len(trailing):
            mine |= batch
        return api.shard(tensor, mesh, mine, multiple=multiple, check=check) if mine else tensor

    return map_tensors(place, inputs)


def gather(value: Any) -> Any:
    """Whole and plain on every rank: a tensor, or every tensor in a structure."""
    return map_tensors(api.gather, value)
