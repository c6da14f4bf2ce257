"""A rank whose share of the work is empty computes one element of made-up operands and throws it away.

So it saves the same tensors, asks for the same derivatives and reaches the same movements as every other rank:
a checkpoint recomputes on all ranks alike, a second derivative communicates on all of them, and the dtype of the
result is what autocast makes it everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry import Box, Interval, whole
from ..tensor import Sharding
from ..world import OwnFunction
from .recipe import Output, Read, Recipe, Slot, Work


class Hollow(OwnFunction):
    """A constant tensor that hangs on ``source`` in the graph: gradients through it are zero, to every order."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shape: tuple[int, ...] | None, value: float):  # type: ignore[no-untyped-def]
        """``value`` everywhere, of the given shape; without a shape, the source itself without its history."""
        ctx.shape = tuple(source.shape)
        ctx.set_materialize_grads(False)  # where others have no gradient at all, so has this rank
        return source.detach() if shape is None else source.new_full(shape, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None):  # type: ignore[no-untyped-def]
        """Zeros that hang on the gradient, or None where no gradient came."""
        return None if gradient is None else Hollow.apply(gradient, ctx.shape, 0.0), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        """Zeros: a constant has no tangent."""
        return Hollow.apply(tangent, tuple(tangent.shape), 0.0)


class IdleWork(NamedTuple):
    """One element's share of the work, and the shape of each operand that it needs (None: as it is)."""

    work: Work
    shapes: tuple[tuple[int, ...] | None, ...]

    def operands(self, brought: list[Tensor]) -> list[Tensor]:
        """Made-up operands that hang on the real ones in the graph."""
        return [self._made_up(tensor, shape) for tensor, shape in zip(brought, self.shapes, strict=True)]

    def _made_up(self, tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
        """One operand of the needed shape: ones, that hang on the real operand in the graph."""
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            return tensor if shape is None else tensor.new_zeros(shape)
        made: Tensor = Hollow.apply(tensor, shape, 1.0)
        return made


def idle_work(recipe: Recipe, work: Work, brought_shapes: list[tuple[int, ...]]) -> IdleWork | None:
    """None where the space itself is empty, and no rank computes anything, or where no operand can be made up."""
    # Made-up positions might point outside the sample.
    if 0 in recipe.space or recipe.positions:
        return None
    box = tuple(_one(i, size) if i.empty else i for i, size in zip(work.box, recipe.space, strict=True))
    slots, shapes = list(work.slots), list[tuple[int, ...] | None]([None] * len(brought_shapes))
    for read in recipe.reads:
        index = read.operand.index
        slots[index], shapes[index] = _needed(read, box, work, brought_shapes[index])
    return IdleWork(Work(box, tuple(slots)), tuple(shapes))


def _one(interval: Interval, size: int) -> Interval:
    first = min(interval.lo, size - 1)
    return Interval(first, first + 1)


def _needed(
    read: Read, box: Box, work: Work, brought: tuple[int, ...]
) -> tuple[tuple[Slot, ...], tuple[int, ...] | None]:
    """How an operand's slots and shape would be if the work had one element in each empty dim."""
    slots, shape = [], []
    for dim, (link, slot) in enumerate(zip(read.links, work.slots[read.operand.index], strict=True)):
        # This dim arrives as it does on any other rank.
        if link.dim is None or slot.native or not work.box[link.dim].empty:
            slots.append(slot)
            shape.append(brought[dim])
            continue
        needs = link.access.need(box[link.dim])
        if link.fill is None:
            needs = tuple(need.intersect(whole(read.operand.shape[dim])) for need in needs)
        slots.append(Slot(needs, False))
        shape.append(sum(need.size for need in needs))
    return tuple(slots), None if tuple(shape) == brought else tuple(shape)


def thrown_away(result: Tensor, output: Output, sharding: Sharding) -> Tensor:
    """What is left of a made-up result: nothing, or zeros where ranks add up their parts."""
    if output.constant or not (result.dtype.is_floating_point or result.dtype.is_complex):
        return result.new_zeros(sharding.tile_shape)
    return emptied(result, sharding.tile_shape)


def emptied(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros that hang on ``result`` and are no view of it: torch loses the graph of an empty view written in place."""
    made: Tensor = Hollow.apply(result, shape, 0.0)
    return made


def nothing(output: Output, sharding: Sharding, operands: list[Tensor]) -> Tensor:
    """An empty result of an empty space that still hangs on its operands."""
    dtype = output.dtype or operands[0].dtype
    result = torch.zeros(sharding.tile_shape, dtype=dtype, device=operands[0].device)
    for operand in operands if not output.constant else ():
        if operand.requires_grad:
            result = result + operand.sum().to(dtype) * 0
    return result
