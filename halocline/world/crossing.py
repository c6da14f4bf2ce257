"""Moves a tensor from tiles on some ranks to tiles on others, and back as the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry import Box, Crossing, Hop, shape_of, slices, volume
from .base import World
from .events import Label
from .movement import MovementFunction
from .pending import PendingExchange
from .tags import crossing_tag


class CrossingRoute(NamedTuple):
    """What a crossing needs besides tensors. ``key`` tells it from others under way between the same ranks, and
    ``turn`` from others of its key."""

    world: World
    crossing: Crossing
    key: str
    label: Label
    dtype: torch.dtype
    device: torch.device
    turn: int = 0


class PendingCrossing:
    """A crossing whose own messages are on their way. Messages are copies, so tiles may be changed at once."""

    def __init__(self, tensor: Tensor | None, sends: list[PendingExchange]) -> None:
        self.tensor, self.sends = tensor, sends  #: the tile that arrived; None on ranks that receive none

    def wait(self) -> None:
        """Until the messages of this rank have been taken."""
        for send in self.sends:
            send.wait()


def cross(route: CrossingRoute, tile: Tensor | None) -> PendingCrossing:
    """Send the boxes of ``tile`` (None where this rank holds none), receive and pass on those of the target tile."""
    arrival = Arrival(route)
    sends = send_tile(route, tile)
    return arrival.finish(tile, sends)


def cross_back(route: CrossingRoute, gradient: Tensor | None, scale: float) -> PendingCrossing:
    """The adjoint: gradients of the target tiles are added up along the chains, and go to the ranks that sent."""
    arrival = GradientArrival(route, scale)
    sends = send_gradient(route, gradient)
    return arrival.finish(gradient, sends)


# The two sides of a crossing apart, for ranks that come to them at different times ----------------------------------


def send_tile(route: CrossingRoute, tile: Tensor | None) -> list[PendingExchange]:
    """The source's side: begin to send what leaves this rank's tile."""
    me, home = route.world.rank, route.crossing.sources.get(route.world.rank)
    return [
        _send(route, number, hop.receiver, _part(tile, home, hop.box))
        for number, hop in route.crossing.hops_of(me).sends
    ]


class Arrival:
    """The target's side: its receives are posted when it is made; :meth:`finish` waits for them."""

    def __init__(self, route: CrossingRoute) -> None:
        self._route = route
        self._mine = route.crossing.hops_of(route.world.rank)
        self._exchanges = [_receive(route, number, hop.sender) for number, hop in self._mine.arrives]

    def finish(self, tile: Tensor | None, sends: list[PendingExchange] | None = None) -> PendingCrossing:
        """The target tile, whose boxes are passed on. ``tile`` is the source's, where this rank holds both."""
        route, crossing, me, sends = self._route, self._route.crossing, self._route.world.rank, list(sends or ())
        home, passes_on = crossing.targets.get(me), self._mine.passes_on
        at_once = home is not None and _is_one(self._mine.arrives, home)
        target = None if at_once else _empty(route, home)
        for _, box in (entry for entry in crossing.kept if entry[0] == me):
            _part(target, home, box).copy_(_part(tile, crossing.sources[me], box))
        for (_, hop), exchange in zip(self._mine.arrives, self._exchanges, strict=True):
            came = exchange.wait()[0].view(shape_of(hop.box))
            if at_once:  # one message is the whole tile
                target = came
            else:
                _part(target, home, hop.box).copy_(came)
            if hop.box in passes_on:  # at once: what waits behind the next message leaves the link idle
                number = passes_on[hop.box]
                sends.append(_send(route, number, crossing.hops[number].receiver, came))
        return PendingCrossing(target, sends)


def send_gradient(route: CrossingRoute, gradient: Tensor | None) -> list[PendingExchange]:
    """The target's side of the adjoint: add up along the chains, and begin to send to the source."""
    me, crossing = route.world.rank, route.crossing
    own, mine = crossing.targets.get(me), crossing.hops_of(me)
    leaving = mine.passes_on
    total = gradient.clone() if gradient is not None and leaving else gradient
    arriving = {n: _receive(route, n, crossing.hops[n].receiver) for n in reversed(leaving.values())}
    # Boxes that came to this rank go back to their sender, once what it has passed on is there.
    returning = {hop.box: number for number, hop in mine.arrives}

    def give_back(box: Box) -> PendingExchange:
        number = returning[box]
        return _send(route, number, crossing.hops[number].sender, _part(total, own, box))

    sends = [give_back(box) for box in reversed(returning) if box not in leaving]
    for number, exchange in arriving.items():
        box = crossing.hops[number].box
        _part(total, own, box).add_(exchange.wait()[0].view(shape_of(box)))
        if box in returning:
            sends.append(give_back(box))
    return sends


