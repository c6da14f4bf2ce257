"""Functions along a dim that pass from tile to tile by one value each: running sums, extremes and where they stand.

Along a cut dim each rank works on its tile; one value a tile goes to all ranks, and nothing is gathered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tensor import ShardedTensor
from ..recipe import Operand, Output, Recipe, Work, follow, per_tile
from ..table import run_for, run_rule
from .view import made_of, made_of_each, normal
from .whole_axis import along, reduction

Points = tuple[int, ...]


def cut_points(input: Tensor, dim: int) -> Points | None:
    """Where a dim is cut, once for each tile that holds something; None if it is not."""
    cut = input.sharding.cuts[dim] if isinstance(input, ShardedTensor) and input.ndim else None
    return tuple(sorted(set(cut.partition.points))) if cut and input.shape[dim] else None


def _own(points: Points, work: Work, dim: int) -> int:
    """Which of the tiles is this rank's? Of an empty one, which of them it lies before."""
    return bisect_right(points, work.box[dim].lo) - 1 if work.box[dim].size else len(points) - 1


def _tiles_rule(input: Operand, dim: int, points: Points, local: Callable[..., Any], results: int = 1) -> Recipe:
    """``local(tile, first index)`` along ``dim``: one value of each tile that holds something, known to all ranks."""
    count = len(points) - 1
    shape = tuple(count if d == dim else n for d, n in enumerate(input.shape))
    dims = tuple(None if d == dim else d for d in range(input.ndim))

    def on_rank(work: Work, tile: Tensor, *_: Any) -> list[Tensor]:
        """This rank's value in a row of zeros, one place for each tile."""
        box = work.box[dim]
        if box.empty:  # zeros of the right dtype, that hang on the tile in the graph as on all other ranks
            empty = [count if d == dim else n for d, n in enumerate(tile.shape)]
            probe = local(tile.new_zeros([1 if d == dim else n for d, n in enumerate(tile.shape)]), 0)
            return [value.new_zeros(empty) + tile.sum().to(value.dtype) for value in probe]
        # Each rank's value in a row of zeros: the sum over the ranks has the values of all.
        place = _own(points, work, dim)
        pads = [*[0, 0] * (tile.ndim - 1 - dim), place, count - place - 1]
        return [F.pad(value, pads) for value in local(tile, box.lo)]

    return per_tile(input, on_rank, outputs=(Output(shape, dims),) * results, combine="sum")


#: What a tile comes to, and how what the tiles before it come to joins its own run.
_TOTAL: dict[Any, Any] = {torch.cumsum: torch.sum, torch.cumprod: torch.prod, torch.prod: torch.prod}
_JOIN: dict[Any, Any] = {torch.cumsum: torch.add, torch.cumprod: torch.mul}


def _totals_rule(function: Any, input: Operand, dim: int, points: Points) -> Recipe:
    return _tiles_rule(input, dim, points, lambda tile, first: [_TOTAL[function](tile, dim, keepdim=True)])


def _running_rule(function: Any, input: Operand, totals: Operand, dim: int, points: Points) -> Recipe:
    """Each tile's own run, joined with what all tiles before it come to."""

    def local(work: Work, tile: Tensor, totals: Tensor, *_: Any) -> Tensor:
        before = _TOTAL[function](totals.narrow(dim, 0, _own(points, work, dim)), dim, keepdim=True)
        return _JOIN[function](function(tile, dim), before)

    return per_tile(input, local, follow(totals, *(None if d == dim else d for d in range(input.ndim))))


def _whole_rule(function: Any, input: Operand, dim: int) -> Recipe:
    return along(function, input, dim, dim)


def _in_long(input: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As torch sums and multiplies: in the dtype asked for; integers, without one, in int64."""
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.long
    return input if dtype is None else input.to(dtype)


@made_of_each("cumsum cumprod")
def running(function: Any, input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums or products of each tile, joined with those of the tiles before it."""
    input, place = _in_long(input, dtype), normal(dim, input.ndim)
    points = cut_points(input, place)
    if points is None:
        result = run_for(function, _whole_rule, input, place)
    else:
        totals = run_for(function, _totals_rule, input, place, points)
        result = run_for(function, _running_rule, input, totals, place, points)
    if dtype is None and input.is_floating_point():  # autocast may have a say in the dtype
        return result
    return result.to(input.dtype)  # small integers are added up as large ones, which wrap round to the same


def _whole_product_rule(input: Operand, dim: int, keepdim: bool) -> Recipe:
    return reduction(input, [dim], keepdim, lambda work, tile, *_: tile.prod(dim, keepdim), uncut=frozenset({dim}))


@made_of("prod")
def prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product of one value a tile."""
    input = _in_long(input, dtype)
    if dim is None:
        for _ in range(input.ndim):
            input = input.prod(0)
        return input
    place = normal(dim, input.ndim)
    points = cut_points(input, place)
    tiles = input if points is None else run_for(torch.prod, _totals_rule, input, place, points)
    if not isinstance(tiles, ShardedTensor):
        return tiles.prod(place, keepdim)
    return run_rule(torch.prod, _whole_product_rule, (tiles, place, keepdim), {})


def _extremes_rule(function: Any, input: Operand, dim: int, points: Points) -> Recipe:
    """The extreme of each tile and its position in the whole dim."""

    def local(tile: Tensor, first: int) -> tuple[Tensor, Tensor]:
        value, place = function(tile, dim, keepdim=True)
        return value, place + first

    return _tiles_rule(input, dim, points, local, results=2)


def extreme_along(function: Any, input: Tensor, dim: int, points: Points) -> tuple[Tensor, Tensor]:
    """``torch.max`` or ``torch.min`` along a cut dim: the best of each tile, then the best of these."""
    values, places = run_for(function, _extremes_rule, input, dim, points)
    best = function(values, dim, keepdim=True)
    return best.values, places.gather(dim, best.indices)
