"""Movements as linear maps with their adjoints: the backward of each is the same Function with the pair swapped.

Ranks wait for each other only here; everything above is local computation. ``scales`` are the factors of the forward
and of the adjoint (law 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import function_of, quick_apply
from ..errors import Refused
from ..geometry import PackedMessage, Slices, Transfer
from ..kernels.layout import memory_format_of
from .base import Receive, Send, World
from .events import Label
from .pending import PendingExchange

#: A leaf with this attribute has its gradient averaged over all ranks when backward ends.
AVERAGED = "_halocline_averaged"


class Route(NamedTuple):
    """What a movement needs besides tensors: the ranks that take part, and a label for errors."""

    world: World
    ranks: tuple[int, ...]
    label: Label


class OwnFunction(torch.autograd.Function):
    """The base of the library's autograd Functions, by which nodes of the graph are recognised."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise Refused(
            "forward-mode differentiation", "the model", "this step has no forward derivative", "use backward()"
        )


class MovementFunction(OwnFunction):
    """A Function that moves tiles or applies law 3. The leaves behind its node were checked when it was made."""


_TOKEN = torch.empty(0)


def recompute_first(ctx: Any) -> None:
    """Have the checkpoint that a movement stands in recompute before the movement's backward communicates.

    Every rank then recomputes at the same point, whatever its local work has saved.
    """
    ctx.saved_tensors  # noqa: B018


def is_movement(node: object) -> bool:
    """Is this node of the autograd graph a movement of ours?"""
    function = function_of(node)
    return function is not None and issubclass(function, MovementFunction)


class MoveBoxes(MovementFunction):
    """Carry boxes between ranks: ``target = scale * sum of what arrives``, and ``fill`` where nothing arrives."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, transfer: Transfer, route: Route, scales: tuple[float, float], fill: float):  # type: ignore[no-untyped-def]
        ctx.transfer, ctx.route, ctx.scales = transfer, route, scales
        ctx.save_for_backward(_TOKEN)
        return carry(tile, transfer, route, scales[0], fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        recompute_first(ctx)
        swapped = (ctx.scales[1], ctx.scales[0])
        return MoveBoxes.apply(gradient, ctx.transfer.reversed, ctx.route, swapped, 0.0), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return MoveBoxes.apply(tangent, ctx.transfer, ctx.route, ctx.scales, 0.0)


class MoveTogether(MovementFunction):
    """Several movements among the same ranks that are needed at the same moment, in one message per peer."""

    @staticmethod
    def forward(ctx: Any, bundle: Bundle, *tiles: Tensor):  # type: ignore[no-untyped-def]
        ctx.bundle = bundle
        ctx.save_for_backward(_TOKEN)
        return tuple(bundle.carry(tiles))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):  # type: ignore[no-untyped-def]
        recompute_first(ctx)
        return None, *MoveTogether.apply(ctx.bundle.reversed, *gradients)


class KnownMove(MovementFunction):
    """A movement whose result is known: nothing travels until backward, which is that of :class:`MoveBoxes`."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, arrived: Tensor, transfer: Transfer, route: Route):  # type: ignore[no-untyped-def]
        ctx.transfer, ctx.route = transfer, route
        ctx.save_for_backward(_TOKEN)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        recompute_first(ctx)
        return MoveBoxes.apply(gradient, ctx.transfer.reversed, ctx.route, (1.0, 1.0), 0.0), None, None, None


class Sum(MovementFunction):
    """Sum over the ranks of a route, times a scale. The adjoint of SUM is MEAN, since a whole gradient is a mean."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, route: Route, scales: tuple[float, float]):  # type: ignore[no-untyped-def]
        ctx.route, ctx.scales = route, scales
        ctx.save_for_backward(_TOKEN)
        total = route.world.sum(partial.detach(), route.ranks, route.label)
        # A detached alias is no view to autograd, so that the caller may change the result in place.
        return total * scales[0] if scales[0] != 1 else total.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        recompute_first(ctx)
        return Sum.apply(gradient, ctx.route, (ctx.scales[1], ctx.scales[0])), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return Sum.apply(tangent, ctx.route, ctx.scales)


class MeanOfGradient(MovementFunction):
    """The identity, whose adjoint is the mean over the ranks of a route, unless ``is_summed()`` says that it is taken.

    A node of its own: ``torch.autograd.grad`` may hand out a result's gradient before the result's hooks have run.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, route: Route, is_summed: Callable[[], bool]):  # type: ignore[no-untyped-def]
        # Nothing is saved: a checkpoint's recomputation finds the alias that its forward has made.
        ctx.route, ctx.is_summed = route, is_summed
        return whole.detach()  # an alias that is no view to autograd does not keep its base

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        if ctx.is_summed():
            return gradient, None, None
        share = 1.0 / len(ctx.route.ranks)
        return Sum.apply(gradient, ctx.route, (share, share)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return tangent.clone()  # torch wants a tensor of its own


class ScaleGradient(MovementFunction):
    """The identity, whose adjoint multiplies: for whole operands that enter a cut operation, all of a call at once."""

    @staticmethod
    def forward(ctx: Any, scales: tuple[float, float], *tensors: Tensor):  # type: ignore[no-untyped-def]
        ctx.scales = scales
        ctx.set_materialize_grads(False)
        # A detached alias is no view to autograd, and still shares the count of writes to its base.
        found = [t.detach() if scales[0] == 1 else t * scales[0] for t in tensors]
        return found[0] if len(found) == 1 else tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):  # type: ignore[no-untyped-def]
        swapped = (ctx.scales[1], ctx.scales[0])
        return None, *(None if g is None else ScaleGradient.apply(swapped, g) for g in gradients)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        # Not an alias of the tangent: torch wants a tensor of its own.
        found = tuple(None if t is None else t * ctx.scales[0] for t in tangents)
        return found[0] if len(found) == 1 else found


