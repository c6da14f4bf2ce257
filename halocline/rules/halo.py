"""Halos by linearity: the operation on the own tile, plus what the slabs that arrive add along the edge.

Nothing is glued to the tile, so nothing of its size is copied or kept. The exchange begins before the tile's own work
and is waited for after it. In backward the slabs' gradients are computed first, and travel back while the tile's own
gradient and the weight's are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch_private import quick_apply
from ..geometry import Box
from ..tensor import Fetch
from ..world import KnownMove, MovementFunction, Route, scaled
from .double_backward import Autocast, differentiated, in_autocast_dtype
from .halo_exchange import HaloExchange
from .recipe import LinearPart, Recipe, Work

_NARROW = (torch.half, torch.bfloat16)


@dataclass(frozen=True)
class Halo:
    """How this rank runs such an operation. ``factor`` is law 3's for the operands that are whole."""

    main: LinearPart
    linear_parts: tuple[LinearPart, ...]
    neighbours: HaloExchange
    factor: float
    glued: Callable[..., Tensor]  # the operation on tile and halo in one piece


def plan_halo(recipe: Recipe, work: Work, fetch: Fetch | None, factor: float, glued: Any, least: int) -> Halo | None:
    """None where nothing comes from others, where some rank needs nothing of its own, and where tiles are small: of
    fewer than ``least`` elements.
    """
    if recipe.linear_part is None or fetch is None or not fetch.communicates or fetch.fill or not fetch.beside:
        return None
    operand, parts = recipe.reads[0].operand, prod(len(dim.owned) for dim in fetch.dims)
    # By the global size, so that all ranks decide alike.
    if operand.numel() < least * parts or operand.dtype.is_complex:  # torch has no backward of its own for complex
        return None
    need = [slot.needs[0].lo for slot in work.slots[operand.index]]

    def linear_part(box: Box, main: bool) -> LinearPart:
        return recipe.linear_part(work.box, tuple(i.shift(lo) for i, lo in zip(box, need, strict=True)), main)  # type: ignore[misc]

    slabs = fetch.slabs
    linear_parts = tuple(linear_part(piece, False) for piece in slabs.pieces)
    return Halo(linear_part(slabs.own, True), linear_parts, HaloExchange.of(fetch), factor, glued)


def with_halo(halo: Halo, route: Route, tile: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a linear operation on the tile and on the slabs that arrive. Waits for the neighbours."""
    return quick_apply(WithHalo, *in_autocast_dtype(tile, weight, bias), halo, route)


class WithHalo(MovementFunction):
    """Saves the tile, the weights and the slabs. A backward that is itself differentiated glues its halo."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, weight: Tensor, bias: Tensor | None, halo: Halo, route: Route):  # type: ignore[no-untyped-def]
        """Begin the exchange, run the tile's own work, wait, and add what each slab contributes."""
        # The slabs travel while the tile's own work runs, which is nearly all of it.
        exchange = halo.neighbours.begin(tile, route)
        result = halo.main.compute.forward(halo.neighbours.used(tile), weight, bias)
        pieces = halo.neighbours.arrived(exchange, tile)
        for linear_part, piece in zip(halo.linear_parts, pieces, strict=True):
            result[linear_part.out] += linear_part.compute.forward(piece, weight[linear_part.sees], None)
        ctx.save_for_backward(tile, weight, bias, *pieces)
        ctx.halo, ctx.route = halo, route
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """Gradients of tile, weight and bias. Glues the halo if this backward is differentiated in turn."""
        tile, weight, bias, *pieces = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        run = _glued_backward if torch.is_grad_enabled() else _backward
        return *run(ctx.halo, ctx.route, (tile, weight, bias), pieces, gradient, needed), None, None


def _backward(
    halo: Halo, route: Route, operands: Any, pieces: list[Tensor], gradient: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The first derivative: the edge, then the tile while the slabs' gradients travel back."""
    tile, weight, bias = operands
    edges, slopes = [], []
    for part, piece in zip(halo.linear_parts, pieces, strict=True):
        of_rim = (gradient[part.out], piece, weight[part.sees], None, (*needed[:2], False))
        edge, slope, _ = part.compute.backward(*of_rim)
        edges.append(edge)
        slopes.append(slope)
    # The neighbours wait for these gradients; the tile's own are not urgent.
    exchange = halo.neighbours.send_back(edges, gradient, route) if needed[0] else None
    of_tile = (gradient, halo.neighbours.used(tile), weight, bias, needed)
    mine, slope, offset = halo.main.compute.backward(*of_tile)
    if needed[1]:  # added in float32 at least
        total = slope.float() if slope.dtype in _NARROW and slopes else slope
        for part, edge in zip(halo.linear_parts, slopes, strict=True):
            total[part.sees] += edge
        slope = total.to(slope.dtype) * halo.factor
    if exchange is not None:
        mine = _of_tile(halo.neighbours, mine, tile)
        halo.neighbours.add_back(mine, exchange)
    return mine, slope, None if offset is None else offset * halo.factor


def _of_tile(neighbours: HaloExchange, gradient: Tensor, tile: Tensor) -> Tensor:
    """A gradient of the used part, as a gradient of the whole tile."""
    if neighbours.uses_all:
        return gradient
    whole = torch.zeros_like(tile)
    neighbours.used(whole).copy_(gradient)
    return whole


def _glued_backward(
    halo: Halo, route: Route, operands: Any, pieces: list[Tensor], gradient: Tensor, needed: Any
) -> Any:
    """The same gradients as differentiable functions of tile, weight and bias."""
    arrived = halo.neighbours.glued(operands[0].detach(), [piece.detach() for piece in pieces])

    def compute(tile: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        whole = KnownMove.apply(tile, arrived, halo.neighbours.transfer, route)
        return halo.glued(whole, *(None if t is None else scaled((1.0, halo.factor), t) for t in (weight, bias)))

    # What autocast had to do was done before the Function.
    return differentiated(compute, operands, needed, gradient, Autocast.now(gradient.device).off)
