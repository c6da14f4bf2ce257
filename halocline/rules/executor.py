"""The one executor: align -> move -> local -> wrap. It alone knows the factors of law 3; it plans once per shape."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MeshError
from ..geometry import DimMove, Interval, Partition, whole
from ..tensor import (
    CopyOf,
    Cut,
    Fetch,
    ShardedTensor,
    Sharding,
    check_averaged,
    here,
    plain,
    refuse_write,
    same_memory,
    unwrap,
    whole_copy,
    wrap,
)
from ..world import Label, Mesh, Route, Sum
from .recipe import Operand, Output, Read, Recipe, Slot, Work
from .table import entry_for, name_of, refuse

_log = logging.getLogger("halocline")
_plans: dict[Any, Plan] = {}
_MOST_PLANS = 4096
_WORTH_SAYING = 1 << 20  # bytes of a whole operand that are worth a line in the log


def dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function at least one of whose arguments is a sharded tensor."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise refuse(function, "a trace would keep this rank's numbers as constants", "trace the untouched model")
    entry = entry_for(function)
    if entry.kind != "rule":
        return entry.run(*args, **kwargs)
    return run_rule(function, entry.run, args, kwargs)


def run_rule(function: Any, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one rule; its plan is kept by the global shapes and cuts of the tensors and all other arguments."""
    tensors: list[Tensor] = []
    by_value = not getattr(describe, "scalars_pass_through", False)
    key = (function, describe, _key(args, tensors, by_value), _key(tuple(kwargs.items()), tensors, by_value))
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument that cannot be hashed: plan anew
        plan, key = None, None  # type: ignore[assignment]
    if plan is None:
        with planned():
            plan = _make_plan(function, describe, args, kwargs, tensors)
        if key is not None:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan.run(tensors, args, kwargs)


_now = threading.local()


def planning() -> bool:
    """Is a plan being made? Rules may then ask torch about shapes, which is no part of the program."""
    return getattr(_now, "planning", False)


@contextmanager
def planned() -> Iterator[None]:
    """Inside, what torch is asked is part of a plan."""
    before, _now.planning = planning(), True
    try:
        yield
    finally:
        _now.planning = before


ShardedTensor.dispatcher = staticmethod(dispatch)


def _key(value: Any, tensors: list[Tensor], by_value: bool) -> Any:
    """A hashable picture of the arguments, and their tensors in order. 1, 1.0 and True are told apart, as 0.0 and -0.0.

    Rules that hand numbers straight on to torch need not be planned anew for each of them (``by_value`` False).
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        if isinstance(value, ShardedTensor):
            return value.sharding, value._tile.dtype
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_key(item, tensors, by_value) for item in value])
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    if isinstance(value, dict):
        return dict, tuple([(name, _key(item, tensors, by_value)) for name, item in value.items()])
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return type(value), repr(value) if by_value else None
    return type(value), value


def substitute(value: Any, replacements: Iterator[Any]) -> Any:
    """The arguments again, with each tensor replaced by the next of ``replacements``."""
    if isinstance(value, Tensor):
        return next(replacements)
    if isinstance(value, (tuple, list)):
        items = [substitute(item, replacements) for item in value]
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    if isinstance(value, dict):
        return {name: substitute(item, replacements) for name, item in value.items()}
    return value


@dataclass
class Plan:
    """Everything about a call that does not depend on values."""

    name: str
    mesh: Mesh
    recipe: Recipe
    fetches: tuple[Fetch | None, ...]
    work: Work
    shardings: tuple[Sharding, ...]
    sum_axes: frozenset[str]
    some_empty: bool

    def run(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        label = Label(self.name, here())
        if self.recipe.inplace and getattr(tensors[0], "_copy_of", None) is not None:
            raise refuse_write(self.name)
        tiles = [unwrap(t) if isinstance(t, ShardedTensor) else plain(t) for t in tensors]
        brought = [_bring(fetch, tile, label) for fetch, tile in zip(self.fetches, tiles, strict=True)]
        self._count_gathers(tiles, label)
        results = self._compute(brought, args, kwargs)
        if results is NotImplemented:  # an operator that torch declines; Python asks the other operand, or raises
            return NotImplemented
        if self.some_empty and _autocasting(tiles):
            results = self._agreed_dtypes(results, label)
        if self.recipe.inplace:
            return tensors[0]
        if self.sum_axes:
            route = Route(self.mesh.world, self.mesh.ranks_along(self.sum_axes), label)
            results = [Sum.apply(r, route, (1.0, 1.0 / self.mesh.count(self.sum_axes))) for r in results]
        marks = [self._mark(tensors, tiles, r) for r in results]
        wrapped = [_wrapped(*result) for result in zip(results, self.shardings, marks, strict=True)]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def _mark(self, tensors: list[Tensor], tiles: list[Tensor], result: Tensor) -> CopyOf | None:
        """Where torch's result would share memory with its operand and ours does not, the result says so."""
        index = self.recipe.reads[0].operand.index if self.recipe.reads else 0
        mark: CopyOf | None = getattr(tensors[index], "_copy_of", None)
        if mark is None and not self.recipe.view:
            return None
        shared = same_memory(tiles[index], result)
        if mark is not None:
            return mark if self.recipe.view or (shared and result.numel()) else None
        fetch = self.fetches[index]
        moved = fetch is not None and fetch.communicates
        return CopyOf(tiles[index]) if moved or not (shared or self.recipe.may_copy) else None

    def _agreed_dtypes(self, results: list[Tensor], label: Label) -> list[Tensor]:
        """Under autocast only ranks that computed something know the dtype of the result: they tell the others."""
        empty = any(interval.empty for interval in self.work.box)
        mine = torch.tensor([0 if empty else 1 + _DTYPES.index(r.dtype) for r in results], device="cpu")
        axes = frozenset(dim.need_axis for f in self.fetches if f for dim in f.dims if dim.need_axis)
        told = self.mesh.world.maximum(mine, self.mesh.ranks_along(axes), label).tolist()
        return [r.to(_DTYPES[code - 1]) if code else r for r, code in zip(results, told, strict=True)]

    def _compute(self, brought: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if not self.recipe.runs_empty and any(interval.empty for interval in self.work.box):
            outputs = zip(self.recipe.outputs, self.shardings, strict=True)
            return [_nothing(output, sharding, brought) for output, sharding in outputs]
        tiles = iter(brought)
        local_args = [substitute(a, tiles) for a in args]
        result = self.recipe.local(self.work, *local_args, **substitute(kwargs, tiles))
        if result is NotImplemented:
            return NotImplemented
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def _count_gathers(self, tiles: list[Tensor], label: Label) -> None:
        """A gather is exact but costs memory: counted always, said once a place."""
        for fetch, tile in zip(self.fetches, tiles, strict=True):
            if fetch is None or not fetch.gathers:
                continue
            traffic = self.mesh.world.traffic
            size = fetch.transfer.received_elements * tile.element_size()
            traffic.gathered_bytes += size
            traffic.gathers[str(label)] += 1
            if traffic.gathers[str(label)] == 1 and self.mesh.rank == 0:
                axes = ", ".join(sorted(fetch.axes - fetch.work_axes))
                _log.warning("%s: gathers its operand over %s, %d bytes a rank and call", label, axes, size)


def _wrapped(result: Tensor, sharding: Sharding, mark: CopyOf | None) -> Tensor:
    if not sharding.axes:
        return result if mark is None else whole_copy(result, mark)
    shell = wrap(result, sharding)
    shell._copy_of = mark
    return shell


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)


