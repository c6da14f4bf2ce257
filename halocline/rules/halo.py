"""Halos by linearity: the operation on the own tile, plus what the slabs that arrive add along the rim.

Nothing is glued to the tile, so nothing of its size is copied or kept. The exchange begins before the tile's own work
and is waited for after it. In backward the slabs' gradients are computed first, and travel back while the tile's own
gradient and the weight's are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch_private import quick_apply
from ..geometry import Box, Slabs, Transfer, shape_of, slices, volume
from ..tensor import Fetch
from ..world import Exchange, Known, Route, begin, exchange_messages, scaled, unpack
from .recipe import Addend, Recipe, Work

#: Elements of a tile below which the halo is glued on: a second call then costs more than the copy.
SMALL = 1 << 15
_NARROW = (torch.half, torch.bfloat16)


@dataclass(frozen=True)
class Halo:
    """How this rank runs such an operation. ``factor`` is law 3's for the operands that are whole."""

    main: Addend
    addends: tuple[Addend, ...]
    slabs: Slabs
    transfer: Transfer
    factor: float
    glued: Callable[..., Tensor]  # the operation on tile and halo in one piece

    def unpack(self, messages: list[Tensor], like: Tensor) -> list[Tensor]:
        """The slabs; one that is just one message is that message."""
        pieces = []
        for piece, alone in zip(self.slabs.pieces, self.slabs.messages, strict=True):
            shape = shape_of(piece)
            pieces.append(like.new_zeros(shape) if alone is None else messages[alone].view(shape))
        for message, places in zip(messages, self.slabs.placed, strict=True):
            at = 0
            for index, box in places:
                size = volume(box)
                if self.slabs.messages[index] is None:
                    pieces[index][slices(box)] = message[at : at + size].view(shape_of(box))
                at += size
        return pieces

    def used(self, tile: Tensor) -> Tensor:
        """What is needed of the tile: all of it, but for some strides."""
        return tile if self.uses_all else tile[slices(self.slabs.source)]

    def of_tile(self, gradient: Tensor, tile: Tensor) -> Tensor:
        if self.uses_all:
            return gradient
        found = torch.zeros_like(tile)
        found[slices(self.slabs.source)] = gradient
        return found

    @cached_property
    def uses_all(self) -> bool:
        return shape_of(self.slabs.source) == self.transfer.source_shape

    def pack(self, pieces: list[Tensor]) -> list[Tensor]:
        """The adjoint: slabs into messages for those whom they came from."""
        found = []
        for places in self.slabs.placed:
            parts = [pieces[piece][slices(box)].reshape(-1) for piece, box in places]
            found.append(parts[0].contiguous() if len(parts) == 1 else torch.cat(parts))
        return found

    def glue(self, tile: Tensor, pieces: list[Tensor]) -> Tensor:
        """Tile and slabs as one tensor, for the second derivative."""
        target = tile.new_zeros(self.transfer.target_shape)
        target[slices(self.slabs.own)] = self.used(tile)
        for piece, values in zip(self.slabs.pieces, pieces, strict=True):
            target[slices(piece)] = values
        return target


def plan_halo(recipe: Recipe, work: Work, fetch: Fetch | None, factor: float, glued: Any) -> Halo | None:
    """None where nothing comes from others, where some rank needs nothing of its own, and where tiles are small."""
    if recipe.addend is None or fetch is None or not fetch.communicates or fetch.fill or not fetch.beside:
        return None
    operand, parts = recipe.reads[0].operand, prod(len(dim.owned) for dim in fetch.dims)
    if operand.numel() < SMALL * parts or operand.dtype.is_complex:  # torch has no backward of its own for complex
        return None
    need = [slot.needs[0].lo for slot in work.slots[operand.index]]

    def addend(box: Box, main: bool) -> Addend:
        return recipe.addend(work.box, tuple(i.shift(lo) for i, lo in zip(box, need, strict=True)), main)  # type: ignore[misc]

    slabs = fetch.slabs
    addends = tuple(addend(piece, False) for piece in slabs.pieces)
    return Halo(addend(slabs.own, True), addends, slabs, fetch.transfer, factor, glued)


