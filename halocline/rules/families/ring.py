"""Attention over cut tokens without gathering them: heads instead of tokens cut for the call, or a ring.

In the ring, keys and values go round from rank to rank while each computes with those it has. The softmax is exact: a
running maximum and a running sum for each query, as if all keys had been there at once. In backward they go round once
more, and their gradients with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import quick_apply
from ...geometry import Interval, Partition
from ...tensor import Cut, ShardedTensor, Sharding, here, unwrap, wrap
from ...world import Label, MovementFunction, Receive, Route, Send
from ..api import cut_like
from ..double_backward import Autocast, differentiated
from ..remedy import forced, remedy

_WORTH_A_RING = 1 << 20  # elements of keys and values from which their memory counts more than a message a rank
_NARROW = (torch.half, torch.bfloat16)


def tokens_axis(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The axis along which the tokens of all three are cut; None where they are not, or the rest is cut otherwise."""
    if not all(isinstance(x, ShardedTensor) and x.ndim >= 3 for x in (query, key, value)):
        return None
    first, *others = (x.sharding for x in (query, key, value))  # type: ignore[attr-defined]
    cut = first.cuts[-2]
    if cut is None or first.cuts[-1] is not None or others[0].cuts != others[1].cuts:
        return None
    there = others[0].cuts[-2]
    same = all(s.cuts[:-2] == first.cuts[:-2] and s.shape[:-2] == first.shape[:-2] for s in others)
    return cut.axis if same and there is not None and there.axis == cut.axis and others[0].cuts[-1] is None else None


def choose(query: Any, key: Tensor, axis: str, plain: bool) -> str:
    """Heads where each rank can have as many, else a ring for much, else a gather. ``plain``: without a mask."""
    ranks, heads = query.sharding.mesh.sizes[axis], query.shape[-3]
    can = {"gather": True, "ring": plain, "shuffle": plain and query.sharding.cuts[-3] is None and heads >= ranks}
    asked = forced()
    if asked is not None and can[asked]:
        return asked
    if can["shuffle"] and heads % ranks == 0:
        return "shuffle"
    return "ring" if can["ring"] and 2 * key.numel() >= _WORTH_A_RING else "gather"


def heads_first(tensor: ShardedTensor, axis: str) -> Tensor:
    """The same with its heads cut instead of its tokens: an all-to-all."""
    old = tensor.sharding
    cuts = list(old.cuts)
    cuts[-3], cuts[-2] = Cut(axis, Partition.even(old.shape[-3], old.mesh.sizes[axis])), None
    return cut_like(tensor, Sharding(old.mesh, old.shape, cuts))


def count(query: ShardedTensor, kind: str) -> None:
    """Shown by ``halocline check``, as gathers are."""
    query.sharding.mesh.world.redistributed(kind, Label("scaled_dot_product_attention", here()))