def _autocasting(tiles: list[Tensor]) -> bool:
    kind = tiles[0].device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _bring(fetch: Fetch | None, tile: Tensor, label: Label) -> Tensor:
    if fetch is None:
        return tile
    if fetch.adjoint_scale != 1:
        check_averaged(tile, label)
    return fetch(tile, label)


def _nothing(output: Output, sharding: Sharding, operands: list[Tensor]) -> Tensor:
    """An empty result that still hangs on its operands, so that this rank takes part in every backward movement."""
    first = operands[0]
    dtype = output.dtype or first.dtype
    result = torch.zeros(sharding.tile_shape, dtype=dtype, device=first.device)
    for operand in operands if not output.constant else ():
        if operand.requires_grad:
            result = result + operand.sum().to(dtype) * 0
    return result


def _make_plan(
    function: Any, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> Plan:
    mesh = _common_mesh(function, tensors)
    operands = iter(_operand(index, tensor) for index, tensor in enumerate(tensors))
    described = [substitute(a, operands) for a in args], substitute(kwargs, operands)
    recipe: Recipe = describe(*described[0], **described[1])
    shardings = [t.sharding if isinstance(t, ShardedTensor) else _whole(mesh, t) for t in tensors]
    cuts = _assign(mesh, recipe, shardings)
    work_axes = frozenset(cut.axis for cut in cuts.values())
    fetches: list[Fetch | None] = [None] * len(tensors)
    slots: list[tuple[Slot, ...]] = [()] * len(tensors)
    for read in recipe.reads:
        index = read.operand.index
        fetches[index], slots[index] = _plan_read(mesh, read, shardings[index], cuts, work_axes)
    _check_inplace(function, recipe, tensors, fetches)
    _say_if_whole_and_large(function, mesh, tensors, fetches)
    box = tuple(_piece(mesh, cuts.get(dim), size) for dim, size in enumerate(recipe.space))
    return Plan(
        name=name_of(function),
        mesh=mesh,
        recipe=recipe,
        fetches=tuple(fetches),
        work=Work(box, tuple(slots)),
        shardings=tuple(_out_sharding(mesh, output.shape, output.dims, cuts) for output in recipe.outputs),
        sum_axes=_sum_axes(function, recipe, cuts),
        some_empty=not recipe.runs_empty and any(p.empty for cut in cuts.values() for p in cut.partition.pieces()),
    )


def _say_if_whole_and_large(function: Any, mesh: Mesh, tensors: list[Tensor], fetches: list[Fetch | None]) -> None:
    """A plain tensor of the size of what is cut is right, and takes on every rank the memory that the cut saves."""
    largest = max(tensor.numel() for tensor in tensors if isinstance(tensor, ShardedTensor))
    for tensor, fetch in zip(tensors, fetches, strict=True):
        if isinstance(tensor, ShardedTensor) or fetch is None or fetch.untouched or mesh.rank:
            continue
        size = plain(tensor).untyped_storage().nbytes()  # an expanded tensor takes little
        if size >= largest * tensor.element_size() and size >= _WORTH_SAYING:
            label = Label(name_of(function), here())
            _log.warning(
                "%s: a whole operand of %d bytes on every rank; zeros_like(x) and its kin are cut", label, size
            )


def _operand(index: int, tensor: Tensor) -> Operand:
    if isinstance(tensor, ShardedTensor):
        cut = frozenset(tensor.sharding.dims_by_axis())
        return Operand(index, tensor.sharding.shape, tensor._tile.dtype, cut)
    return Operand(index, tuple(tensor.shape), tensor.dtype, frozenset())


def _common_mesh(function: Any, tensors: list[Tensor]) -> Mesh:
    meshes = {t.sharding.mesh for t in tensors if isinstance(t, ShardedTensor)}
    if len(meshes) != 1:
        raise MeshError(f"{name_of(function)} in {here()}: its operands lie on different meshes {meshes}; use one mesh")
    return meshes.pop()


def _whole(mesh: Mesh, tensor: Tensor) -> Sharding:
    return Sharding(mesh, tuple(tensor.shape), (None,) * tensor.ndim)


def _piece(mesh: Mesh, cut: Cut | None, size: int) -> Interval:
    return cut.partition.piece(mesh.coordinates[cut.axis]) if cut else whole(size)


def _assign(mesh: Mesh, recipe: Recipe, shardings: list[Sharding]) -> dict[int, Cut]:
    """Cut the space as its operands are cut. The first operand that speaks for an axis or a dim decides (in place,
    only the target speaks).
    """
    cuts: dict[int, Cut] = {}
    taken: set[str] = set()
    for read in recipe.reads[:1] if recipe.inplace else recipe.reads:
        for link, cut in zip(read.links, shardings[read.operand.index].cuts, strict=True):
            if cut is None or link.dim is None or link.dim in cuts or link.dim in recipe.uncut or cut.axis in taken:
                continue
            points = link.access.carry(cut.partition.points, recipe.space[link.dim])
            cuts[link.dim] = Cut(cut.axis, Partition(points))
            taken.add(cut.axis)
    return cuts


def _plan_read(
    mesh: Mesh, read: Read, sharding: Sharding, cuts: dict[int, Cut], work_axes: frozenset[str]
) -> tuple[Fetch, tuple[Slot, ...]]:
    dims, slots, fill = [], [], 0.0
    for dim, link in enumerate(read.links):
        own = sharding.cuts[dim]
        cut = cuts.get(link.dim) if link.dim is not None else None
        size = sharding.shape[dim]
        needs: tuple[tuple[Interval, ...], ...] = ((whole(size),),)  # not cut: all of it, and torch pads it itself
        if link.dim is None:
            needs = (link.access.need(whole(size)),)
        elif cut is not None:
            needs = tuple(link.access.need(piece) for piece in cut.partition.pieces())
        fill = link.fill if link.fill is not None else fill
        move = DimMove(
            size=size,
            owner_axis=own.axis if own else None,
            owned=own.partition.pieces() if own else (whole(size),),
            need_axis=cut.axis if cut else None,
            needs=needs,
            filled=link.fill is not None,
        )
        dims.append(move)
        slots.append(Slot(move.wanted(mesh.coordinates[cut.axis] if cut else 0), cut is None))
    return Fetch(mesh, tuple(dims), work_axes, fill), tuple(slots)


def _out_sharding(mesh: Mesh, shape: tuple[int, ...], dims: tuple[int | None, ...], cuts: dict[int, Cut]) -> Sharding:
    return Sharding(mesh, shape, [None if dim is None else cuts.get(dim) for dim in dims])


def _sum_axes(function: Any, recipe: Recipe, cuts: dict[int, Cut]) -> frozenset[str]:
    """Axes that cut a dim which no output has: the local results are parts of a sum."""
    kept = {dim for output in recipe.outputs for dim in output.dims}
    axes = frozenset(cut.axis for dim, cut in cuts.items() if dim not in kept)
    if axes and not recipe.sums:
        raise refuse(function, "its rule reduces a cut dim and does not say how to combine the parts", "mend the rule")
    return axes


def _check_inplace(function: Any, recipe: Recipe, tensors: list[Tensor], fetches: list[Fetch | None]) -> None:
    if not recipe.inplace:
        return
    target = fetches[0]
    if not isinstance(tensors[0], ShardedTensor):
        raise refuse(
            function,
            "a whole tensor cannot take in a cut one in place",
            "write it out of place, or hc.gather the other",
        )
    if target is None or not target.untouched or target.adjoint_scale != 1:
        raise refuse(function, "in place, the result must be cut as the target is", "write it out of place")
