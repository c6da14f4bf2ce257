"""Decides whether a result shares memory with its operand, exactly as it does on one rank.

torch is asked with tensors that have one rank's shapes and strides but no data: its views, and its functions that
return a view where the strides allow one (reshape, contiguous). Where torch copies, the result is a copy here too.
Where torch returns a view and no data moved, the result is a view of the tile. Where torch returns a view, but data had
to move between ranks, the result is a copy marked with :class:`CopyOf`; writes to it are written back to the operand.

Where the strides on one rank are not certain, the result is a copy that may be written to; after such a write, using
the operand raises an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import disable_dispatch_modes, storage_key
from ..tensor import CopyOf, ShardedTensor, Strides, dense_strides, on_one_rank, one_rank_strides, plain, same_memory
from .idle import emptied
from .plan import CallPlan, substitute


class AliasAnswer(NamedTuple):
    """Of one result: does it share memory with the operand, and its strides."""

    shares: bool
    strides: Strides


#: A result, its mark if it is a copy, and its strides on one rank if they are not those of a new tensor.
Settled = tuple[Tensor, CopyOf | None, Strides | None]


def settled(
    plan: CallPlan,
    function: Any,
    args: Any,
    kwargs: Any,
    tensors: list[Tensor],
    tiles: list[Tensor],
    results: list[Tensor],
) -> list[Settled]:
    """Each result with its mark and with its strides on one rank, as far as they are not those of a new tensor."""
    index = plan.recipe.reads[0].operand.index if plan.recipe.reads else 0
    operand, tile = tensors[index], tiles[index]
    if plan.recipe.view:
        answers = _ask(plan, function, args, kwargs, tensors, index)
        return [_viewed(plan, index, operand, tile, *pair) for pair in zip(results, answers, strict=True)]
    return [_computed(plan, operand, tile, result) for result in results]


def _computed(plan: CallPlan, operand: Tensor, tile: Tensor, result: Tensor) -> tuple[Tensor, CopyOf | None, Any]:
    """A function that makes new memory, unless it gives its operand back (``x.float()`` of float32)."""
    shares = bool(result.numel()) and same_memory(tile, result)
    # The rule gave its operand back where torch always makes new memory.
    if shares and plan.recipe.fresh:
        return result.clone(), None, None
    if not shares or not isinstance(operand, ShardedTensor):
        return result, getattr(operand, "_copy_of", None) if shares else None, None
    same = result.shape == tile.shape and result.stride() == tile.stride()
    return result, operand._copy_of, operand._strides if same else None


def _viewed(
    plan: CallPlan, index: int, operand: Tensor, tile: Tensor, result: Tensor, answer: AliasAnswer | None
) -> tuple[Tensor, CopyOf | None, Strides | None]:
    """The result of a view, settled by what torch answered for one rank.

    A result that torch would have copied is copied here too. One that torch returns as a view, but that had to move
    between ranks, is marked as a copy of its operand, so that a write to it can be written back.
    """
    shares = same_memory(tile, result)
    if plan.recipe.either and _unsure(operand):
        unsure = CopyOf(operand, tile, parent=getattr(operand, "_copy_of", None), unsure=True)
        return result.clone() if shares and result.numel() else result, unsure, None
    if answer is not None and not answer.shares:
        return result.clone() if shares and result.numel() else result, None, None
    mark: CopyOf | None = getattr(operand, "_copy_of", None)
    fetch = plan.fetches[index]
    if (fetch is not None and fetch.communicates) or not shares:
        mark = CopyOf(operand, tile, plan.recipe.index, mark)
        if not result.numel() and result.requires_grad:
            result = emptied(result, tuple(result.shape))
    return result, mark, None if answer is None else answer.strides


def _unsure(operand: Tensor) -> bool:
    """Where tensors with channels last are about, torch's kernels choose layouts by rules of their own."""
    return isinstance(operand, ShardedTensor) and operand._strides is None and operand.sharding.mesh.channels_last


def _ask(
    plan: CallPlan, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], index: int
) -> list[AliasAnswer] | list[None]:
    """torch's answers for these strides of the operand, from the plan's cache if the question was asked before."""
    operand = tensors[index]
    strides = one_rank_strides(operand) if isinstance(operand, ShardedTensor) else tuple(plain(operand).stride())
    # The answer depends on strides, which are no part of the plan's key.
    if strides not in plan.answers:
        plan.answers[strides] = _answers(function, args, kwargs, tensors, index)
    return plan.answers[strides] or [None] * len(plan.recipe.outputs)


def _answers(function: Any, args: Any, kwargs: Any, tensors: list[Tensor], index: int) -> list[AliasAnswer] | None:
    """None where torch cannot tell: a view that one rank's strides forbid."""
    metas = [on_one_rank(plain(tensor)) for tensor in tensors]
    replacements = iter(metas)
    with disable_dispatch_modes(), torch.no_grad():
        try:
            made = function(*[substitute(value, replacements) for value in args], **substitute(kwargs, replacements))
        except RuntimeError:
            return None
    results = made if isinstance(made, (tuple, list)) else [made]
    memory = storage_key(metas[index])
    return [AliasAnswer(storage_key(r) == memory, tuple(r.stride())) for r in results]


def worth_keeping(strides: Strides | None, shape: tuple[int, ...], tile: Tensor) -> Strides | None:
    """None where a dense tensor with the tile's order of dims has these strides anyway."""
    return None if strides is None or strides == dense_strides(shape, tile) else strides
