"""Functions along a dim that pass from tile to tile by one value each: running sums, extremes and where they stand.

Along a cut dim each rank works on its tile; one value a tile goes to all ranks, and nothing is gathered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tensor import ShardedTensor
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work
from ..table import run_rule
from .view import made_of, normal
from .whole_axis import along

Points = tuple[int, ...]


def cut_points(input: Tensor, dim: int) -> Points | None:
    """Where a dim is cut, once for each tile that holds something; None if it is not."""
    cut = input.sharding.cuts[dim] if isinstance(input, ShardedTensor) and input.ndim else None
    return tuple(sorted(set(cut.partition.points))) if cut and input.shape[dim] else None


def _own(points: Points, work: Work, dim: int) -> int:
    """Which of the tiles is this rank's? Of an empty one, which of them it lies before."""
    return bisect_right(points, work.box[dim].lo) - 1 if work.box[dim].size else len(points) - 1


def _among(value: Tensor, place: int, count: int, dim: int) -> Tensor:
    """The value of one tile in a row of zeros: the sum over the ranks has the values of all."""
    after = [0, 0] * (value.ndim - 1 - dim)
    return F.pad(value, [*after, place, count - place - 1])


def _tiles_rule(function: Any, input: Operand, dim: int, points: Points, results: int, local: Any) -> Recipe:
    """``local(tile, first index)`` along ``dim``, for each tile that holds something, known to all."""
    count = len(points) - 1
    shape = tuple(count if d == dim else n for d, n in enumerate(input.shape))
    dims = tuple(None if d == dim else d for d in range(input.ndim))

    def on_rank(work: Work, tile: Tensor, *_: Any) -> list[Tensor]:
        box = work.box[dim]
        if box.empty:
            empty = [*tile.shape]
            empty[dim] = count
            nothing = local(tile.new_zeros([1 if d == dim else n for d, n in enumerate(tile.shape)]), 0)
            return [value.new_zeros(empty) + tile.sum().to(value.dtype) for value in nothing]
        return [_among(value, _own(points, work, dim), count, dim) for value in local(tile, box.lo)]

    return Recipe(
        space=input.shape,
        reads=(Read(input, tuple(map(Link, range(input.ndim)))),),
        outputs=tuple(Output(shape, dims) for _ in range(results)),
        local=on_rank,
        combine="sum",
        runs_empty=True,
    )


def _cumulative(function: Any, total: Any, join: Any) -> tuple[Any, Any]:
    def totals_rule(input: Operand, dim: int, points: Points) -> Recipe:
        return _tiles_rule(function, input, dim, points, 1, lambda tile, first: [total(tile, dim, keepdim=True)])

    def running_rule(input: Operand, totals: Operand, dim: int, points: Points) -> Recipe:
        """Each tile's own run, joined with what all tiles before it come to."""
        dims = tuple(range(input.ndim))

        def local(work: Work, tile: Tensor, totals: Tensor, *_: Any) -> Tensor:
            before = total(totals.narrow(dim, 0, _own(points, work, dim)), dim, keepdim=True)
            return join(function(tile, dim), before)

        others = tuple(WHOLE if d == dim else Link(d) for d in dims)
        return Recipe(
            space=input.shape,
            reads=(Read(input, tuple(map(Link, dims))), Read(totals, others)),
            local=local,
            runs_empty=True,
        )

    return totals_rule, running_rule


def _whole_rule(function: Any) -> Any:
    return lambda whole, dim: along(function, whole, dim, dim)


_RUNNING = {
    torch.cumsum: (*_cumulative(torch.cumsum, torch.sum, torch.add), _whole_rule(torch.cumsum)),
    torch.cumprod: (*_cumulative(torch.cumprod, torch.prod, torch.mul), _whole_rule(torch.cumprod)),
}


def _running(function: Any, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.long
    input, place = input if dtype is None else input.to(dtype), normal(dim, input.ndim)
    totals, running, whole = _RUNNING[function]
    points = cut_points(input, place)
    if points is None:
        return _in(dtype, run_rule(function, whole, (input, place), {}))
    sums = run_rule(function, totals, (input, place, points), {})
    return _in(dtype, run_rule(function, running, (input, sums, place, points), {}))


def _in(dtype: torch.dtype | None, result: Tensor) -> Tensor:
    """Small integers are added up as large ones, which wrap round to the same."""
    return result if dtype is None or result.dtype == dtype else result.to(dtype)


@made_of("cumsum")
def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums of each tile, raised by the sums of the tiles before it."""
    return _running(torch.cumsum, input, dim, dtype)


@made_of("cumprod")
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running products of each tile, times the products of the tiles before it."""
    return _running(torch.cumprod, input, dim, dtype)


def _product_rule(input: Operand, dim: int, points: Points) -> Recipe:
    return _tiles_rule(torch.prod, input, dim, points, 1, lambda tile, first: [tile.prod(dim, keepdim=True)])


def _whole_product_rule(input: Operand, dim: int, keepdim: bool) -> Recipe:
    kept = [d for d in range(input.ndim) if d != dim]
    dims = [None if d == dim else d for d in range(input.ndim)] if keepdim else kept
    shape = tuple(1 if d is None else input.shape[d] for d in dims)
    return Recipe(
        space=input.shape,
        reads=(Read(input, tuple(map(Link, range(input.ndim)))),),
        outputs=(Output(shape, tuple(dims)),),
        local=lambda work, tile, *_: tile.prod(dim, keepdim),
        uncut=frozenset({dim}),
        runs_empty=True,
    )


@made_of("prod")
def prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product of one value a tile."""
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.long
    input = input if dtype is None else input.to(dtype)
    if dim is None:
        for _ in range(input.ndim):
            input = input.prod(0)
        return input
    place = normal(dim, input.ndim)
    points = cut_points(input, place)
    tiles = input if points is None else run_rule(torch.prod, _product_rule, (input, place, points), {})
    if not isinstance(tiles, ShardedTensor):
        return tiles.prod(place, keepdim)
    return run_rule(torch.prod, _whole_product_rule, (tiles, place, keepdim), {})


def _extremes_rule(input: Operand, function: Any, dim: int, points: Points) -> Recipe:
    def local(tile: Tensor, first: int) -> Sequence[Tensor]:
        value, place = function(tile, dim, keepdim=True)
        return value, place + first

    return _tiles_rule(function, input, dim, points, 2, local)


def extreme_along(function: Any, input: Tensor, dim: int, points: Points) -> tuple[Tensor, Tensor]:
    """``torch.max`` or ``torch.min`` along a cut dim: the best of each tile, then the best of these."""
    values, places = run_rule(function, _extremes_rule, (input, function, dim, points), {})
    best = function(values, dim, keepdim=True)
    return best.values, places.gather(dim, best.indices)
