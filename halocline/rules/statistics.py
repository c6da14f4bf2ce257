"""Local work with a reduction over ranks in its middle: norms, whose statistics all ranks share.

A family says what is computed on a tile before and after the reduction, in both directions (:class:`Reduction`). This
file carries it out: the sums over ranks, and the autograd Function that saves the tile and the statistics only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..world import MovementFunction, Route, Sum, scaled
from .double_backward import Autocast, differentiated
from .recipe import Moments, Reduced, Reduction, merged


def _total(values: Tensor, route: Route | None) -> Tensor:
    return values if route is None else route.world.sum(values, route.ranks, route.label)


def _of_all_ranks(own: Moments, route: Route, few: int) -> Moments:
    """Among few ranks one sum brings each rank's own in a row of its own; else a second sum is smaller."""
    ranks = len(route.ranks)
    # Each rank's moments in a row of its own, so that one sum brings all of them.
    if ranks <= few:
        rows = own.mean.new_zeros(ranks, 3, *own.mean.shape)
        torch.stack(own, out=rows[route.ranks.index(route.world.rank)])
        rows = _total(rows, route)
        return merged(Moments(rows[:, 0], rows[:, 1], rows[:, 2]), dim=0)
    # With many ranks a row for each would be larger than two small sums.
    elements, centre = _total(torch.stack((own.elements, own.elements * own.mean)), route)
    centre = centre / elements.clamp_min(1)
    return Moments(elements, centre, _total(own.spread + own.elements * (own.mean - centre) ** 2, route))


def _whole_to_cut(partial_sum: Tensor, route: Route | None) -> Tensor:
    """A sum over ranks (cut to whole) whose result is used by cut work again (whole to cut): the factors cancel."""
    if route is None:
        return partial_sum
    ranks = len(route.ranks)
    total: Tensor = scaled((1.0, float(ranks)), Sum.apply(partial_sum, route, (1.0, 1.0 / ranks)))
    return total


class ReduceStatistics(MovementFunction):
    """Forward and backward each take one sum over ranks. A backward that is itself differentiated is composed from
    differentiable pieces instead.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        work: Reduction,
        tracking: Any,
        route: Route | None,
        tracking_route: Route | None,
        few: int,
        *operands: Tensor | None,
    ):
        """Local moments, one sum over the ranks, then the local result."""
        own = work.moments(*operands)
        mean, spread = (own if route is None else _of_all_ranks(own, route, few))[1:]
        variance = spread / work.count
        # Here, because a checkpoint may end its recomputation as soon as the tensors are saved, and torch's own kernel
        # has updated running statistics by then.
        if tracking is not None:
            tracking.update(_total(tracking.share(mean, variance), tracking_route))
        ctx.save_for_backward(*operands, mean, variance)
        ctx.work, ctx.route = work, route
        return work.result(mean, variance, *operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """Local slopes, one sum over the ranks, then the local gradients."""
        *operands, mean, variance = ctx.saved_tensors
        work, route, needed = ctx.work, ctx.route, ctx.needs_input_grad[5:]
        # This backward is differentiated again: build it from pieces that autograd knows.
        if torch.is_grad_enabled():
            composed = partial(work.composed, partial(_whole_to_cut, route=route))
            gradients = differentiated(composed, operands, needed, gradient, Autocast.now(gradient.device).off)
        else:
            sums, rest = work.slopes(gradient, mean, variance, *operands)
            gradients = work.gradients(_total(sums, route) / work.count, rest, mean, variance, *operands)
        wanted = [g if flag else None for g, flag in zip(gradients, needed, strict=True)]
        return *[None] * 5, *wanted


def reduce_statistics(local: Reduced, route: Route | None, tracking_route: Route | None, few: int) -> Tensor:
    """Carry out what a family returned from ``local``. Waits for the ranks of ``route``, in both directions.

    Up to ``few`` ranks combine moments in one sum.
    """
    if route is None and local.tracking is None and local.alone is not None:
        return local.alone(*local.operands)
    result: Tensor = ReduceStatistics.apply(local.work, local.tracking, route, tracking_route, few, *local.operands)
    return result
