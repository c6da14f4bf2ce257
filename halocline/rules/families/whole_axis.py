"""Functions that need a dim whole: sorting, shuffling, look-ups. All other dims keep their cuts.

Where the dim is cut it is gathered, or the cut is moved to another dim for the call and back: whichever moves less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recipe import Operand, Output, Read, Recipe, Work, follow, per_tile
from ..table import refuse, rule, run_for
from .view import as_called, each, made_of, made_of_each, normal, shapes, with_torch_names


def along(function: Any, input: Operand, dims: int | Sequence[int], *args: Any, **kwargs: Any) -> Recipe:
    """``function(input, *args, **kwargs)`` on whole ``dims``; results have the input's dims, those perhaps resized."""
    listed = (dims,) if isinstance(dims, int) else dims
    results = shapes(function, input, *args, **kwargs)
    return Recipe(
        space=results[0],
        reads=(follow(input),),
        outputs=tuple(Output(result, tuple(range(len(result)))) for result in results),
        local=as_called(function),
        uncut=frozenset(normal(dim, input.ndim) for dim in listed),
        runs_empty=True,
    )


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    """The shape that is left when ``dims`` are reduced: without them, or with size one in their place."""
    return tuple(1 if d in dims else n for d, n in enumerate(shape) if keepdim or d not in dims)


def reduction(
    input: Operand, dims: Sequence[int], keepdim: bool, local: Any, *others: Read, results: int = 1, **options: Any
) -> Recipe:
    """``dims`` become one value each; a second of the ``results`` holds positions, which have no gradient.

    The caller says how tiles are combined: with ``combine=...``, or with ``uncut=...`` where ``dims`` must be whole.
    """
    kept = tuple(None if d in dims else d for d in range(input.ndim) if keepdim or d not in dims)
    shape = reduced_shape(input.shape, dims, keepdim)
    # An idle rank must make results of the same dtypes.
    outputs = (Output(shape, kept), Output(shape, kept, constant=True, dtype=torch.long))
    return per_tile(input, local, *others, outputs=outputs[:results], **options)


@each("logcumsumexp glu")
def of_one_dim(function: Any, input: Operand, dim: int = -1, **kwargs: Any) -> Recipe:
    """The dim is brought together, or the cut moved to another one."""
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


def _named_dim(function: Any, input: Operand, *args: Any, dim: int, **kwargs: Any) -> Recipe:
    return along(function, input, dim, *args, dim=dim, **kwargs)


@made_of_each("sort argsort")
def sort(function: Any, input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    """Values and positions along a whole dim, or positions alone."""
    result = run_for(function, _named_dim, input, dim=dim, descending=descending, stable=bool(stable))
    return with_torch_names(function, result)


@made_of("topk")
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest of a whole dim."""
    pair = run_for(torch.topk, _named_dim, input, k, dim=dim, largest=largest, sorted=sorted)
    return torch.return_types.topk(pair)


@made_of_each("cummax cummin")
def running_extreme(function: Any, input: Tensor, dim: int) -> Any:
    """Running maxima or minima along a whole dim, and their positions."""
    return with_torch_names(function, run_for(function, _named_dim, input, dim=dim))


def embedding(
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Recipe:
    """Rows of a table: its features may be cut, and its rows, of which each rank looks up its own and all are added.

    ``rules/sparse_rows.py`` registers it, beside another way for sparse tables.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise refuse(
            F.embedding,
            "max_norm, scale_grad_by_freq and sparse depend on which rows the other ranks look up",
            "leave them at their defaults; sparse tables may be whole or cut by rows",
        )
    rows, made = weight.shape[0], (*input.shape, weight.shape[1])
    skipped = None if padding_idx is None else padding_idx % rows

    def local(work: Work, tokens: Tensor, table: Tensor, *_: Any, **__: Any) -> Tensor:
        """Tokens of other ranks' rows give zeros."""
        own = work.box[-1]
        if own.size == rows:
            return F.embedding(tokens, table, skipped)
        mine = (tokens >= own.lo) & (tokens < own.hi)
        if own.empty:
            return table.new_zeros(*tokens.shape, table.shape[1]) + table.sum()
        here = skipped - own.lo if skipped is not None and own.lo <= skipped < own.hi else None
        # A token that no rank has stays outside the table, so that torch raises its own error.
        others = torch.where((tokens >= 0) & (tokens < rows), 0, rows)
        found = F.embedding(torch.where(mine, tokens - own.lo, others), table, here)
        return found.masked_fill(mine.logical_not().unsqueeze(-1), 0.0)

    return Recipe(
        space=(*made, rows),
        reads=(follow(input), follow(weight, len(made), input.ndim)),
        outputs=(Output(made, tuple(range(len(made)))),),
        local=local,
        combine="sum",
        runs_empty=True,
    )


@rule(F.one_hot)
def one_hot(input: Operand, num_classes: int = -1) -> Recipe:
    """A new dim of classes, never cut."""
    # The largest class on this rank may not be the largest of all.
    if num_classes < 0:
        raise refuse(F.one_hot, "the number of classes would be that of the values on this rank", "give num_classes")
    output = Output((*input.shape, num_classes), (*range(input.ndim), None))
    return per_tile(input, as_called(F.one_hot), outputs=(output,))
