"""Functions that need a dim whole: sorting, shuffling, look-ups. All other dims keep their cuts.

Where the dim is cut it is gathered, or the cut is moved to another dim for the call and back: whichever moves less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe
from ..table import refuse, rule, run_rule
from .view import as_called, each, made_of, normal, shapes


def along(function: Any, input: Operand, dims: int | Sequence[int], *args: Any, **kwargs: Any) -> Recipe:
    """``function(input, *args, **kwargs)`` on whole ``dims``; results have the input's dims, those perhaps resized."""
    listed = (dims,) if isinstance(dims, int) else dims
    results = shapes(function, input, *args, **kwargs)
    return Recipe(
        space=results[0],
        reads=(Read(input, tuple(map(Link, range(input.ndim)))),),
        outputs=tuple(Output(result, tuple(range(len(result)))) for result in results),
        local=as_called(function),
        uncut=frozenset(normal(dim, input.ndim) for dim in listed),
        runs_empty=True,
    )


@each("logcumsumexp")
def cumulative(function: Any, input: Operand, dim: int, **kwargs: Any) -> Recipe:
    """Its dim is brought together, or the cut moved to another one."""
    return along(function, input, dim, dim)


@each("glu")
def glu(function: Any, input: Operand, dim: int = -1) -> Recipe:
    """Both halves of a dim belong together."""
    return along(function, input, dim, dim)


@each("channel_shuffle")
def channel_shuffle(function: Any, input: Operand, groups: int) -> Recipe:
    """Channels trade places with those of all groups."""
    return along(function, input, 1, groups)


@each("local_response_norm")
def local_response_norm(function: Any, input: Operand, size: int, *args: Any, **kwargs: Any) -> Recipe:
    """Channels see their neighbours."""
    if not input.dtype.is_floating_point:
        raise refuse(function, "torch gives integers another dtype where a tile is empty", "call .float() on its input")
    return along(function, input, 1, size)


def stretched(shape: Sequence[int], space: Sequence[int]) -> tuple[Link, ...]:
    """Dims aligned from the right; one of size one that is stretched is read whole."""
    first = len(space) - len(shape)
    return tuple(Link(first + d) if size == space[first + d] else WHOLE for d, size in enumerate(shape))


def _along_last(function: Any) -> Any:
    """A rule for ``function(input, ..., dim=...)``, called with ``dim`` by name."""

    def describe(input: Operand, *args: Any, dim: int, **kwargs: Any) -> Recipe:
        return along(function, input, dim, *args, dim=dim, **kwargs)

    return describe


_sort_rule, _topk_rule = _along_last(torch.sort), _along_last(torch.topk)
_argsort_rule = _along_last(torch.argsort)
_cummax_rule, _cummin_rule = _along_last(torch.cummax), _along_last(torch.cummin)


@made_of("sort")
def sort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    """Values and positions along a whole dim."""
    named = {"dim": dim, "descending": descending, "stable": bool(stable)}
    return torch.return_types.sort(run_rule(torch.sort, _sort_rule, (input,), named))


@made_of("argsort")
def argsort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Tensor:
    """Positions along a whole dim."""
    named = {"dim": dim, "descending": descending, "stable": bool(stable)}
    return run_rule(torch.argsort, _argsort_rule, (input,), named)


@made_of("topk")
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest of a whole dim."""
    named = {"dim": dim, "largest": largest, "sorted": sorted}
    return torch.return_types.topk(run_rule(torch.topk, _topk_rule, (input, k), named))


@made_of("cummax")
def cummax(input: Tensor, dim: int) -> Any:
    """Running maxima along a whole dim."""
    return torch.return_types.cummax(run_rule(torch.cummax, _cummax_rule, (input,), {"dim": dim}))


@made_of("cummin")
def cummin(input: Tensor, dim: int) -> Any:
    """Running minima along a whole dim."""
    return torch.return_types.cummin(run_rule(torch.cummin, _cummin_rule, (input,), {"dim": dim}))


@rule(F.embedding)
def embedding(
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Recipe:
    """Rows of a whole table; its features may be cut."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise refuse(
            F.embedding,
            "max_norm, scale_grad_by_freq and sparse depend on which rows the other ranks look up",
            "leave them at their defaults",
        )
    space = (*input.shape, weight.shape[1])
    dims = tuple(range(len(space)))
    return Recipe(
        space=space,
        reads=(Read(input, tuple(map(Link, dims[:-1]))), Read(weight, (WHOLE, Link(dims[-1])))),
        local=as_called(F.embedding),
        runs_empty=True,
    )


@rule(F.one_hot)
def one_hot(input: Operand, num_classes: int = -1) -> Recipe:
    """A new dim of classes, never cut."""
    if num_classes < 0:
        raise refuse(F.one_hot, "the number of classes would be that of the values on this rank", "give num_classes")
    return Recipe(
        space=input.shape,
        reads=(Read(input, tuple(map(Link, range(input.ndim)))),),
        outputs=(Output((*input.shape, num_classes), (*range(input.ndim), None)),),
        local=as_called(F.one_hot),
        runs_empty=True,
    )
