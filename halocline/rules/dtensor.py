"""From torch's DTensor to sharded tensors and back, gradients included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import MeshError, ShardingError
from ..geometry import Partition
from ..tensor import Cut, ShardedTensor, Sharding, mean_over_whole_axes, unwrap, wrap
from ..world import Mesh, OwnFunction
from .api import cut_like

if TYPE_CHECKING:  # the package takes long to load, and few runs need it
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def from_dtensor(tensor: DTensor, mesh: Mesh) -> Tensor:
    """The same tensor on ``mesh``, whose axes are the named dims of the DTensor's own mesh; nothing moves.

    Each dim may be cut along one axis. A tensor that is whole everywhere comes out as a plain one.
    """
    _check_same_ranks(tensor.device_mesh, mesh)
    cuts: list[Cut | None] = [None] * tensor.ndim
    placements: tuple[Any, ...] = tensor.placements
    for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), placements, strict=True):
        # Partial sums and strided shards have no like here.
        if placement.is_replicate() or mesh.sizes[axis] == 1:
            continue
        if type(placement).__name__ != "Shard" or cuts[placement.dim] is not None:
            raise ShardingError(
                f"a DTensor placed {placements} has no like on {mesh}: each dim is cut along one axis, and a "
                "tensor is cut or whole; call .redistribute() on it first"
            )
        cuts[placement.dim] = Cut(axis, _chunks(tensor.shape[placement.dim], mesh.sizes[axis]))
    sharding = Sharding(mesh, tuple(tensor.shape), cuts)
    tile = _FromLocal.apply(tensor.to_local(), sharding)
    return wrap(tile, sharding) if sharding.axes else tile


def to_dtensor(tensor: Tensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The same tensor as a DTensor, on a mesh of torch with the same ranks and names; by default one is made.

    DTensor cuts at multiples of the first part's size: a tensor cut elsewhere is cut anew first.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, ShardedTensor):
        raise ShardingError("a plain tensor lies on no mesh; use DTensor.from_local, or hc.shard first")
    old = tensor.sharding
    mesh, where = old.mesh, {cut.axis: dim for dim, cut in enumerate(old.cuts) if cut}
    target = device_mesh if device_mesh is not None else _device_mesh(mesh, unwrap(tensor).device.type)
    _check_same_ranks(target, mesh)
    cuts = [c and Cut(c.axis, _chunks(size, mesh.sizes[c.axis])) for c, size in zip(old.cuts, old.shape, strict=True)]
    new = Sharding(mesh, old.shape, cuts)
    # Most tensors are cut as DTensor cuts: nothing moves.
    tile = unwrap(tensor if new is old else cut_like(tensor, new))
    placements = [Shard(where[name]) if name in where else Replicate() for name in target.mesh_dim_names or ()]
    stride = torch.empty(old.shape, device="meta").stride()
    return DTensor.from_local(tile, target, placements, run_check=False, shape=torch.Size(old.shape), stride=stride)


class _FromLocal(OwnFunction):
    """On axes on which the tensor is whole, each rank holds a share of its gradient, and DTensor expects all of it."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, sharding: Sharding):  # type: ignore[no-untyped-def]
        """The tile itself."""
        ctx.sharding = sharding
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The true gradient: the mean over the axes on which the tensor is whole."""
        return mean_over_whole_axes(gradient, ctx.sharding), None


def _chunks(size: int, parts: int) -> Partition:
    """As torch.chunk cuts: all parts as large as the first, while there is something left."""
    step = -(-size // parts)
    return Partition(tuple(min(size, step * part) for part in range(parts + 1)))


def _check_same_ranks(theirs: DeviceMesh, mesh: Mesh) -> None:
    """Raise unless both meshes have the same axis names and the same ranks at the same places."""
    names = theirs.mesh_dim_names or ()
    ours = torch.arange(mesh.size).reshape(tuple(mesh.sizes.values()))
    if set(names) == set(mesh.names) and torch.equal(
        theirs.mesh.cpu(), ours.permute([mesh.names.index(name) for name in names])
    ):
        return
    raise MeshError(f"{theirs} does not have the ranks and names of {mesh}; build it with mesh_dim_names={mesh.names}")


_made: dict[Any, DeviceMesh] = {}


def _device_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """Made once: each brings process groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    if not torch.distributed.is_initialized():
        raise MeshError("a DTensor needs ranks that are processes, joined by torch.distributed")
    key = (mesh, device)
    if key not in _made:
        _made[key] = init_device_mesh(device, tuple(mesh.sizes.values()), mesh_dim_names=mesh.names)
    return _made[key]
