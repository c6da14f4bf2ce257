"""Work that needs all of a cut dim of some operands, done piece by piece while the pieces go round the ranks.

Each rank computes with the piece it has while the next is under way. In backward the pieces go round once more, and
their gradients with them. Nothing is gathered, but for a backward that is itself differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch_private import quick_apply
from ..geometry import Interval, Partition
from ..tensor import Fetch
from ..world import Label, MovementFunction, Receive, Route, Send
from .double_backward import Autocast, differentiated, in_autocast_dtype
from .recipe import RingWork


@dataclass(frozen=True)
class Ring:
    """How this rank takes part: it gets pieces from the next rank and hands them on to the one before.

    The first ``resident`` operands stay, the others travel. ``gathered`` is the work on whole operands, which
    ``fetches`` bring.
    """

    work: RingWork
    resident: int
    dim: int  # of each travelling operand, that the axis of the ring cuts
    axis: str
    place: int
    partition: Partition
    fetches: tuple[Fetch, ...]
    gathered: Callable[..., Tensor]

    @property
    def ranks(self) -> int:
        """As many as there are pieces."""
        return self.partition.parts

    def held(self, step: int) -> Interval:
        """Which piece this rank has after so many steps."""
        return self.partition.piece((self.place + step) % self.ranks)

    def pass_on(self, pieces: Sequence[Tensor], step: int, route: Route) -> Any:
        """Begin to hand the pieces of ``step`` to the rank before; what comes are those of the next step."""
        # Keys and values as one message: a step costs one latency.
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        elements = self.held(step + 1).size * sum(map(self._line, pieces))
        before, after = (route.ranks[(self.place + by) % self.ranks] for by in (-1, 1))
        return route.world.begin([Send(before, flat)], [Receive(after, elements)], flat, route.ranks, route.label)

    def arrived(self, exchange: Any, like: Sequence[Tensor], step: int) -> list[Tensor]:
        """Wait for the pieces of ``step``; views of the one message."""
        (flat,) = exchange.wait()
        # Pieces may differ in length: the dim need not be cut evenly.
        shapes = [(*p.shape[: self.dim], self.held(step).size, *p.shape[self.dim :][1:]) for p in like]
        return [part.view(shape) for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)]

    def rounds(self, pieces: Sequence[Tensor], route: Route) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Every piece in turn; the next is under way while one is used."""
        for step in range(self.ranks):
            exchange = None if step == self.ranks - 1 else self.pass_on(pieces, step, route)
            yield step, pieces
            if exchange is not None:
                pieces = self.arrived(exchange, pieces, step + 1)

    def _line(self, piece: Tensor) -> int:
        """Elements of one index of the dim."""
        shape = list(piece.shape)
        del shape[self.dim]
        return prod(shape)


class RoundTheRing(MovementFunction):
    """Saves this rank's operands, the result and what the work asks for.

    A backward that is itself differentiated gathers.
    """

    @staticmethod
    def forward(ctx: Any, ring: Ring, route: Route, *operands: Tensor):  # type: ignore[no-untyped-def]
        """One step for each piece; the next piece travels meanwhile."""
        resident, travelling = operands[: ring.resident], operands[ring.resident :]
        state = ring.work.begin(*resident, *travelling)
        for step, pieces in ring.rounds(travelling, route):
            state = ring.work.step(state, ring.held(step), *pieces)
        result, kept = ring.work.end(state)
        ctx.save_for_backward(*operands, result, kept)
        ctx.ring, ctx.route = ring, route
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The pieces go round once more, followed by their gradients."""
        *operands, result, kept = ctx.saved_tensors
        ring, route, needed = ctx.ring, ctx.route, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            gradients = _gathered_backward(ring, route.label, operands, gradient, needed)
        else:
            gradients = _backward(ring, route, operands, result, kept, gradient)
        return None, None, *(g if wanted else None for g, wanted in zip(gradients, needed, strict=True))


def _backward(
    ring: Ring, route: Route, operands: list[Tensor], result: Tensor, kept: Tensor, gradient: Tensor
) -> list[Tensor]:
    """The gradients of pieces travel with them, one step behind, and come home with a last step."""
    resident, travelling = operands[: ring.resident], operands[ring.resident :]
    state = ring.work.begin_backward(gradient, result, kept, *resident)
    coming: list[Tensor] = []
    for step, pieces in ring.rounds(travelling, route):
        state, mine = ring.work.step_backward(state, ring.held(step), *pieces)
        if coming:
            mine = [a + b for a, b in zip(mine, coming, strict=True)]
        # The gradient of a piece follows it; after the last step it is back on the piece's owner.
        coming = ring.arrived(ring.pass_on(mine, step, route), mine, step + 1)
    gradients = [*ring.work.end_backward(state), *coming]
    return [g.to(operand.dtype) for g, operand in zip(gradients, operands, strict=True)]


def _gathered_backward(ring: Ring, label: Label, operands: list[Tensor], gradient: Tensor, needed: Any) -> Any:
    """The same gradients as differentiable functions, from operands that are gathered."""

    def compute(*tiles: Tensor) -> Tensor:
        return ring.gathered(*(fetch(tile, label) for fetch, tile in zip(ring.fetches, tiles, strict=True)))

    return differentiated(compute, operands, needed, gradient, Autocast.now(gradient.device).off)


def in_ring(ring: Ring, route: Route, *operands: Tensor) -> Tensor:
    """Run the work on this rank's operands, those that stay first. Waits for the other ranks of the ring."""
    # Counted like gathers and shuffles.
    route.world.redistributed("ring", route.label)
    result: Tensor = quick_apply(RoundTheRing, ring, route, *in_autocast_dtype(*operands))
    return result
