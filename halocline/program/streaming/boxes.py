"""Which boxes a tile needs, through many operations at once, and how an operation computes a box."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Box, Interval, whole
from ...random.state import State, swap
from ...rules import Recipe, Work
from ...rules.plan import bound
from ...rules.recipe import Read, Slot
from ...tree import tensors_in
from .operations import Operation, Trace, Value, fill


@dataclass
class Part:
    """A box of a value, and its data."""

    data: Tensor
    box: Box

    def read(self, box: Box) -> Tensor:
        """A box inside this one, as a view."""
        for dim, (mine, wanted) in enumerate(zip(self.box, box, strict=True)):
            if mine != wanted:
                view = self.data.narrow(dim, wanted.lo - mine.lo, wanted.size)
                return Part(view, (*self.box[:dim], wanted, *self.box[dim + 1 :])).read(box)
        return self.data


def hull(first: Box | None, second: Box) -> Box:
    """The smallest box around two."""
    if first is None:
        return second
    return tuple(
        b if a.empty else a if b.empty else Interval(min(a.lo, b.lo), max(a.hi, b.hi))
        for a, b in zip(first, second, strict=True)
    )


@dataclass
class Share:
    """The part of an operation that one tile needs: a box of its space, and how each read operand is brought."""

    operation: Operation
    work: Work | None  # None: the operation runs whole
    reads: tuple[tuple[int, Box], ...]  # value and box of each operand


def shares_of(
    trace: Trace, operations: list[Operation], wanted: Mapping[int, Box]
) -> tuple[list[Share], dict[int, Box]]:
    """What each operation computes so that ``wanted`` boxes of values are there, and the box of every value needed.

    Goes backwards through the operations; those that nothing needs are left out.
    """
    boxes: dict[int, Box] = dict(wanted)
    shares: list[Share] = []
    for operation in reversed(operations):
        asked = [boxes.get(value) for value in operation.results]
        if all(box is None for box in asked):
            continue
        share = _share(trace.values, operation, asked)
        shares.append(share)
        for value, box in zip(operation.results, made_boxes(trace.values, share), strict=True):
            boxes[value] = box
        for value, box in share.reads:
            boxes[value] = hull(boxes.get(value), box)
    return shares[::-1], boxes


def _share(values: list[Value], operation: Operation, asked: list[Box | None]) -> Share:
    """The smallest share that gives the boxes asked for."""
    recipe = operation.recipe
    if recipe is None:
        return Share(operation, None, tuple((value, values[value].box) for value in operation.operands))
    box = _space_box(recipe, asked)
    slots: list[tuple[Slot, ...]] = [()] * len(operation.operands)
    reads = []
    for read in recipe.reads:
        slots[read.operand.index] = _slots(recipe, read, box)
        clipped = (
            _clipped(slot, size) for slot, size in zip(slots[read.operand.index], read.operand.shape, strict=True)
        )
        reads.append((operation.operands[read.operand.index], tuple(clipped)))
    return Share(operation, Work(box, tuple(slots)), tuple(reads))


def _space_box(recipe: Recipe, asked: list[Box | None]) -> Box:
    """The box of the space behind boxes of the outputs.

    As in the executor, a dim is cut only where it follows one of an operand and the rule does not want it whole.
    """
    linked = {link.dim for read in recipe.reads for link in read.links} if recipe.reads else {*range(len(recipe.space))}
    box: list[Interval | None] = [None] * len(recipe.space)
    for output, wanted in zip(recipe.outputs, asked, strict=True):
        for dim, interval in zip(output.dims, wanted or (), strict=False):
            if dim in linked and dim is not None and dim not in recipe.uncut:
                known = box[dim]
                box[dim] = interval if known is None else hull((known,), (interval,))[0]
    return tuple(whole(size) if each is None else each for each, size in zip(box, recipe.space, strict=True))


def _slots(recipe: Recipe, read: Read, box: Box) -> tuple[Slot, ...]:
    """As the executor brings operands to a rank: where the work is whole along a dim, torch pads it itself."""
    slots = []
    for link, size in zip(read.links, read.operand.shape, strict=True):
        cut = link.dim is not None and box[link.dim] != whole(recipe.space[link.dim])
        if link.dim is None:
            needs = link.access.need(whole(size))
        else:
            needs = link.access.need(box[link.dim]) if cut else (whole(size),)
        if link.fill is None:
            needs = tuple(need.intersect(whole(size)) for need in needs)
        slots.append(Slot(needs, not cut))
    return tuple(slots)


def _clipped(slot: Slot, size: int) -> Interval:
    """What a slot needs of the operand itself; where that is nothing, one index: few kernels take empty tensors."""
    inside = [need.intersect(whole(size)) for need in slot.needs]
    full = [each for each in inside if not each.empty]
    if not full:
        first = max(0, min(slot.needs[0].lo, size - 1))
        return Interval(first, min(first + 1, size))
    return Interval(min(each.lo for each in full), max(each.hi for each in full))


def made_boxes(values: list[Value], share: Share) -> list[Box]:
    """The box of each result that a share makes."""
    recipe, work = share.operation.recipe, share.work
    if recipe is None or work is None:
        return [values[value].box for value in share.operation.results]
    return [
        tuple(
            whole(size) if dim is None else work.box[dim] for dim, size in zip(output.dims, output.shape, strict=True)
        )
        for output in recipe.outputs
    ]


Parts = dict[int, Part]
#: Carries out a norm: gets the operation and what its rule returned for the tile.
Normalize = Callable[[Operation, Any], Tensor]


def compute(trace: Trace, share: Share, parts: Parts, normalize: Normalize) -> None:
    """Run one share on parts that are there, and add its results to them."""
    operation = share.operation
    args, kwargs = arguments(share, parts)
    with _as_recorded(operation):
        function = operation.function if share.work is None else bound(operation.recipe, share.work)  # type: ignore[arg-type]
        result = function(*args, **kwargs)
        if operation.reduces:
            result = normalize(operation, result)
    made = tensors_in(result)
    for value, tensor, box in zip(operation.results, made, made_boxes(trace.values, share), strict=True):
        parts[value] = Part(tensor, box)


def arguments(share: Share, parts: Parts) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the recorded call, with what the share needs of each tensor."""
    operation = share.operation
    tensors = iter([_brought(share, index, value, parts) for index, value in enumerate(operation.operands)])
    args, kwargs = fill((operation.args, operation.kwargs), lambda ref: next(tensors))
    return args, kwargs