def with_halo(halo: Halo, route: Route, tile: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kind = tile.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and tile.dtype != torch.double:
        dtype = torch.get_autocast_dtype(kind)  # as autocast does, and outside the Function, which saves what it gets
        tile, weight, bias = tile.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return quick_apply(WithHalo, tile, weight, bias, halo, route)


class WithHalo(torch.autograd.Function):
    """Saves the tile, the weights and the slabs. A backward that is itself differentiated goes the glued way."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, weight: Tensor, bias: Tensor | None, halo: Halo, route: Route):  # type: ignore[no-untyped-def]
        exchange = begin(tile, halo.transfer, route)
        result = halo.main.compute.forward(halo.used(tile), weight, bias)
        pieces = halo.unpack(exchange.wait(), tile)
        for addend, piece in zip(halo.addends, pieces, strict=True):
            result[addend.out] += addend.compute.forward(piece, weight[addend.sees], None)
        ctx.save_for_backward(tile, weight, bias, *pieces)
        ctx.halo, ctx.route = halo, route
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        tile, weight, bias, *pieces = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            found = _glued_backward(ctx.halo, ctx.route, (tile, weight, bias), pieces, gradient, needed)
        else:
            found = _Backward(ctx.halo, ctx.route, weight, needed).run(gradient, tile, bias, pieces)
        return *found, None, None


@dataclass
class _Backward:
    """The first derivative: the rim, then the tile while the rim travels."""

    halo: Halo
    route: Route
    weight: Tensor
    needed: tuple[bool, bool, bool]

    def run(self, gradient: Tensor, tile: Tensor, bias: Tensor | None, pieces: list[Tensor]) -> tuple[Any, Any, Any]:
        weights: list[Tensor] = []
        exchange = self._send_rim(gradient, pieces, weights)
        halo = self.halo
        mine, slope, offset = halo.main.compute.backward(gradient, halo.used(tile), self.weight, bias, self.needed)
        if self.needed[1]:
            slope = self._total(slope, weights)
        if exchange is not None:
            mine = halo.of_tile(mine, tile)
            self._add_rim(mine, exchange)
        factor = halo.factor
        return mine, (None if slope is None else slope * factor), (None if offset is None else offset * factor)

    def _send_rim(self, gradient: Tensor, pieces: list[Tensor], weights: list[Tensor]) -> Exchange | None:
        rims: list[Tensor] = []
        wanted = (*self.needed[:2], False)
        for addend, piece in zip(self.halo.addends, pieces, strict=True):
            part, weight = gradient[addend.out], self.weight[addend.sees]
            rim, slope, _ = addend.compute.backward(part, piece, weight, None, wanted)
            rims.append(rim)
            weights.append(slope)
        if not self.needed[0]:
            return None
        return exchange_messages(self.halo.pack(rims), self.halo.transfer.reversed, gradient, self.route)

    def _total(self, main: Tensor, weights: list[Tensor]) -> Tensor:
        """Of the weight: added in float32 at least."""
        total = main.float() if main.dtype in _NARROW and weights else main
        for addend, slope in zip(self.halo.addends, weights, strict=True):
            total[addend.sees] += slope
        return total.to(main.dtype)

    def _add_rim(self, mine: Tensor, exchange: Exchange) -> None:
        back = self.halo.transfer.reversed
        for message, values in zip(back.arriving, exchange.wait(), strict=True):
            unpack(mine, message, values, accumulate=True)


def _glued_backward(
    halo: Halo, route: Route, operands: Any, pieces: list[Tensor], gradient: Tensor, needed: Any
) -> Any:
    tile, weight, bias = operands
    with torch.enable_grad():
        whole = Known.apply(tile, halo.glue(tile.detach(), [piece.detach() for piece in pieces]), halo.transfer, route)
        others = [None if t is None else scaled((1.0, halo.factor), t) for t in (weight, bias)]
        result = halo.glued(whole, *others)
        wanted = [t for t, flag in zip(operands, needed, strict=True) if flag]
        found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return tuple(next(found) if flag else None for flag in needed)
