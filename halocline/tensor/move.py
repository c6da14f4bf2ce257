"""``hc.move``: a tensor brought to another mesh, by ranks of which some have not seen it yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MeshError, ShardingError
from ..geometry import Partition
from ..world import Label, Mesh, World
from ..world.tags import crossing_tag
from .across import move_across
from .place import here
from .sharded import ShardedTensor
from .sharding import Cut, Sharding, make_sharding

_MOST_DIMS = 16
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def move(
    tensor: Tensor | None,
    mesh: Mesh,
    dims: Mapping[int, str],
    *,
    source: Mesh | None = None,
    points: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
) -> Tensor:
    """The tensor on another mesh, cut as ``dims`` says; called by the ranks of both meshes, in the same order.

    ``source`` is the mesh on which it lies, needed where it is plain (whole on that mesh) or, on ranks outside, None.
    Each element goes over the boundary once, and is passed on among the receivers. Differentiable: ranks outside
    ``mesh`` get an empty tensor, on which they call ``backward`` for their part (``move(...).sum().backward()``).

        part, other = mesh["stage", 0], mesh["stage", 1]
        y = hc.move(x if part.is_member else None, other, {2: "depth"}, source=part)
    """
    source = _source(tensor, source)
    world = source.world.outermost
    if world is not mesh.world.outermost:
        raise MeshError(f"hc.move: {source} and {mesh} are meshes of different worlds; cut both from one mesh")
    if world.rank not in {*source.members, *mesh.members}:
        raise MeshError(f"hc.move: rank {world.rank} is in neither mesh; call it on the ranks of both only")
    old, dtype, grows = _told(tensor, source, mesh)
    new = make_sharding(mesh, old.shape, dims, points, multiple)
    with torch.set_grad_enabled(torch.is_grad_enabled() and grows):
        return move_across(tensor, old, new, dtype)


def _source(tensor: Tensor | None, source: Mesh | None) -> Mesh:
    lies = tensor.sharding.mesh if isinstance(tensor, ShardedTensor) else source
    if lies is None:
        what = "on ranks that do not have the tensor" if tensor is None else "for a plain tensor"
        raise MeshError(f"hc.move: {what} say which mesh it comes from: hc.move(..., source=mesh['stage', 0])")
    if source is not None and source != lies:
        raise MeshError(f"hc.move: the tensor lies on {lies}, and source={source}; leave source out")
    if (tensor is not None) != lies.is_member:
        state = "needs its tile there" if lies.is_member else "has no tile there: give None"
        raise ShardingError(f"hc.move: the source is {lies}, so rank {lies.world.outermost.rank} {state}")
    return lies


def _told(tensor: Tensor | None, source: Mesh, mesh: Mesh) -> tuple[Sharding, torch.dtype, bool]:
    """The tensor's sharding and dtype, and whether it takes a gradient. Ranks outside the source are told by it."""
    world = source.world.outermost
    label = Label("telling a tensor's shape", here(), "control")
    key = world.next_crossing((-1, *source.members), mesh.members)
    outside = [rank for rank in mesh.members if rank not in source.members]
    tellers = {rank: source.members[number % len(source.members)] for number, rank in enumerate(outside)}
    room = 3 + 2 * _MOST_DIMS + sum(size + 1 for size in source.sizes.values())
    tag = crossing_tag(key, 0, room, torch.int64)
    if tensor is None:
        return _asked(world, tellers[world.rank], room, tag, label, source)
    sharding = tensor.sharding if isinstance(tensor, ShardedTensor) else make_sharding(source, tensor.shape, {})
    if tensor.dtype not in _DTYPES or tensor.ndim > _MOST_DIMS:
        raise ShardingError(
            f"hc.move carries tensors of up to {_MOST_DIMS} dims; not {tensor.dtype}, {tensor.ndim} dims"
        )
    grows = tensor.requires_grad and torch.is_grad_enabled()
    note = _note(sharding, tensor.dtype, grows, room)
    sends = [(rank, note, tag) for rank, teller in tellers.items() if teller == world.rank]
    if sends:
        world.begin_tagged(sends, [], label).wait()
    return sharding, tensor.dtype, grows


def _note(sharding: Sharding, dtype: torch.dtype, grows: bool, room: int) -> Tensor:
    """Dims, dtype, gradient; then of each dim its size and the place of its axis, and the points of those that are
    cut."""
    names = sharding.mesh.names
    numbers = [len(sharding.shape), _DTYPES.index(dtype), int(grows)]
    for size, cut in zip(sharding.shape, sharding.cuts, strict=True):
        numbers += [size, names.index(cut.axis) if cut else -1]
    for cut in sharding.cuts:
        numbers += cut.partition.points if cut else ()
    return torch.tensor(numbers + [0] * (room - len(numbers)), dtype=torch.int64)


def _asked(
    world: World, teller: int, room: int, tag: int, label: Label, source: Mesh
) -> tuple[Sharding, torch.dtype, bool]:
    if not world.capabilities.moves_data:
        raise MeshError("hc.move: a dry run does not know a tensor that another rank has; record a rank of the source")
    note = torch.empty(room, dtype=torch.int64)
    numbers = iter(world.begin_tagged([], [(teller, note, tag)], label).wait()[0].tolist())
    ndim, kind, grows = next(numbers), next(numbers), next(numbers)
    dims = [(next(numbers), next(numbers)) for _ in range(ndim)]
    cuts = [None if axis < 0 else _cut(source, source.names[axis], numbers) for _, axis in dims]
    return Sharding(source, [size for size, _ in dims], cuts), _DTYPES[kind], bool(grows)


def _cut(source: Mesh, axis: str, numbers: Iterator[int]) -> Cut:
    return Cut(axis, Partition(tuple(next(numbers) for _ in range(source.sizes[axis] + 1))))
