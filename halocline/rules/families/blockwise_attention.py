"""Attention over keys and values that arrive in blocks, each used once, in any order.

The softmax is exact: each query keeps a running maximum and a running sum, so that the result is that of one softmax
over all keys. Backward recomputes the weights of a block from the logarithm of that sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry import Interval

_NARROW = (torch.half, torch.bfloat16)


class RunningSoftmax(NamedTuple):
    """What all blocks so far come to: ``mixed / total`` is the result, weights being relative to ``exp(highest)``."""

    query: Tensor
    highest: Tensor
    total: Tensor
    mixed: Tensor
    dtype: torch.dtype


class SoftmaxBackward(NamedTuple):
    """``level`` is the logarithm of a query's sum of weights, ``share`` the part of its gradient all keys share."""

    query: Tensor
    gradient: Tensor
    level: Tensor
    share: Tensor
    of_query: Tensor


@dataclass(frozen=True)
class BlockwiseAttention:
    """The steps of a ring (:class:`RingWork`) for the queries ``rows`` of the whole. Operands: query; keys, values."""

    rows: Interval
    causal: bool
    scale: float

    def begin(self, query: Tensor, key: Tensor, value: Tensor) -> RunningSoftmax:
        """No keys seen yet: no weight, and a maximum below all scores. Computes in float32 or wider."""
        q = query.to(torch.float32 if query.dtype in _NARROW else query.dtype)
        shape = q.shape[:-1]
        highest, total = q.new_full((*shape, 1), float("-inf")), q.new_zeros((*shape, 1))
        return RunningSoftmax(q, highest, total, q.new_zeros((*shape, value.shape[-1])), query.dtype)

    def step(self, state: RunningSoftmax, columns: Interval, keys: Tensor, values: Tensor) -> RunningSoftmax:
        """Earlier sums are scaled down where this block has a higher score."""
        if columns.empty:
            return state
        scores = self._scores(state.query, keys.to(state.query.dtype), columns)
        highest = torch.maximum(state.highest, scores.amax(-1, keepdim=True))
        # A query that has seen no key yet: minus infinity minus itself is no number.
        safe = highest.masked_fill(highest == float("-inf"), 0.0)
        weights, before = (scores - safe).exp(), (state.highest - safe).exp()
        total = state.total * before + weights.sum(-1, keepdim=True)
        mixed = state.mixed * before + weights @ values.to(state.query.dtype)
        return state._replace(highest=highest, total=total, mixed=mixed)

    def end(self, state: RunningSoftmax) -> tuple[Tensor, Tensor]:
        """The result, and for backward the logarithm of each query's sum of weights."""
        return (state.mixed / state.total).to(state.dtype), state.highest + state.total.log()

    def begin_backward(self, gradient: Tensor, result: Tensor, level: Tensor, query: Tensor) -> SoftmaxBackward:
        """From that logarithm the weights of each block can be recomputed separately."""
        q, dy = query.to(level.dtype), gradient.to(level.dtype)
        share = (dy * result.to(level.dtype)).sum(-1, keepdim=True)
        return SoftmaxBackward(q, dy, level, share, torch.zeros_like(q))

    def step_backward(
        self, state: SoftmaxBackward, columns: Interval, keys: Tensor, values: Tensor
    ) -> tuple[SoftmaxBackward, list[Tensor]]:
        """The gradients of a block's keys and values, from this rank's queries."""
        q, dy = state.query, state.gradient
        k, v = keys.to(q.dtype), values.to(q.dtype)
        weights = (self._scores(q, k, columns) - state.level).exp()
        # The softmax's derivative; the share is the same for all blocks.
        slope = weights * (dy @ v.transpose(-2, -1) - state.share) * self.scale
        gradients = [slope.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ dy]
        return state._replace(of_query=state.of_query + slope @ k), gradients

    def end_backward(self, state: SoftmaxBackward) -> list[Tensor]:
        """The gradient of the queries, over all blocks."""
        return [state.of_query]

    def _scores(self, query: Tensor, keys: Tensor, columns: Interval) -> Tensor:
        """Scaled products of queries and keys.

        For causal attention, minus infinity where the key comes after the query.
        """
        scores = (query @ keys.transpose(-2, -1)) * self.scale
        if not self.causal:
            return scores
        rows = torch.arange(self.rows.lo, self.rows.hi, device=query.device).unsqueeze(1)
        return scores.masked_fill(torch.arange(columns.lo, columns.hi, device=query.device) > rows, float("-inf"))