def _brought(share: Share, index: int, value: int, parts: Parts) -> Tensor:
    """One operand as the local work takes it: its needed intervals side by side, filled outside the sample."""
    recipe, work, part = share.operation.recipe, share.work, parts[value]
    if recipe is None or work is None:
        return part.data.clone() if share.operation.inplace and index == 0 else part.data
    read = next((read for read in recipe.reads if read.operand.index == index), None)
    if read is None:
        return part.data
    data, pads = part.data, []
    for dim, (slot, link) in enumerate(zip(work.slots[index], read.links, strict=True)):
        mine, size = part.box[dim], read.operand.shape[dim]
        inside = [need.intersect(whole(size)) for need in slot.needs]
        if inside != [mine]:
            pieces = [data.narrow(dim, each.lo - mine.lo, each.size) for each in inside if not each.empty]
            data = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0] if pieces else data.narrow(dim, 0, 0)
        pads.append((0, 0) if link.fill is None else _outside(slot.needs, inside))
    flat = [side for pad in reversed(pads) for side in pad]
    if any(flat):
        fill = next(link.fill for link in read.links if link.fill is not None)
        data = F.pad(data, flat, value=fill)
    return data.clone() if recipe.inplace and index == 0 else data


def _outside(needs: tuple[Interval, ...], inside: list[Interval]) -> tuple[int, int]:
    """How much of what is needed lies before the sample and behind it."""
    if all(each.empty for each in inside):
        return sum(need.size for need in needs), 0
    return inside[0].lo - needs[0].lo, needs[-1].hi - inside[-1].hi


@contextmanager
def _as_recorded(operation: Operation) -> Iterator[None]:
    """Autocast, gradient mode and random numbers as they were when the operation was recorded."""
    with ExitStack() as stack:
        if operation.autocast is not None:
            stack.enter_context(torch.autocast(operation.autocast[0], operation.autocast[1]))
        if not operation.differentiable:
            stack.enter_context(torch.no_grad())
        if operation.drawn is not None or operation.draws:
            stack.enter_context(_drawing(operation))
        yield


@contextmanager
def _drawing(operation: Operation) -> Iterator[None]:
    """The same numbers in every tile and in recomputation; torch's generator goes on as after one draw."""
    after = torch.get_rng_state()
    if operation.draws:
        again = bool(operation.moment)
        if not again:
            operation.moment.append(after)
        torch.set_rng_state(operation.moment[0])
        yield
        if again:
            torch.set_rng_state(after)
        return
    assert operation.drawn is not None
    before = swap(State(*operation.drawn, repeated=True))
    try:
        yield
    finally:
        swap(before)
        torch.set_rng_state(after)
