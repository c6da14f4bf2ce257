"""Norms over a sample that is never there whole: statistics summed over tiles, in forward and in backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...rules import Moments, Recipe, Reduced, Reduction
from ...rules.plan import bound
from ...rules.recipe import merged
from .boxes import Part, arguments, shares_of
from .operations import Operation, Trace


def input_of(operation: Operation, recipe: Recipe) -> int:
    """The value that a norm normalizes."""
    return operation.operands[recipe.reads[0].operand.index]


class Norm:
    """One norm of a step, whose input is kept whole between segments.

    It is made from all tiles of the input, and updates running statistics then, as one call of the norm would.
    :meth:`apply` normalizes a tile. Its backward collects ``slopes``, sums over tiles; once all tiles are through,
    :meth:`correction` is what the statistics, which depend on every element, add to the input's gradient.
    """

    def __init__(
        self, trace: Trace, operation: Operation, recipe: Recipe, tiles: Iterable[Part], outside: dict[int, Tensor]
    ) -> None:
        self.input = input_of(operation, recipe)
        self._trace, self._operation, self._recipe, self._outside = trace, operation, recipe, outside
        each = []
        for tile in tiles:  # one at a time: what a rule returns holds the tile
            last = self._local(tile)
            each.append(last.work.moments(*last.operands))
        moments = merged(Moments(*map(torch.stack, zip(*each, strict=True))), dim=0)
        self.mean, self.variance = moments.mean, moments.spread / last.work.count
        self.slopes: Tensor | None = None
        if last.tracking is not None:
            last.tracking.update(last.tracking.share(self.mean, self.variance))

    def apply(self, local: Reduced) -> Tensor:
        """Normalize a tile."""
        result: Tensor = NormalizeTile.apply(self, local.work, *local.operands)
        return result

    def correction(self, tile: Part, slopes: Tensor) -> Tensor:
        """The gradient that reaches a tile of the input through mean and variance."""
        work, operands = (local := self._local(tile)).work, local.operands
        _, kept = work.slopes(torch.zeros_like(tile.data), self.mean, self.variance, *operands)
        gradient: Tensor = work.gradients(slopes / work.count, kept, self.mean, self.variance, *operands)[0]
        return gradient

    def _local(self, tile: Part) -> Reduced:
        """What the rule returns for a tile of the input."""
        (share,), _ = shares_of(self._trace, [self._operation], {self._operation.results[0]: tile.box})
        values = self._trace.values
        parts = {v: Part(self._outside[v], values[v].box) for v in self._operation.operands if v != self.input}
        args, kwargs = arguments(share, parts | {self.input: tile})
        with torch.no_grad():
            local: Reduced = bound(self._recipe, share.work)(*args, **kwargs)  # type: ignore[arg-type]
        return local


class NormalizeTile(torch.autograd.Function):
    """Normalizes a tile with given statistics; backward adds its part to the sums that the statistics need."""

    @staticmethod
    def forward(ctx: Any, norm: Norm, work: Reduction, *operands: Tensor | None):  # type: ignore[no-untyped-def]
        """The normalized tile."""
        ctx.norm, ctx.work = norm, work
        ctx.save_for_backward(*operands)
        return work.result(norm.mean, norm.variance, *operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The gradients with the statistics held fixed."""
        norm, operands = ctx.norm, ctx.saved_tensors
        sums, kept = ctx.work.slopes(gradient, norm.mean, norm.variance, *operands)
        norm.slopes = sums if norm.slopes is None else norm.slopes + sums
        own = ctx.work.gradients(torch.zeros_like(sums), kept, norm.mean, norm.variance, *operands)
        wanted = [g if needed else None for g, needed in zip(own, ctx.needs_input_grad[2:], strict=True)]
        return None, None, *wanted
