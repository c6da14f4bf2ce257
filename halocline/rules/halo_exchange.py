"""What lies round a tile after an exchange: slabs, kept beside it instead of glued to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..geometry import Box, Slabs, Transfer, shape_of, slices, volume, whole
from ..tensor import Fetch
from ..world import PendingExchange, Route, begin, exchange_messages, unpack


@dataclass(frozen=True)
class HaloExchange:
    """One operand's slabs, for this rank; boxes are those of the needed box, the target of the transfer."""

    slabs: Slabs
    transfer: Transfer
    fill: float = 0.0

    @classmethod
    def of(cls, fetch: Fetch) -> HaloExchange:
        """From a fetch whose needs lie beside each rank's tile."""
        return cls(fetch.slabs, fetch.transfer, fetch.fill)

    def begin(self, tile: Tensor, route: Route) -> PendingExchange:
        """Send what the neighbours need; nothing is waited for."""
        return begin(tile, self.transfer, route)

    def arrived(self, exchange: PendingExchange, like: Tensor) -> list[Tensor]:
        """The slabs; one that is just one message is that message."""
        messages, pieces = exchange.wait(), []
        for piece, alone in zip(self.slabs.pieces, self.slabs.messages, strict=True):
            shape = shape_of(piece)
            pieces.append(like.new_full(shape, self.fill) if alone is None else messages[alone].view(shape))
        # A slab that is fed by several messages, or by part of one, is put together here.
        for message, places in zip(messages, self.slabs.placed, strict=True):
            at = 0
            for index, box in places:
                size = volume(box)
                if self.slabs.messages[index] is None:
                    pieces[index][slices(box)] = message[at : at + size].view(shape_of(box))
                at += size
        return pieces

    def send_back(self, pieces: list[Tensor], like: Tensor, route: Route) -> PendingExchange:
        """The adjoint of the exchange: the slabs' gradients go to those from whom the slabs came."""
        messages = []
        for places in self.slabs.placed:
            strips = [pieces[piece][slices(box)].reshape(-1) for piece, box in places]
            messages.append(strips[0] if len(strips) == 1 else torch.cat(strips))
        return exchange_messages(messages, self.transfer.reversed, like, route)

    def add_back(self, mine: Tensor, exchange: PendingExchange) -> None:
        """What the others computed for this rank's edge, added to the gradient of its tile."""
        for message, values in zip(self.transfer.reversed.arriving, exchange.wait(), strict=True):
            unpack(mine, message, values, accumulate=True)

    @cached_property
    def uses_all(self) -> bool:
        """Is every element of the tile needed?"""
        return shape_of(self.slabs.source) == self.transfer.source_shape

    def used(self, tile: Tensor) -> Tensor:
        """What is needed of the tile: all of it, but for some strides."""
        return tile if self.uses_all else tile[slices(self.slabs.source)]

    def glued(self, tile: Tensor, pieces: list[Tensor], box: Box | None = None) -> Tensor:
        """Tile and slabs as one tensor, or a box of it."""
        box = box or tuple(map(whole, self.transfer.target_shape))
        target = tile.new_full(shape_of(box), self.fill)
        for place, values in self._overlaps(box, self.used(tile), pieces):
            target[place] = values
        return target

    def add_glued(self, gradient: Tensor, box: Box, mine: Tensor, pieces: list[Tensor]) -> None:
        """The adjoint of :meth:`glued`: a box's gradient added to those of tile and slabs."""
        for place, values in self._overlaps(box, self.used(mine), pieces):
            values.add_(gradient[place])

    def _overlaps(self, box: Box, used: Tensor, pieces: list[Tensor]) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """The parts of tile and slabs that lie in ``box``, as views, and where in the box each lies."""
        for place, values in [(self.slabs.own, used), *zip(self.slabs.pieces, pieces, strict=True)]:
            common = tuple(a.intersect(b) for a, b in zip(box, place, strict=True))
            if volume(common):
                yield _within(common, box), values[_within(common, place)]


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return slices(tuple(i.shift(-o.lo) for i, o in zip(box, outer, strict=True)))