def scaled(scales: tuple[float, float], *tensors: Tensor) -> Any:
    """The tensors through one :class:`ScaleGradient`."""
    return quick_apply(ScaleGradient, scales, *tensors)


def carry(tile: Tensor, transfer: Transfer, route: Route, scale: float, fill: float) -> Tensor:
    """Send and receive the boxes of a transfer; returns the target. Called by all ranks of the route."""
    exchange = begin(tile, transfer, route)
    target = _with_staying(tile, transfer, fill)
    for message, values in zip(transfer.arriving, exchange.wait(), strict=True):
        unpack(target, message, values, transfer.accumulate)
    return target.mul_(scale) if scale != 1 else target


def _with_staying(tile: Tensor, transfer: Transfer, fill: float) -> Tensor:
    """A target in the tile's memory format, with the boxes that stay on this rank, and ``fill`` where nothing
    arrives."""
    form = memory_format_of(tile)
    target = torch.empty(transfer.target_shape, dtype=tile.dtype, device=tile.device, memory_format=form)
    if not transfer.covers:
        target.fill_(fill)
    for source, place in transfer.staying:
        _place(target, place, tile[source], transfer.accumulate)
    return target


class Bundle(NamedTuple):
    """The transfers of :class:`MoveTogether`, each with its scales and the value where nothing arrives."""

    route: Route
    transfers: tuple[Transfer, ...]
    scales: tuple[tuple[float, float], ...]
    fills: tuple[float, ...]

    @property
    def reversed(self) -> Bundle:
        """The adjoint: every transfer in the other direction, with its scales swapped."""
        swapped = tuple((after, before) for before, after in self.scales)
        return Bundle(self.route, tuple(t.reversed for t in self.transfers), swapped, (0.0,) * len(self.fills))

    def carry(self, tiles: Sequence[Tensor]) -> list[Tensor]:
        """Send and receive the boxes of all transfers, in one exchange."""
        world, like = self.route.world, tiles[0]
        outgoing: dict[int, list[Tensor]] = {}
        for tile, transfer in zip(tiles, self.transfers, strict=True):
            for message in transfer.leaving:
                outgoing.setdefault(message.peer, []).append(pack(tile, message))
        incoming: dict[int, int] = {}
        for transfer in self.transfers:
            for message in transfer.arriving:
                incoming[message.peer] = incoming.get(message.peer, 0) + message.elements
        sends = [Send(peer, _in_a_row(outgoing[peer])) for peer in sorted(outgoing)]
        receives = [Receive(peer, incoming[peer]) for peer in sorted(incoming)]
        exchange = world.begin(sends, receives, like, self.route.ranks, self.route.label)
        targets = [_with_staying(*each) for each in zip(tiles, self.transfers, self.fills, strict=True)]
        arrived = dict(zip(sorted(incoming), exchange.wait(), strict=True))
        return [self._finished(index, target, arrived) for index, target in enumerate(targets)]

    def _finished(self, index: int, target: Tensor, arrived: dict[int, Tensor]) -> Tensor:
        """Write a transfer's part of the messages, which are in the order of transfers, into its target."""
        transfer, scale = self.transfers[index], self.scales[index][0]
        for message in transfer.arriving:
            values, arrived[message.peer] = arrived[message.peer].split(
                (message.elements, arrived[message.peer].numel() - message.elements)
            )
            unpack(target, message, values, transfer.accumulate)
        return target.mul_(scale) if scale != 1 else target


def begin(tile: Tensor, transfer: Transfer, route: Route) -> PendingExchange:
    """Send the boxes of ``tile`` that others need, and ask for those that this rank needs."""
    return exchange_messages([pack(tile, message) for message in transfer.leaving], transfer, tile, route)


def exchange_messages(messages: list[Tensor], transfer: Transfer, like: Tensor, route: Route) -> PendingExchange:
    """The same with the messages already packed, one for each peer of the transfer."""
    sends = [Send(to.peer, message) for to, message in zip(transfer.leaving, messages, strict=True)]
    receives = [Receive(message.peer, message.elements) for message in transfer.arriving]
    exchange = route.world.begin(sends, receives, like, route.ranks, route.label)
    if not route.world.overlap:
        exchange.wait()
    return exchange


def pack(tile: Tensor, message: PackedMessage) -> Tensor:
    """The elements of a message, which may come from several strips of the tile."""
    strips = [tile[strip.place].reshape(-1) for strip in message.strips]
    return _in_a_row(strips)


def _in_a_row(parts: list[Tensor]) -> Tensor:
    """One message. Autocast is off, since torch.cat under it raises for float16 where it is to bfloat16, or back."""
    if len(parts) == 1:
        return parts[0]
    kind = parts[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return torch.cat(parts)
    with torch.autocast(kind, enabled=False):
        return torch.cat(parts)


def unpack(target: Tensor, message: PackedMessage, values: Tensor, accumulate: bool) -> None:
    """Write a message's elements into the target, or add them."""
    if len(message.strips) == 1:
        (strip,) = message.strips
        _place(target, strip.place, values.view(strip.shape), accumulate)
        return
    for strip in message.strips:
        _place(target, strip.place, values[strip.start : strip.stop].view(strip.shape), accumulate)


def _place(target: Tensor, place: Slices, values: Tensor, accumulate: bool) -> None:
    if accumulate:
        target[place] += values
    else:
        target[place] = values
