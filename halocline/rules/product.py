"""Products of rows whose sums travel in tiles: one tile is under way while the next is computed.

A product over a cut shared dim is summed over the ranks in forward, and the mean of its gradient is taken in backward.
A plain input of a product with cut rows of a weight has its gradient summed in backward. Each is cut along the rows of
the input; the other matrices are multiplied whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch_private import backward_number, count_in_checkpoint, quick_apply
from ..tensor import arrival_of
from ..world import MovementFunction, PendingExchange, PendingSum, Route, Sum, begin_comparison, worth_comparing
from .double_backward import Autocast, differentiated, in_autocast_dtype

_MOST_TILES = 8


@dataclass(frozen=True)
class TiledProduct:
    """How a call of ``F.linear`` sums over the ranks of ``axes``: its result, or the gradient of its plain input.

    ``tile`` is the bytes of a tile; ``to_plain`` says that the result is plain, whose gradient ranks compare first.
    """

    axes: frozenset[str]
    sums_result: bool
    adds_bias: bool
    to_plain: bool
    tile: int

    def tiles(self, rows: Tensor) -> Iterator[Tensor]:
        """Views of the rows, as many on all ranks that sum them."""
        count = min(_MOST_TILES, rows.nbytes // self.tile)
        return iter(rows.chunk(max(1, count)))

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        """Into ``result``; every rank but one leaves the bias to it."""
        if bias is not None and self.adds_bias:
            torch.addmm(bias, rows, weight.t(), out=result)
        else:
            torch.mm(rows, weight.t(), out=result)

    def of_others(self, gradient: Tensor, rows: Tensor, bias: Tensor | None, needed: Any) -> Any:
        """The gradients of weight and bias."""
        slope = gradient.t() @ rows if needed[1] else None
        if bias is None or not needed[2]:
            return slope, None
        return slope, gradient.sum(0) if self.adds_bias else torch.zeros_like(bias)

    def composed(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The local work from differentiable functions."""
        if bias is not None and not self.adds_bias:
            weight, bias = weight + bias[:0].sum(), None
        return F.linear(input, weight, bias)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _begin(tile: Tensor, route: Route) -> PendingSum:
    return route.world.begin_sum(tile, route.ranks, route.label)


def _begin_meeting(rows: Tensor, route: Route) -> PendingExchange:
    """Begin to check that all ranks are about to sum these rows; work that needs no sum hides the check."""
    return route.world.begin_meeting(route.ranks, route.label, str(tuple(rows.shape)), rows.device)


class ProductThenSum(MovementFunction):
    """Saves its operands. The sum of a tile begins when its product is computed."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: TiledProduct, route: Route):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(input, weight, bias)
        ctx.how, ctx.route = how, route
        rows = _rows(input)
        result = rows.new_empty(rows.shape[0], weight.shape[0])
        shape = (*input.shape[:-1], weight.shape[0])
        world = route.world
        if world.tape is not None:  # it records whole sums
            how.product(rows, weight, bias, result)
            return world.sum(result, route.ranks, route.label).view(shape)
        meeting, under_way, done = _begin_meeting(result, route), [], 0
        for part in how.tiles(result):
            how.product(rows[done : done + len(part)], weight, bias, part)
            meeting.wait()
            under_way.append(_begin(part, route))
            done += len(part)
        for pending in under_way:
            pending.wait()
        count_in_checkpoint()
        return result.view(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The mean of the gradient travels in tiles, while the input's gradient is computed from the first of them."""
        input, weight, bias = ctx.saved_tensors
        how, route, needed = ctx.how, ctx.route, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *_summed_backward(how, route, (input, weight, bias), gradient, needed), None, None
        whole, rows = _rows(gradient), _rows(input)
        slope = rows.new_empty(rows.shape) if needed[0] else None
        are_same = begin_comparison(whole, route) if how.to_plain and worth_comparing(whole) else None
        if are_same is not None and slope is not None:  # nearly always they are, and the product hides the comparison
            torch.mm(whole, weight, out=slope)
        if are_same is None or not are_same():
            meeting = _begin_meeting(whole, route)
            whole = whole.clone(memory_format=torch.contiguous_format)
            meeting.wait()
            _mean_and_product(how, route, whole, weight, slope)
        of_input = None if slope is None else slope.view(input.shape)
        return of_input, *how.of_others(whole, rows, bias, needed), None, None


def _mean_and_product(how: TiledProduct, route: Route, whole: Tensor, weight: Tensor, slope: Tensor | None) -> None:
    """Make ``whole`` its mean over the ranks, and ``slope`` its product with the weight."""
    under_way, done = [(part, _begin(part, route)) for part in how.tiles(whole)], 0
    for part, pending in under_way:
        pending.wait()
        part.mul_(1.0 / len(route.ranks))
        if slope is not None:
            torch.mm(part, weight, out=slope[done : done + len(part)])
        done += len(part)


def _summed_backward(how: TiledProduct, route: Route, operands: Any, gradient: Tensor, needed: Any) -> Any:
    """The same gradients as differentiable functions."""

    def compute(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        part = how.composed(input, weight, bias)
        return Sum.apply(part, route, (1.0, 1.0 / len(route.ranks)))

    return differentiated(compute, operands, needed, gradient, Autocast.now(gradient.device).off)


class ProductOfPlain(MovementFunction):
    """Saves its operands. Where the input enters no other work, its gradient is summed here, in tiles.

    Law 3's factor follows behind: a gradient that is summed already is divided by it.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: TiledProduct, route: Route, arrival: Any
    ):
        ctx.save_for_backward(input, weight, bias)
        ctx.how, ctx.route, ctx.arrival = how, route, arrival
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The sums travel while the rest of the input's gradient, and the weight's, are computed."""
        input, weight, bias = ctx.saved_tensors
        how, route, needed = ctx.how, ctx.route, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            ctx.arrival.entries += 1  # the second derivative reaches the input by this way too
            run = differentiated(F.linear, (input, weight, bias), needed, gradient, Autocast.now(gradient.device).off)
            return *run, None, None, None
        whole, rows = _rows(gradient), _rows(input)
        slope = rows.new_empty(rows.shape) if needed[0] else None
        under_way: list[PendingSum] = []
        if slope is not None and ctx.arrival.entries == 1 and worth_comparing(slope):
            meeting, done = _begin_meeting(slope, route), 0
            for part in how.tiles(slope):
                torch.mm(whole[done : done + len(part)], weight, out=part)
                meeting.wait()
                under_way.append(_begin(part, route))
                done += len(part)
            ctx.arrival.summed_in = backward_number()
        elif slope is not None:
            torch.mm(whole, weight, out=slope)
        others = how.of_others(whole, rows, bias, needed)
        for pending in under_way:
            pending.wait()
        if under_way and slope is not None:
            slope.mul_(1.0 / len(route.ranks))
        return None if slope is None else slope.view(input.shape), *others, None, None, None


def with_tiles(how: TiledProduct, route: Route, entered: Tensor, brought: list[Tensor]) -> Tensor | None:
    """The product of operands that were brought; None where nothing is to be summed in tiles.

    ``entered`` is the first operand as it was given.
    """
    input, weight, *bias = in_autocast_dtype(*brought)
    operands = input, weight, bias[0] if bias else None
    if how.sums_result:
        return cast(Tensor, quick_apply(ProductThenSum, *operands, how, route))
    arrival = arrival_of(entered)
    if not input.requires_grad or entered.is_leaf or arrival is None or arrival.axes != how.axes:
        return None
    return cast(Tensor, quick_apply(ProductOfPlain, *operands, how, route, arrival))
