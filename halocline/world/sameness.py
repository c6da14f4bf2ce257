"""Do all ranks hold the same bits? Then their mean is what each has, and nothing of its size has to travel."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch_private import count_in_checkpoint
from .base import FEW
from .events import Label
from .movement import MovementFunction, Route, Sum, recompute_first
from .tensor_bytes import memory_of

LEAST = 1 << 18  # bytes: a mean of fewer takes no longer than the comparison


def worth_comparing(tensor: Tensor) -> bool:
    """Is it large, and in memory of the host, where its digest is made?"""
    return tensor.nbytes >= LEAST and tensor.device.type in ("cpu", "meta")


def all_the_same(tensor: Tensor, route: Route) -> bool:
    """Do all ranks of the route hold the same bits? False where a comparison would not pay: all ranks decide alike."""
    return begin_comparison(tensor, route)()


def begin_comparison(tensor: Tensor, route: Route) -> Callable[[], bool]:
    """Begin to compare the tensor's bits among the ranks of the route by a small digest; returns the wait for the
    verdict, which is the same on all ranks.

    It is False without a comparison where that would not pay, or where a derivative is to come.
    """
    if not worth_comparing(tensor) or torch.is_grad_enabled():
        return lambda: False
    world, mine = route.world, torch.frombuffer(bytearray(_digest(tensor)), dtype=torch.uint8)
    label = Label("comparing gradients", route.label.place)
    if len(route.ranks) > FEW or world.tape is not None:
        # The most and the least of every byte, as one maximum.
        most, least = world.maximum(torch.cat([mine, 255 - mine]), route.ranks, label).chunk(2)
        return lambda: bool((most + least == 255).all())
    exchange = world.begin_telling(mine, route.ranks, label)

    def verdict() -> bool:
        others = exchange.wait()
        count_in_checkpoint()
        return not world.capabilities.moves_data or all(torch.equal(other, mine) for other in others)

    return verdict


class SumToPlain(MovementFunction):
    """Sum over the ranks of a route, whose result is plain: most programs give it the same gradient on every rank.

    Then nothing but the comparison travels in backward.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, route: Route):  # type: ignore[no-untyped-def]
        ctx.route = route
        return Sum.forward(ctx, partial, route, (1.0, 1.0 / len(route.ranks)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        recompute_first(ctx)
        if all_the_same(gradient, ctx.route):
            return gradient, None
        return Sum.apply(gradient, ctx.route, (ctx.scales[1], ctx.scales[0])), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return Sum.apply(tangent, ctx.route, ctx.scales)


def _digest(tensor: Tensor) -> bytes:
    """Two checksums, ten times faster than a cryptographic hash: what differs here differs by chance, not by intent."""
    if tensor.is_meta:  # a dry run takes the ranks to agree
        return bytes(8)
    memory = memory_of(tensor.detach().contiguous())
    return struct.pack("II", zlib.crc32(memory), zlib.adler32(memory))