class GradientArrival:
    """The source's side of the adjoint: its receives are posted when it is made; :meth:`finish` adds them up."""

    def __init__(self, route: CrossingRoute, scale: float) -> None:
        self._route, self._scale, me = route, scale, route.world.rank
        leaving = reversed(route.crossing.hops_of(me).sends)
        self._arriving = [(hop.box, _receive(route, number, hop.receiver)) for number, hop in leaving]

    def finish(self, gradient: Tensor | None, sends: list[PendingExchange] | None = None) -> PendingCrossing:
        """The gradient of the source tile. ``gradient`` is the target's, where this rank holds both."""
        route, crossing, me = self._route, self._route.crossing, self._route.world.rank
        home, kept = crossing.sources.get(me), [box for rank, box in crossing.kept if rank == me]
        if home is not None and not kept and _is_one(route.crossing.hops_of(me).sends, home):
            came = self._arriving[0][1].wait()[0].view(shape_of(home))  # one message is the whole tile's gradient
            return PendingCrossing(came if self._scale == 1 else came.mul_(self._scale), list(sends or ()))
        target = None if home is None else torch.zeros(shape_of(home), dtype=route.dtype, device=route.device)
        for box, exchange in self._arriving:
            _part(target, home, box).add_(exchange.wait()[0].view(shape_of(box)), alpha=self._scale)
        for box in kept:
            _part(target, home, box).add_(_part(gradient, crossing.targets[me], box), alpha=self._scale)
        return PendingCrossing(target, list(sends or ()))


class MoveAcross(MovementFunction):
    """A crossing as a linear map. Ranks without a source tile give an empty tensor, those without a target get one."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, route: CrossingRoute, scale: float, back: bool):  # type: ignore[no-untyped-def]
        ctx.route, ctx.scale, ctx.back = route, scale, back
        held, wanted = route.crossing.sources, route.crossing.targets
        mine = tile if route.world.rank in (wanted if back else held) else None
        moved = cross_back(route, mine, scale) if back else cross(route, mine)
        moved.wait()
        return tile.new_empty(0) if moved.tensor is None else moved.tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        # Law 3: the factor belongs to the direction from targets to sources.
        return MoveAcross.apply(gradient.contiguous(), ctx.route, ctx.scale, not ctx.back), None, None, None


def _is_one(hops: Sequence[tuple[int, Hop]], tile: Box) -> bool:
    """Is one message all of a tile?"""
    return len(hops) == 1 and hops[0][1].box == tile


def _empty(route: CrossingRoute, box: Box | None) -> Tensor | None:
    return None if box is None else torch.empty(shape_of(box), dtype=route.dtype, device=route.device)


def _part(tensor: Tensor | None, home: Box | None, box: Box) -> Tensor:
    """The view of a tile, which lies at ``home``, that shows ``box``."""
    if tensor is None or home is None:
        raise AssertionError("a crossing names a rank that holds no tile")
    if box == home:
        return tensor
    return tensor[slices(tuple(interval.shift(-at.lo) for interval, at in zip(box, home, strict=True)))]


def _send(route: CrossingRoute, number: int, peer: int, values: Tensor) -> PendingExchange:
    tag = crossing_tag(route.key, number, values.numel(), route.dtype, route.turn)
    # A copy: a view of a tile would change under the message when the tile is written to.
    message = values.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return route.world.begin_tagged([(peer, message, tag)], [], route.label)


def _receive(route: CrossingRoute, number: int, peer: int) -> PendingExchange:
    elements = volume(route.crossing.hops[number].box)
    buffer = torch.empty(elements, dtype=route.dtype, device=route.device)
    tag = crossing_tag(route.key, number, elements, route.dtype, route.turn)
    return route.world.begin_tagged([], [(peer, buffer, tag)], route.label)
