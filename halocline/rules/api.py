"""Public functions that make sharded tensors of plain ones, and plain ones of sharded ones.

All of them are collective: every rank of the mesh calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MeshError, Refused, ShardingError
from ..geometry import Partition
from ..tensor import (
    Cut,
    Fetch,
    ShardedTensor,
    Sharding,
    here,
    make_sharding,
    mean_over_whole_axes,
    recut,
    same_memory,
    unwrap,
    wrap,
)
from ..tree import map_tensors, tensors_in
from ..world import Label, Mesh, MovementFunction
from .partial import complete
from .same_sample import check_same

Points = Mapping[int, Sequence[int]]


def shard(
    tensor: Tensor,
    mesh: Mesh,
    dims: Mapping[int, str],
    *,
    points: Points | None = None,
    multiple: int = 1,
    check: bool | None = None,
) -> Tensor:
    """Cut a tensor that every rank holds whole; each keeps its box.

        mesh = hc.Mesh(data=2, depth=2)                      # four ranks
        x = hc.shard(volumes, mesh, {0: "data", 2: "depth"})  # [4, 1, 64, 64, 64]: this rank holds [2, 1, 32, 64, 64]
        loss = criterion(model(x), hc.shard(labels, mesh, {0: "data", 1: "depth"}))  # x.shape is the global shape

    ``dims`` maps tensor dims to mesh axes. Cuts are as even as can be, at multiples of ``multiple`` (give the total
    stride of the network, and its joins move nothing), or at ``points[dim]``. Axes of size one cut nothing.

    The ranks that share a sample compare what they bring, and refuse if it differs: the first 64 calls, then one in 61;
    ``check=True`` every time, ``check=False`` never.
    """
    _check_call("shard", tensor, mesh, dims)
    if isinstance(tensor, ShardedTensor):
        raise ShardingError("this tensor is sharded already; use hc.reshard to cut it otherwise")
    sharding = make_sharding(mesh, tuple(tensor.shape), dims, points, multiple)
    check_same(tensor, mesh, sharding.axes, check)
    if not (tensor.requires_grad and torch.is_grad_enabled() and sharding.axes):
        return cut_like(tensor, sharding)
    # An input that wants a gradient gets it whole, as it was given.
    whole = Sharding(mesh, tensor.shape, (None,) * tensor.ndim)
    return wrap(CutInput.apply(tensor, sharding, recut(whole, sharding), recut(sharding, whole)), sharding)


def shard_inputs(
    inputs: Any, mesh: Mesh, dims: Mapping[int, str], *, multiple: int = 1, check: bool | None = None
) -> Any:
    """Cut the inputs of a model: the first tensor as ``dims`` says, others of its spatial size alike, the rest whole.

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
    # All spatial dims of the first tensor, those that are not cut included.
    trailing = tuple(first.shape[min([*space, 2 - first.ndim]) :]) if space else ()

    def place(tensor: Tensor) -> Tensor:
        """One tensor of the structure, cut along the axes whose sizes it shares with the first."""
        mine = dict(space) if space and tuple(tensor.shape[-len(trailing) :]) == trailing else {}
        if batch and tensor.ndim and tensor.shape[0] == first.shape[0] and tensor.ndim > len(trailing):
            mine |= batch
        return shard(tensor, mesh, mine, multiple=multiple, check=check) if mine else tensor

    return map_tensors(place, inputs)


