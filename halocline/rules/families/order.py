"""Order and place: medians, quantiles, buckets; distances between all pairs.

Functions of sorted values need their dim whole. Functions that compare each element with a table, or each row with each
other row, read the table or the rows whole and keep all other cuts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, read_whole
from ..table import refuse, rule, run_rule
from .view import as_called, each, made_of, normal, shape
from .whole_axis import stretched


def _reduced(input: Operand, dim: int, keepdim: bool, local: Any, results: int) -> Recipe:
    """One dim, needed whole, becomes one value (and its position)."""
    dims = tuple(None if d == dim else d for d in range(input.ndim) if keepdim or d != dim)
    made = tuple(1 if d is None else input.shape[d] for d in dims)
    return Recipe(
        space=input.shape,
        reads=(Read(input, tuple(map(Link, range(input.ndim)))),),
        outputs=(Output(made, dims), Output(made, dims, constant=True, dtype=torch.long))[:results],
        local=local,
        uncut=frozenset({dim}),
        runs_empty=True,
    )


def _all_rule(function: Any) -> Any:
    """A number that no part of the tensor tells: every rank reads all of it."""

    def describe(input: Operand) -> Recipe:
        return Recipe(space=(), reads=(read_whole(input),), local=as_called(function))

    return describe


def _along_rule(function: Any, lead: int) -> Any:
    def describe(input: Operand, *args: Any) -> Recipe:
        """``function(input, <lead arguments>, dim, keepdim)``."""
        dim, keepdim = args[lead:]
        return _reduced(input, dim, keepdim, as_called(function), 2)

    return describe


_ORDERED = (torch.median, torch.nanmedian, torch.mode, torch.kthvalue)
_along_rules = {function: _along_rule(function, int(function is torch.kthvalue)) for function in _ORDERED}
_all_rules = {function: _all_rule(function) for function in (torch.median, torch.nanmedian)}


def _ordered(function: Any, input: Tensor, *lead: Any, dim: int, keepdim: bool) -> Any:
    call = (input, *lead, normal(dim, input.ndim), keepdim)
    pair = run_rule(function, _along_rules[function], call, {})
    return getattr(torch.return_types, function.__name__)(pair)


@made_of("median")
def median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Needs its dim whole; of all elements it is gathered."""
    if dim is None:
        return run_rule(torch.median, _all_rules[torch.median], (input,), {})
    return _ordered(torch.median, input, dim=dim, keepdim=keepdim)


