"""Scattering: values sent to positions held in a tensor, and counts of them.

A cut target keeps its cut: each rank takes what points into its tile. Into a whole target, cut values are added tile by
tile, and the sums are added up over the ranks; nothing is gathered.

    histogram = torch.zeros(10).scatter_add(0, labels, weights)   # labels are cut: one sum of 10 numbers over ranks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...geometry import Interval, Window
from ...tensor import ShardedTensor
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, follow, per_tile, read_whole
from ..table import run_for, run_rule
from .assign import check_range, own_positions
from .view import each, local_shape, made_of, made_of_each, meta, normal, operands


@each("scatter scatter_ scatter_reduce scatter_reduce_")
def scatter(function: Any, input: Operand, dim: int, index: Operand, *rest: Any, **named: Any) -> Recipe:
    """``out[index[i][j]][j] = src[i][j]``: index and source whole along ``dim``, elsewhere what the tile has."""
    function(meta(input), dim, meta(index), *meta(rest), **meta(named))  # torch's own error for shapes that do not fit
    inplace, place = function.__name__.endswith("_"), normal(dim, input.ndim)
    others, space = [index, *operands((rest, named))], input.shape

    def local(work: Work, input: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Tensor:
        """Scatter into the tile; what points into other tiles goes to one spare row, which is cut off again."""
        own = work.box[place] if space else Interval(0, 1)
        if not space or own.size == space[place]:
            return function(input, dim, index, *rest, **named)
        # Positions counted from the tile's edge; one row more behind the tile takes what belongs to other ranks.
        check_range(index, space[place], lowest=0)
        index = torch.where((index >= own.lo) & (index < own.hi), index - own.lo, own.size)
        room = torch.cat([input, torch.zeros_like(input.sum(place, keepdim=True), dtype=input.dtype)], place)
        result = function(room, place, index, *rest, **named).narrow(place, 0, own.size)
        return input.copy_(result) if inplace else result

    def beside(operand: Operand) -> Read:
        """Whole along the scattered dim; along others cut as the target is, and perhaps shorter."""
        return Read(operand, tuple(WHOLE if d == place else Link(d, Window()) for d in range(operand.ndim)))

    return per_tile(input, local, *map(beside, others), inplace=inplace)


def _summed_rule(shape: tuple[int, ...], dim: int, index: Operand, src: Operand) -> Recipe:
    """Zeros of ``shape`` with a source scattered onto them, or added along ``dim``; tile by tile, then over ranks.

    The scattered dim of the source is one dim more of the space, which the result has not.
    """
    row, rows = len(shape), index.shape[dim if index.ndim == src.ndim else 0] if index.ndim else 1
    # An index for each element (scatter), or one for each slice (index_add).
    spread = index.ndim == src.ndim > 1 or len(shape) == 1

    def follow(operand: Operand) -> tuple[Link, ...]:
        return tuple(Link(row, Window()) if d == dim else Link(d, Window()) for d in range(operand.ndim))

    def local(work: Work, shape: tuple[int, ...], dim: int, index: Tensor, src: Tensor) -> Tensor:
        zeros = src.new_zeros(local_shape(work)[:row])
        return zeros.scatter_add(dim, index, src) if spread else zeros.index_add(dim, index, src)

    return Recipe(
        space=(*shape, rows),
        reads=(Read(src, follow(src)), Read(index, follow(index) if spread else (Link(row),))),
        outputs=(Output(shape, tuple(range(row))),),
        local=local,
        combine="sum",
        runs_empty=True,
    )


def _into_whole(input: Tensor, dim: int, index: Tensor, src: Tensor, inplace: bool) -> Tensor:
    """Add into a target that every rank has whole: each rank scatters its values, and the sums are added up."""
    summed = run_rule(torch.scatter_add, _summed_rule, (tuple(input.shape), normal(dim, input.ndim), index, src), {})
    return input.add_(summed) if inplace else input + summed


@made_of_each("scatter_add scatter_add_")
def scatter_add(function: Any, input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Values added at positions, into a copy or in place."""
    if isinstance(input, ShardedTensor):
        return run_for(function, scatter, input, dim, index, src)
    function(meta(input), dim, meta(index), meta(src))  # torch's own error for shapes that do not fit
    return _into_whole(input, dim, index, src, inplace=function is Tensor.scatter_add_)


def _index_add_rule(input: Operand, dim: int, index: Operand, source: Operand, alpha: Any) -> Recipe:
    """Add the slices whose positions fall into this rank's tile."""
    meta(input).index_add_(dim, meta(index), meta(source))
    place, size = normal(dim, input.ndim), input.shape[dim]

    def local(work: Work, input: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any) -> Tensor:
        if work.box[place].size != size:
            mine, (index,) = own_positions([index], [(size, work.box[place])])
            source = source.index_select(place, mine)
        return input.index_add_(place, index, source, alpha=alpha)

    rest = follow(source, *(None if d == place else d for d in range(source.ndim)))
    return per_tile(input, local, read_whole(index), rest, inplace=True)


@made_of_each("index_add index_add_")
def index_add(function: Any, input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    """Slices added at positions, into a copy or in place."""
    inplace = function is Tensor.index_add_
    if not isinstance(input, ShardedTensor):
        return _into_whole(input, dim, index, source if alpha == 1 else source * alpha, inplace)
    target = input if inplace else input.clone()
    return run_rule(Tensor.index_add_, _index_add_rule, (target, dim, index, source, alpha), {})


@made_of("bincount")
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts, or sums of weights, added up over the ranks."""
    # The largest value of all ranks: the result has one size everywhere.
    count = max(minlength, int(input.max()) + 1 if input.numel() else 0)
    if weights is None:
        given = torch.ones_like(input, dtype=torch.long)
    else:
        given = weights if weights.dtype == torch.float32 else weights.double()
    return torch.zeros(count, dtype=given.dtype, device=input.device).scatter_add_(0, input.long(), given)


def _histc_rule(input: Operand, bins: int, low: float, high: float) -> Recipe:
    """Counts of each tile, added up over the ranks."""

    def local(work: Work, tile: Tensor, *_: Any) -> Tensor:
        return torch.histc(tile.detach(), bins, low, high)

    return per_tile(input, local, outputs=(Output((bins,), (None,), constant=True),), combine="sum")


@made_of("histc")
def histc(input: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """With both ends the same, torch takes the least and the largest value: of the whole tensor, here as there."""
    low, high = float(min), float(max)
    if low == high and input.numel():
        low, high = float(input.detach().min()), float(input.detach().max())
    if low == high:
        low, high = low - 1, high + 1
    return run_rule(torch.histc, _histc_rule, (input, bins, low, high), {})