@dataclass(frozen=True)
class Ring:
    """Who sits where: this rank gets from the next and hands on to the one before."""

    route: Route
    place: int
    partition: Partition  # of the keys
    rows: Interval  # this rank's queries, in the whole
    causal: bool
    scale: float
    shardings: tuple[Sharding, Sharding, Sharding]

    @property
    def ranks(self) -> int:
        return len(self.route.ranks)

    def block(self, step: int) -> Interval:
        """The keys that this rank holds after so many steps."""
        return self.partition.piece((self.place + step) % self.ranks)

    def shift(self, tensors: list[Tensor], step: int) -> Any:
        """Begin to hand these on; ``step`` says whose keys they are. What comes are the next rank's."""
        elements = self.block(step + 1).size * sum(map(_row, tensors))
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        before, after = (self.place - 1) % self.ranks, (self.place + 1) % self.ranks
        world, ranks = self.route.world, self.route.ranks
        receives = [Receive(ranks[after], elements)]
        return world.begin([Send(ranks[before], flat)], receives, flat, ranks, self.route.label)

    def unpack(self, exchange: Any, like: list[Tensor], step: int) -> list[Tensor]:
        """What came: tensors as ``like``, with the keys of ``step``."""
        (flat,) = exchange.wait()
        size, found, at = self.block(step).size, [], 0
        for tensor in like:
            shape = (*tensor.shape[:-2], size, tensor.shape[-1])
            elements = size * _row(tensor)
            found.append(flat[at : at + elements].view(shape))
            at += elements
        return found

    def rounds(self, keys: Tensor, values: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every block of keys and values in turn; the next is under way while one is used."""
        for step in range(self.ranks):
            last = step == self.ranks - 1
            exchange = None if last else self.shift([keys, values], step)
            yield step, keys, values
            if exchange is not None:
                keys, values = self.unpack(exchange, [keys, values], step + 1)

    def scores(self, query: Tensor, keys: Tensor, step: int) -> Tensor:
        scores = (query @ keys.transpose(-2, -1)) * self.scale
        if self.causal:
            columns = self.block(step)
            rows = torch.arange(self.rows.lo, self.rows.hi, device=query.device).unsqueeze(1)
            hidden = torch.arange(columns.lo, columns.hi, device=query.device) > rows
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores


def _row(tensor: Tensor) -> int:
    """Elements of one token, over batch and heads."""
    return prod(tensor.shape[:-2]) * tensor.shape[-1]


class RingAttention(MovementFunction):
    """Saves its tiles, its result and one number a query. A backward that is itself differentiated gathers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring):  # type: ignore[no-untyped-def]
        wide = torch.float32 if query.dtype in _NARROW else query.dtype
        q = query.to(wide)
        shape = (*query.shape[:-1], 1)
        highest, total = q.new_full(shape, float("-inf")), q.new_zeros(shape)
        mixed = q.new_zeros((*query.shape[:-1], value.shape[-1]))
        for step, keys, values in ring.rounds(key, value):
            if not keys.shape[-2]:
                continue
            scores = ring.scores(q, keys.to(wide), step)
            now = torch.maximum(highest, scores.amax(-1, keepdim=True))
            safe = now.masked_fill(now == float("-inf"), 0.0)
            weights, before = (scores - safe).exp(), (highest - safe).exp()
            total = total * before + weights.sum(-1, keepdim=True)
            mixed = mixed * before + weights @ values.to(wide)
            highest = now
        result = (mixed / total).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, highest + total.log())
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        query, key, value, result, level = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_gathered_backward(ctx.ring, (query, key, value), gradient, ctx.needs_input_grad[:3]), None
        found = _backward(ctx.ring, query, key, value, result, level, gradient)
        return *(g if flag else None for g, flag in zip(found, ctx.needs_input_grad, strict=False)), None


def _backward(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, result: Tensor, level: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of keys and values travel with them, one step behind, and come home with a last step."""
    wide = level.dtype
    q, dy = query.to(wide), gradient.to(wide)
    share = (dy * result.to(wide)).sum(-1, keepdim=True)
    of_query = torch.zeros_like(q)
    travelling: list[Tensor] = []
    for step, keys, values in ring.rounds(key, value):
        k, v = keys.to(wide), values.to(wide)
        weights = (ring.scores(q, k, step) - level).exp()
        slope = weights * (dy @ v.transpose(-2, -1) - share) * ring.scale
        of_query += slope @ k
        mine = [slope.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ dy]
        if travelling:
            mine = [a + b for a, b in zip(mine, travelling, strict=True)]
        travelling = ring.unpack(ring.shift(mine, step), mine, step + 1)
    of_key, of_value = travelling
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _gathered_backward(ring: Ring, operands: tuple[Tensor, ...], gradient: Tensor, needed: Any) -> Any:
    from .attention import attention

    def compute(*tiles: Tensor) -> Tensor:
        query, key, value = (wrap(tile, sharding) for tile, sharding in zip(tiles, ring.shardings, strict=True))
        with remedy("gather"):
            return unwrap(attention(query, key, value, is_causal=ring.causal, scale=ring.scale))

    return differentiated(compute, operands, needed, gradient, Autocast.now(gradient.device).off)


def ring_attention(query: Any, key: Any, value: Any, axis: str, causal: bool, scale: float) -> Tensor:
    shardings = (query.sharding, key.sharding, value.sharding)
    mesh, cut = query.sharding.mesh, key.sharding.cuts[-2]
    assert cut is not None
    route = Route(mesh.world, mesh.ranks_along((axis,)), Label("ring attention", here()))
    place = mesh.coordinates[axis]
    ring = Ring(route, place, cut.partition, query.sharding.owned(query.ndim - 2), causal, scale, shardings)
    count(query, "ring")
    tiles, autocast = [unwrap(x) for x in (query, key, value)], Autocast.now(query.device)
    if autocast.enabled:  # as torch's own does, and outside the Function
        tiles = [tile.to(autocast.dtype) for tile in tiles]
    y = quick_apply(RingAttention, *tiles, ring)
    cuts = query.sharding.cuts
    return wrap(y, Sharding(mesh, (*query.shape[:-1], value.shape[-1]), cuts))
