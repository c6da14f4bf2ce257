"""Order and place: medians, quantiles, buckets; distances between all pairs.

Functions of sorted values need their dim whole: it is gathered, or the cut moves to another dim for the call. Functions
that compare each element with a table, or each row with each other row, read the table or the rows whole and keep all
other cuts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..recipe import Link, Operand, Output, Read, Recipe, Work, follow, per_tile, stretched, whole_operands
from ..table import refuse, rule, run_for
from .view import as_called, each, made_of, made_of_each, normal, shape, with_torch_names
from .whole_axis import reduced_shape, reduction


def _all_rule(function: Any, input: Operand) -> Recipe:
    """A number that no part of the tensor tells: every rank reads all of it."""
    return Recipe(space=(), reads=tuple(whole_operands(input)), local=as_called(function))


def _along_rule(function: Any, input: Operand, *args: Any) -> Recipe:
    """``function(input, ..., dim, keepdim)``: one dim, needed whole, becomes a value and its position."""
    dim, keepdim = args[-2:]
    return reduction(input, (dim,), keepdim, as_called(function), results=2, uncut=frozenset({dim}))


def _ordered(function: Any, input: Tensor, *lead: Any, dim: int, keepdim: bool) -> Any:
    pair = run_for(function, _along_rule, input, *lead, normal(dim, input.ndim), keepdim)
    return with_torch_names(function, pair)


@made_of_each("median nanmedian")
def median(function: Any, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Needs its dim whole; of all elements it is gathered."""
    if dim is None:
        return run_for(function, _all_rule, input)
    return _ordered(function, input, dim=dim, keepdim=keepdim)


@made_of("mode")
def mode(input: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent value of a dim that is whole."""
    return _ordered(torch.mode, input, dim=dim, keepdim=keepdim)


@made_of("kthvalue")
def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest of a dim that is whole."""
    return _ordered(torch.kthvalue, input, k, dim=dim, keepdim=keepdim)


@made_of("msort")
def msort(input: Tensor) -> Tensor:
    """Sorted along the first dim."""
    return torch.sort(input, dim=0, stable=True).values


def _quantile_rule(function: Any, input: Operand, q: Any, dim: int, keepdim: bool, interpolation: str) -> Recipe:
    """One value for each number in ``q``, in a new first dim if ``q`` has a dim."""
    lead = q.shape if isinstance(q, Operand) else ()
    dims = [None if d == dim else d for d in range(input.ndim) if keepdim or d != dim]
    output = Output((*lead, *reduced_shape(input.shape, (dim,), keepdim)), (*[None] * len(lead), *dims))

    def local(work: Work, tile: Tensor, q: Any, *_: Any) -> Tensor:
        """torch's quantile; an empty tile goes through a tensor of zeros to get the right dtype and graph."""
        if tile.numel():
            return function(tile, q, dim, keepdim, interpolation=interpolation)
        full = tile.new_zeros([max(1, n) for n in tile.shape]) + tile.sum()  # torch knows no empty quantile
        result = function(full, q, dim, keepdim, interpolation=interpolation)
        for place, d in enumerate(output.dims):
            result = result if d is None else result.narrow(place, 0, work.box[d].size)
        return result

    return per_tile(input, local, *whole_operands(q), outputs=(output,), uncut=frozenset({dim}))


@made_of_each("quantile nanquantile")
def quantile(
    function: Any,
    input: Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """Values between those of a sorted dim; of all elements, of the flattened tensor."""
    if dim is not None:
        return run_for(function, _quantile_rule, input, q, normal(dim, input.ndim), keepdim, interpolation)
    values = function(input.flatten(), q, 0, interpolation=interpolation)
    return values.reshape(*values.shape, *[1] * input.ndim) if keepdim else values


@made_of("aminmax")
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Both extremes."""
    # Two reductions over the ranks, one for each extreme.
    dims = tuple(range(input.ndim)) if dim is None else dim
    return torch.return_types.aminmax((input.amin(dims, keepdim), input.amax(dims, keepdim)))


@each("bucketize")
def bucketize(function: Any, input: Operand, boundaries: Operand, **options: Any) -> Recipe:
    """Each value's place among whole boundaries."""
    return per_tile(input, as_called(function), *whole_operands(boundaries), outputs=_constant(input))


@each("isin")
def isin(function: Any, elements: Any, test_elements: Any, **options: Any) -> Recipe:
    """Each value compared with all of a whole tensor."""
    if not isinstance(elements, Operand):
        raise refuse("isin", "a number is looked for in a cut tensor", "use (x == number).any()")
    return per_tile(elements, as_called(function), *whole_operands(test_elements), outputs=_constant(elements))


def _constant(input: Operand) -> tuple[Output]:
    """One result of the shape of ``input``, without a gradient."""
    return (Output(input.shape, tuple(range(input.ndim)), constant=True),)


@rule(torch.searchsorted, family="order")
def searchsorted(sorted_sequence: Operand, input: Any, **options: Any) -> Recipe:
    """Values follow their own cut; of a sequence for each row, the rows do."""
    if options.get("out") is not None or not isinstance(input, Operand):
        raise refuse(torch.searchsorted, "a number, or out=, among cut tensors", "give tensors and assign the result")
    # A sequence for each row, or one for all values.
    rows = range(sorted_sequence.ndim - 1)
    tables = [table for table in (sorted_sequence, options.get("sorter")) if table is not None]

    def local(work: Work, sorted_sequence: Tensor, input: Tensor, **options: Any) -> Tensor:
        return torch.searchsorted(sorted_sequence.contiguous(), input.contiguous(), **options)

    return per_tile(input, local, *(follow(table, *rows, None) for table in tables), outputs=_constant(input))


@each("cdist")
def cdist(function: Any, input: Operand, other: Operand, *args: Any, **kwargs: Any) -> Recipe:
    """Every row of one with every row of the other: both may be cut, each along an axis of its own."""
    space = shape(torch.cdist, input, other)
    batch, rows = space[:-2], len(space) - 2
    down = Read(input, (*stretched(input.shape[:-2], batch), Link(rows), Link(None)))
    across = Read(other, (*stretched(other.shape[:-2], batch), Link(rows + 1), Link(None)))
    return Recipe(space=space, reads=(down, across), local=as_called(function))


@made_of("pairwise_distance")
def pairwise_distance(input: Tensor, other: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """A vector norm of differences along the last dim."""
    return torch.linalg.vector_norm(input - other + eps, p, -1, keepdim)


@made_of("dist")
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """A vector norm of all differences."""
    return torch.linalg.vector_norm(input - other, p)
