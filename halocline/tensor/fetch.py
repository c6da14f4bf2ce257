"""Brings the box of an operand that this rank needs: the one place where tiles turn into what an operation reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch_private import backward_number, quick_apply
from ..errors import Refused
from ..geometry import DimMove, Interval, Slabs, Transfer, plan_transfer, slabs_of, whole
from ..reduction import is_averaged
from ..world import (
    AVERAGED,
    Label,
    MeanOfGradient,
    Mesh,
    MoveBoxes,
    Route,
    is_movement,
    placement_of,
    scaled,
)
from .sharding import Sharding


@dataclass(frozen=True)
class Fetch:
    """The needed box of one operand, for every rank. ``work_axes`` are the axes over which the operation is cut."""

    mesh: Mesh
    dims: tuple[DimMove, ...]
    work_axes: frozenset[str]
    fill: float = 0.0

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes over which the operand is cut."""
        return frozenset(dim.owner_axis for dim in self.dims if dim.owner_axis)

    @cached_property
    def untouched(self) -> bool:
        """Is every rank's tile what it needs, as it lies?"""
        return all(dim.untouched for dim in self.dims)

    @cached_property
    def communicates(self) -> bool:
        """Does any rank need what it has not, or its own in several runs (which only a transfer can lay out)?"""
        return not all(dim.local and all(len(needs) == 1 for needs in dim.needs) for dim in self.dims)

    @cached_property
    def beside(self) -> bool:
        """Does every rank need something of what it holds, so that what comes from others lies beside it?"""
        return all(dim.untouched if dim.owner_axis is None else _keeps_some(dim) for dim in self.dims)

    @cached_property
    def slabs(self) -> Slabs:
        """What comes to lie beside the tile; for a fetch that is ``beside``."""
        return slabs_of(self.transfer)

    @cached_property
    def gathers(self) -> bool:
        """Do the ranks of some axis that cuts the operand end with the same data?"""
        told_apart = {
            dim.need_axis
            for dim in self.dims
            if dim.need_axis and any(needs != (whole(dim.size),) for needs in dim.needs)
        }
        return any(dim.owner_axis and dim.size and dim.owner_axis not in told_apart for dim in self.dims)

    @cached_property
    def adjoint_scale(self) -> float:
        """Whole to cut counts R times, cut to whole takes the mean: law 3 in one number."""
        return self.mesh.count(self.work_axes - self.axes) / self.mesh.count(self.axes - self.work_axes)

    @cached_property
    def transfer(self) -> Transfer:
        """This rank's part in the movement."""
        return plan_transfer(self.dims, self.mesh.coordinates, self.mesh.rank_at)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold parts of the same operand."""
        return self.mesh.ranks_along(self.axes)

    def __call__(self, tile: Tensor, label: Label) -> Tensor:
        # Data move: the movement carries law 3's factor itself.
        if self.communicates:
            route = Route(self.mesh.world, self.ranks, label)
            return quick_apply(MoveBoxes, tile, self.transfer, route, (1.0, self.adjoint_scale), self.fill)
        if not self.untouched:
            tile = self.cut_out(tile)
        if self.adjoint_scale != 1 and tile.requires_grad:
            tile = scaled((1.0, self.adjoint_scale), tile)
        return tile

    def reaches(self, reach: tuple[int, ...]) -> bool:
        """Does every rank need no more than its tile and that much beside it?"""
        return all(_reached(dim, width) for dim, width in zip(self.dims, reach, strict=True))

    def cut_out(self, tile: Tensor, reach: tuple[int, ...] | None = None) -> Tensor:
        """What is needed lies in this rank's own tile: a view of it, padded where the need leaves the sample.

        With ``reach`` the tile has that much beside it, as far as the sample goes.
        """
        pads: list[int] = []
        for place, dim in enumerate(self.dims):
            (need,) = dim.wanted(self._coordinate(dim.need_axis))
            held = dim.holds(self._coordinate(dim.owner_axis))
            if reach is not None:
                held = _widened(held, reach[place], dim.size)
            inside = need.intersect(whole(dim.size))
            if inside.size != held.size:
                tile = tile.narrow(place, min(max(0, inside.lo - held.lo), held.size), inside.size)
            before = min(max(0, -need.lo), need.size) if inside.size else need.size
            # F.pad counts dims from the last.
            pads = [before, need.size - before - inside.size, *pads]
        return F.pad(tile, pads, value=self.fill) if any(pads) else tile

    def _coordinate(self, axis: str | None) -> int:
        return self.mesh.coordinates[axis] if axis else 0


def _widened(held: Interval, width: int, size: int) -> Interval:
    return held if held.empty else Interval(max(0, held.lo - width), min(size, held.hi + width))


def _reached(dim: DimMove, width: int) -> bool:
    """Does no rank need more along this dim than its interval and ``width`` beside it?"""
    if dim.owner_axis is None:
        return all(len(needs) == 1 for needs in dim.needs)
    return dim.owner_axis == dim.need_axis and all(
        len(needs) == 1 and _widened(own, width, dim.size).contains(needs[0].intersect(whole(dim.size)))
        for own, needs in zip(dim.owned, dim.needs, strict=True)
    )


def _keeps_some(dim: DimMove) -> bool:
    """Does every rank need part of what it holds itself, in one run?"""
    return dim.owner_axis == dim.need_axis and all(
        len(needs) == 1 and not needs[0].intersect(own).empty for needs, own in zip(dim.needs, dim.owned, strict=True)
    )


_MEAN = "_halocline_mean"


class ArrivalMean:
    """Kept on a whole intermediate result that has entered cut work: ``alias`` stands for it there.

    The alias takes the mean, over ``axes``, of the gradient that arrives at it. ``version`` is the tensor's: after a
    write in place it needs another alias. ``entries`` counts the calls that the tensor has entered; the only one may
    sum its gradient by itself, and then notes the backward pass in ``summed_in``.
    """

    def __init__(self, version: int) -> None:
        self.version, self.axes, self.entries, self.summed_in = version, frozenset[str](), 0, -1
        self.alias: Tensor | None = None

    def is_summed(self) -> bool:
        """Has the one call that the tensor entered summed its gradient, in this backward pass?"""
        return self.summed_in == backward_number()


def arrival_of(operand: Tensor) -> ArrivalMean | None:
    """What was noted when this tensor entered cut work."""
    found: ArrivalMean | None = getattr(operand, _MEAN, None)
    return found if found is not None and found.version == operand._version else None


def enter(operand: Tensor, mesh: Mesh, axes: frozenset[str], label: Label, is_tile: bool = False) -> Tensor:
    """What stands for a whole operand in work that ``axes`` cut: its gradient becomes the true one.

    Each rank holds a share of it. Leaves must be averaged by someone when backward ends. An intermediate result takes
    the mean as its gradient arrives: users may ask for that gradient (``autograd.grad``, ``retain_grad``) or compute it
    by a Function of theirs. The tile of a sharded tensor (``is_tile``) does not: whoever asks for its gradient takes
    the mean then.
    """
    if not torch.is_grad_enabled() or not operand.requires_grad:
        return operand
    arrival = arrival_of(operand) or ArrivalMean(operand._version)
    arrival.entries += 1
    missing = axes - arrival.axes
    if not arrival.axes or mesh.count(missing) > 1:
        _check_leaves(operand, axes, label)
        if not operand.is_leaf and mesh.count(missing) > 1:
            _average_on_arrival(operand, mesh, missing, label, arrival, is_tile)
    return operand if arrival.alias is None else arrival.alias


def _check_leaves(operand: Tensor, axes: frozenset[str], label: Label) -> None:
    unwatched = [leaf for leaf in _leaves(operand) if not getattr(leaf, AVERAGED, False)]
    for leaf in unwatched:
        _refuse_placed(leaf, axes, label)
    unwatched = [leaf for leaf in unwatched if not is_averaged(leaf)]
    if unwatched:
        raise Refused(
            label.operation,
            label.place,
            f"a whole leaf of shape {list(unwatched[0].shape)} meets cut tensors, and nobody averages its gradient",
            "call hc.distribute(model, mesh) on its model, or hc.average_gradients([leaf], mesh)",
        )


def _average_on_arrival(
    operand: Tensor, mesh: Mesh, axes: frozenset[str], label: Label, arrival: ArrivalMean, is_tile: bool
) -> None:
    """Remembered on the tensor: the next operation that it enters takes the same alias."""
    arrival.axes |= axes
    setattr(operand, _MEAN, arrival)
    if not is_tile:
        route = Route(mesh.world, mesh.ranks_along(axes), Label("mean of a gradient", label.place))
        before = operand if arrival.alias is None else arrival.alias
        arrival.alias = quick_apply(MeanOfGradient, before, route, arrival.is_summed)


def _refuse_placed(leaf: Tensor, axes: frozenset[str], label: Label) -> None:
    """A parameter that is not whole on an axis takes no part in work that this axis cuts; elsewhere it is averaged."""
    for axis, kind in placement_of(leaf).items():
        if axis in axes:
            raise Refused(
                label.operation,
                label.place,
                f"a parameter of shape {list(leaf.shape)} is {kind} on {axis}, along which the work is cut",
                f"gather its inputs over {axis!r} first, or give it inputs that are not cut",
            )


def _leaves(operand: Tensor) -> Iterator[Tensor]:
    """Leaves from which plain work made a whole operand; what lies behind a movement was looked at there."""
    if operand.is_leaf:
        if operand.requires_grad:
            yield operand
        return
    # A walk over the graph behind the operand; it ends at leaves and movements.
    nodes, seen = [operand.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or is_movement(node):
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@lru_cache(maxsize=1024)
def recut(old: Sharding, new: Sharding) -> Fetch:
    """From one sharding of a tensor to another."""
    dims = []
    for size, before, after in zip(old.shape, old.cuts, new.cuts, strict=True):
        dims.append(
            DimMove(
                size=size,
                owner_axis=before.axis if before else None,
                owned=before.partition.pieces() if before else (whole(size),),
                need_axis=after.axis if after else None,
                needs=tuple((piece,) for piece in after.partition.pieces()) if after else ((whole(size),),),
            )
        )
    return Fetch(old.mesh, tuple(dims), new.axes)