class CutInput(MovementFunction):
    """A whole input cut by its owner, who may read its gradient: that comes together again, whole on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sharding: Sharding, cut: Fetch, join: Fetch):  # type: ignore[no-untyped-def]
        """This rank's box of the whole tensor, as a copy."""
        ctx.sharding, ctx.join = sharding, join
        return cut(tensor.detach(), Label("shard", here())).clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The gradients of all boxes, gathered to the whole gradient on every rank."""
        # On axes that do not cut the input, a rank holds a share of this gradient.
        whole = mean_over_whole_axes(gradient, ctx.sharding)
        return ctx.join(whole, Label("gradient of an input", here())), None, None, None


def from_tile(
    tile: Tensor,
    mesh: Mesh,
    dims: Mapping[int, str],
    *,
    shape: Sequence[int] | None = None,
    points: Points | None = None,
) -> Tensor:
    """Make a sharded tensor of the tile this rank read itself.

    Without ``shape`` the ranks tell each other their tiles' sizes, and the global shape follows. With it, the cuts are
    those of :func:`shard`, and the tile must fit.
    """
    _check_call("from_tile", tile, mesh, dims)
    if shape is not None:
        sharding = make_sharding(mesh, shape, dims, points)
        if tuple(tile.shape) != sharding.tile_shape:
            raise ShardingError(
                f"rank {mesh.rank} brings a tile of {list(tile.shape)}; "
                f"of {list(shape)} it owns {list(sharding.tile_shape)}"
            )
    else:
        sharding = _agreed_sharding(tile, mesh, dims)
    if not sharding.axes:
        return tile
    if tile.grad_fn is not None and torch.is_grad_enabled():
        raise Refused(
            "from_tile",
            here(),
            "this tile was computed from other tensors, whose gradients would miss the other ranks' part",
            "make the sharded tensor first and compute with it, or hand over tile.detach()",
        )
    return wrap(tile, sharding)


def _agreed_sharding(tile: Tensor, mesh: Mesh, dims: Mapping[int, str]) -> Sharding:
    """Sizes along each axis, told to all ranks and checked: tiles in one slice must agree."""
    everyone = tuple(range(mesh.size))
    sizes = torch.zeros(mesh.size, tile.ndim, dtype=torch.int64, device="cpu")
    sizes[mesh.rank] = torch.tensor(tile.shape, device="cpu")
    # Each rank fills its own row: the sum is the table of all.
    sizes = mesh.world.sum(sizes, everyone, Label("from_tile", here()))
    named = make_sharding(mesh, tile.shape, dims).dims_by_axis()
    shape = list(tile.shape)
    cuts: list[Cut | None] = [None] * tile.ndim
    for dim in range(tile.ndim):
        axis = named.get(dim)
        along = mesh.ranks_along([axis]) if axis else (mesh.rank,)
        pieces = [int(sizes[rank, dim]) for rank in along]
        shape[dim] = sum(pieces)
        cuts[dim] = Cut(axis, Partition.from_sizes(pieces)) if axis else None
    _check_agreement(sizes, mesh, named, cuts, shape)
    return Sharding(mesh, shape, cuts)


def _check_agreement(
    sizes: Tensor, mesh: Mesh, named: Mapping[int, str], cuts: Sequence[Any], shape: Sequence[int]
) -> None:
    """Raise unless every rank's tile has the size that its place in the mesh requires."""
    for rank in range(mesh.size):
        # The coordinates of any rank follow from its number.
        rest, where = rank, {}
        for name in reversed(mesh.names):
            rest, where[name] = divmod(rest, mesh.sizes[name])
        for dim, cut in enumerate(cuts):
            expected = cut.partition.piece(where[cut.axis]).size if cut else shape[dim]
            if int(sizes[rank, dim]) != expected:
                raise ShardingError(
                    f"tiles do not fit together: dim {dim} of rank {rank} has {int(sizes[rank, dim])} where its row of "
                    f"the mesh has {expected}; every rank of a slice must bring the same size"
                )


def gather(value: Any) -> Any:
    """Whole and plain on every rank: a tensor, or every tensor in a structure."""
    return map_tensors(_gathered, value)


def _gathered(tensor: Tensor) -> Tensor:
    tensor = complete(tensor)
    if not isinstance(tensor, ShardedTensor):
        return tensor
    old, tile = tensor.sharding, unwrap(tensor)
    fetch = recut(old, Sharding(old.mesh, old.shape, (None,) * len(old.shape)))
    label = Label("gather", here())
    old.mesh.world.redistributed("hc.gather", label, fetch.transfer.received_elements * tile.element_size())
    return fetch(tile, label)


def reshard(tensor: Tensor, dims: Mapping[int, str], *, points: Points | None = None, multiple: int = 1) -> Tensor:
    """The same tensor, cut otherwise; what must move, moves."""
    if not isinstance(tensor, ShardedTensor):
        raise ShardingError("a plain tensor lies on no mesh; use hc.shard(tensor, mesh, dims)")
    mesh = tensor.sharding.mesh
    _check_dims("reshard", dims, mesh)
    return cut_like(tensor, make_sharding(mesh, tensor.sharding.shape, dims, points, multiple))


def cut_like(tensor: Tensor, sharding: Sharding) -> Tensor:
    """``tensor`` (plain and whole, or sharded) brought to ``sharding``."""
    tensor = complete(tensor)
    if isinstance(tensor, ShardedTensor):
        old, tile = tensor.sharding, unwrap(tensor)
    else:
        old, tile = Sharding(sharding.mesh, tuple(tensor.shape), (None,) * tensor.ndim), tensor
    if old.mesh != sharding.mesh:
        raise MeshError(f"a tensor on {old.mesh} cannot be cut over {sharding.mesh}; use one mesh, or hc.move")
    if old.shape != sharding.shape:
        raise ShardingError(f"a tensor of global shape {list(old.shape)} cannot take the cut of {list(sharding.shape)}")
    moved = recut(old, sharding)(tile, Label("reshard", here()))
    if same_memory(moved, tile):  # a box of a larger tensor, or all of it: never the caller's own memory
        moved = moved.clone(memory_format=torch.preserve_format)
    return wrap(moved, sharding) if sharding.axes else moved


def _check_call(name: str, tensor: Any, mesh: Any, dims: Any) -> None:
    """``name(tensor, mesh, {dim: axis})``, or an error that says what is amiss."""
    if isinstance(mesh, Tensor) or isinstance(tensor, Mesh):
        raise MeshError(f"hc.{name} takes the tensor first, then the mesh: hc.{name}(tensor, mesh, {{2: 'depth'}})")
    if not isinstance(tensor, Tensor):
        values = "array" if type(tensor).__name__ == "ndarray" else "values"
        raise ShardingError(f"hc.{name} takes a torch tensor, not {_kind(tensor)}; give torch.as_tensor({values})")
    if not isinstance(mesh, Mesh):
        raise MeshError(f"hc.{name}: the mesh is {_kind(mesh)}; make one with hc.Mesh(depth=2)")
    _check_dims(name, dims, mesh)


def _check_dims(name: str, dims: Any, mesh: Mesh) -> None:
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