@made_of("nanmedian")
def nanmedian(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The median of what is no NaN."""
    if dim is None:
        return run_rule(torch.nanmedian, _all_rules[torch.nanmedian], (input,), {})
    return _ordered(torch.nanmedian, input, dim=dim, keepdim=keepdim)


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


def _quantile_rule(function: Any) -> Any:
    def describe(input: Operand, q: Any, dim: int, keepdim: bool, interpolation: str) -> Recipe:
        several = isinstance(q, Operand) and q.ndim > 0
        dims = [None if d == dim else d for d in range(input.ndim) if keepdim or d != dim]
        dims = [None, *dims] if several else dims
        made = [1 if d is None else input.shape[d] for d in dims]
        made[: int(several)] = [q.shape[0]] if several else []

        def local(work: Work, tile: Tensor, q: Any, *_: Any) -> Tensor:
            if tile.numel():
                return function(tile, q, dim, keepdim, interpolation=interpolation)
            full = tile.new_zeros([max(1, n) for n in tile.shape]) + tile.sum()  # torch knows no empty quantile
            result = function(full, q, dim, keepdim, interpolation=interpolation)
            for place, d in enumerate(dims):
                result = result if d is None else result.narrow(place, 0, work.box[d].size)
            return result

        reads = [Read(input, tuple(map(Link, range(input.ndim))))]
        reads += [read_whole(q)] if isinstance(q, Operand) else []
        return Recipe(
            space=input.shape,
            reads=tuple(reads),
            outputs=(Output(tuple(made), tuple(dims)),),
            local=local,
            uncut=frozenset({dim}),
            runs_empty=True,
        )

    return describe


_quantile_rules = {function: _quantile_rule(function) for function in (torch.quantile, torch.nanquantile)}


def _quantile(function: Any, input: Tensor, q: Any, dim: int | None, keepdim: bool, how: str) -> Tensor:
    if dim is not None:
        return run_rule(function, _quantile_rules[function], (input, q, normal(dim, input.ndim), keepdim, how), {})
    values = function(input.flatten(), q, 0, interpolation=how)
    return values.reshape(*values.shape, *[1] * input.ndim) if keepdim else values


@made_of("quantile")
def quantile(
    input: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Values between those of a sorted dim."""
    return _quantile(torch.quantile, input, q, dim, keepdim, interpolation)


@made_of("nanquantile")
def nanquantile(
    input: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Quantiles of what is no NaN."""
    return _quantile(torch.nanquantile, input, q, dim, keepdim, interpolation)


@made_of("aminmax")
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Both extremes."""
    dims = tuple(range(input.ndim)) if dim is None else dim
    return torch.return_types.aminmax((input.amin(dims, keepdim), input.amax(dims, keepdim)))


@each("bucketize")
def bucketize(function: Any, input: Operand, boundaries: Operand, **options: Any) -> Recipe:
    """Each value's place among whole boundaries."""
    return _each_with(input, boundaries, as_called(function))


@each("isin")
def isin(function: Any, elements: Any, test_elements: Any, **options: Any) -> Recipe:
    """Each value compared with all of a whole tensor."""
    if not isinstance(elements, Operand):
        raise refuse("isin", "a number is looked for in a cut tensor", "use (x == number).any()")
    return _each_with(elements, test_elements, as_called(function))


def _each_with(input: Operand, table: Any, local: Any) -> Recipe:
    """Each element by itself, with a table that every rank has whole."""
    dims = tuple(range(input.ndim))
    reads = (Read(input, tuple(map(Link, dims))), *((read_whole(table),) if isinstance(table, Operand) else ()))
    outputs = (Output(input.shape, dims, constant=True),)
    return Recipe(space=input.shape, reads=reads, outputs=outputs, local=local, runs_empty=True)


@rule(torch.searchsorted, family="order")
def searchsorted(sorted_sequence: Operand, input: Any, **options: Any) -> Recipe:
    """Values follow their own cut; of a sequence for each row, the rows do."""
    if options.get("out") is not None or not isinstance(input, Operand):
        raise refuse(torch.searchsorted, "a number, or out=, among cut tensors", "give tensors and assign the result")
    lead = sorted_sequence.ndim - 1
    dims = tuple(range(input.ndim))
    sorter = options.get("sorter")
    tables = [sorted_sequence, *([sorter] if sorter is not None else [])]

    def local(work: Work, sorted_sequence: Tensor, input: Tensor, **options: Any) -> Tensor:
        return torch.searchsorted(sorted_sequence.contiguous(), input.contiguous(), **options)

    return Recipe(
        space=input.shape,
        reads=(Read(input, tuple(map(Link, dims))), *(Read(t, (*map(Link, range(lead)), WHOLE)) for t in tables)),
        outputs=(Output(input.shape, dims, constant=True),),
        local=local,
        runs_empty=True,
    )


@each("cdist")
def cdist(function: Any, input: Operand, other: Operand, *args: Any, **kwargs: Any) -> Recipe:
    """Every row of one with every row of the other: both may be cut, each along an axis of its own."""
    space = shape(torch.cdist, input, other)
    batch, rows = space[:-2], len(space) - 2
    down = Read(input, (*stretched(input.shape[:-2], batch), Link(rows), WHOLE))
    across = Read(other, (*stretched(other.shape[:-2], batch), Link(rows + 1), WHOLE))
    outputs = (Output(space, tuple(range(len(space)))),)
    return Recipe(space=space, reads=(down, across), outputs=outputs, local=as_called(function))


@made_of("pairwise_distance")
def pairwise_distance(input: Tensor, other: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """A vector norm of differences along the last dim."""
    return torch.linalg.vector_norm(input - other + eps, p, -1, keepdim)


@made_of("dist")
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """A vector norm of all differences."""
    return torch.linalg.vector_norm(input - other, p)
