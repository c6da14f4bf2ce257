"""Do all ranks hold the same bits? Then their mean is what each has, and nothing of its size has to travel."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from .events import Label
from .movement import MovementFunction, Route, Sum, recompute_first
from .tensor_bytes import memory_of

LEAST = 1 << 18  # bytes: a mean of fewer takes no longer than the comparison


def worth_comparing(tensor: Tensor) -> bool:
    """Is it large, and in memory of the host, where its digest is made?"""
    return tensor.nbytes >= LEAST and tensor.device.type in ("cpu", "meta")


def all_the_same(tensor: Tensor, route: Route) -> bool:
    """Compare the tensor's bits among the ranks of the route, by their digests in one small exchange.

    False without a comparison where it would not pay, or where a derivative is to come: all ranks decide alike.
    """
    world = route.world
    if not worth_comparing(tensor) or torch.is_grad_enabled():
        return False
    digest = torch.tensor(list(_digest(tensor)), dtype=torch.uint8, device="cpu")
    # The most and the least of every byte, as one maximum: all ranks come to the same verdict.
    label = Label("comparing gradients", route.label.place)
    most, least = world.maximum(torch.cat([digest, 255 - digest]), route.ranks, label).chunk(2)
    return bool((most + least == 255).all())


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
    if tensor.is_meta:  # a dry run takes the ranks to agree
        return bytes(32)
    return hashlib.sha256(memory_of(tensor.detach().contiguous())).digest()
