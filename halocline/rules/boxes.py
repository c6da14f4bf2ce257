"""Local work in boxes: an output computed box by box into one tensor, each box from just what it needs.

Used where an operation is not linear and its halo would have to be glued to the whole tile: the inside of the output
is computed from the tile as it lies, while the slabs travel, and the few outputs along the edge from small pieces.
Only the tile and the slabs are kept; backward computes each box again, the edge first, so that its gradient travels
while the inside's is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch_private import quick_apply
from ..geometry import Box, Interval, shape_of, slices, whole
from ..tensor import Cut, Fetch
from ..world import KnownMove, MovementFunction, Route
from .double_backward import Autocast, differentiated
from .halo_exchange import HaloExchange
from .recipe import Read, Recipe, Slot, Work


@dataclass(frozen=True)
class BoxPart:
    """One output box: where it lies in the local output, what it needs (in the needed box), and how it is computed."""

    place: tuple[slice, ...]
    need: Box
    compute: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Boxes:
    """How this rank computes its output: the inside, and the edges that need slabs."""

    inside: BoxPart
    edges: tuple[BoxPart, ...]
    neighbours: HaloExchange
    shape: tuple[int, ...]
    glued: Callable[[Tensor], Tensor]

    def inner(self, tile: Tensor) -> Tensor:
        """What the inside needs: a view of the tile."""
        own = self.neighbours.slabs.own
        within = tuple(i.shift(-o.lo) for i, o in zip(self.inside.need, own, strict=True))
        return self.neighbours.used(tile)[slices(within)]


def plan_boxes(
    recipe: Recipe, work: Work, fetch: Fetch | None, cuts: Mapping[int, Cut], bind: Any, least: int
) -> Boxes | None:
    """How this rank computes an output box by box, for an operation with one operand and one result over the same dims.

    None where nothing has to be fetched, where tiles have fewer than ``least`` elements, or where some rank has no
    output that it can compute from its own tile. All ranks reach the same decision.
    """
    if not recipe.box_local or fetch is None or not fetch.communicates or not fetch.beside:
        return None
    read = recipe.reads[0]
    if read.operand.numel() < least * fetch.mesh.count(fetch.axes) or not _roomy(read, fetch, cuts):
        return None
    neighbours, slots = HaloExchange.of(fetch), work.slots[read.operand.index]
    first = [slot.needs[0].lo for slot in slots]

    def need(box: Box) -> Box:
        """In the needed box: dims that are not cut are needed whole."""
        wanted = [slot.needs[0] if slot.native else _need(read, d, box[d]) for d, slot in enumerate(slots)]
        return tuple(interval.shift(-lo) for interval, lo in zip(wanted, first, strict=True))

    def part(box: Box) -> BoxPart:
        """One box of the output: where it goes, what it needs, and the local work bound to it."""
        wanted = need(box)
        here = [Slot((i.shift(lo),), s.native) for i, lo, s in zip(wanted, first, slots, strict=True)]
        place = slices(tuple(i.shift(-w.lo) for i, w in zip(box, work.box, strict=True)))
        return BoxPart(place, wanted, bind(Work(box, _with(work.slots, read.operand.index, tuple(here)))))

    own = [move.holds(fetch.mesh.coordinates.get(move.owner_axis or "", 0)) for move in fetch.dims]
    inner = [
        o if s.native else _inner(read, d, o, own[d]) for d, (o, s) in enumerate(zip(work.box, slots, strict=True))
    ]
    # Dims that are not cut are inside as a whole: torch pads them itself.
    inside, edges = _split(work.box, inner)
    return Boxes(part(inside), tuple(map(part, edges)), neighbours, shape_of(work.box), bind(work))


def _need(read: Read, dim: int, out: Interval) -> Interval:
    (need,) = read.links[dim].access.need(out)
    return need if read.links[dim].fill is not None else need.intersect(whole(read.operand.shape[dim]))


def _roomy(read: Read, fetch: Fetch, cuts: Mapping[int, Cut]) -> bool:
    """Has every rank some output that needs nothing of others? Each dim is asked by itself; all ranks go one way."""
    return all(
        _inner(read, dim, out, own).size
        for dim, move in enumerate(fetch.dims)
        if move.owner_axis is not None
        # Every rank looks at the pieces of all ranks, and so comes to the same answer.
        for own, out in zip(move.owned, cuts[dim].partition.pieces(), strict=True)
    )


def _inner(read: Read, dim: int, out: Interval, own: Interval) -> Interval:
    """The outputs that need nothing of others: a run, since windows go on in order."""
    inside = [i for i in range(out.lo, out.hi) if own.contains(_need(read, dim, Interval(i, i + 1)))]
    return Interval(inside[0], inside[-1] + 1) if inside else Interval(out.lo, out.lo)


def _split(box: Box, inner: Sequence[Interval]) -> tuple[Box, list[Box]]:
    """The inner box, and the slabs round it: dim after dim, each beside what is left."""
    edges: list[Box] = []
    for dim, inside in enumerate(inner):
        outer = box[dim]
        sides = Interval(outer.lo, inside.lo), Interval(inside.hi, outer.hi)
        edges += [_with(box, dim, side) for side in sides if side.size]
        box = _with(box, dim, inside)
    return box, edges


def _with(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def in_boxes(boxes: Boxes, route: Route, tile: Tensor) -> Tensor:
    """Compute the output box by box. Waits for the neighbours when the inside is done."""
    return quick_apply(InBoxes, tile, boxes, route)


class InBoxes(MovementFunction):
    """Saves the tile and the slabs. A backward that is itself differentiated glues its halo."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, boxes: Boxes, route: Route):  # type: ignore[no-untyped-def]
        """The inside while the slabs travel; then wait for them and compute the edges."""
        exchange = boxes.neighbours.begin(tile, route)
        inside = boxes.inside.compute(boxes.inner(tile))
        # The dtype is known only now: autocast may have chosen it.
        result = inside.new_empty(boxes.shape)
        result[boxes.inside.place] = inside
        pieces = boxes.neighbours.arrived(exchange, tile)
        for edge in boxes.edges:
            result[edge.place] = edge.compute(boxes.neighbours.glued(tile, pieces, edge.need))
        ctx.save_for_backward(tile, *pieces)
        ctx.boxes, ctx.route, ctx.autocast = boxes, route, Autocast.now(tile.device)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        """The gradient of the tile. Glues the halo if this backward is differentiated in turn."""
        tile, *pieces = ctx.saved_tensors
        run = _glued_backward if torch.is_grad_enabled() else _backward
        return run(ctx.boxes, ctx.route, tile, pieces, gradient, ctx.autocast), None, None


def _backward(
    boxes: Boxes, route: Route, tile: Tensor, pieces: list[Tensor], gradient: Tensor, autocast: Autocast
) -> Tensor:
    """Edges first: the gradients of their slabs travel while the inside is differentiated."""
    neighbours, mine = boxes.neighbours, torch.zeros_like(tile)
    backs = [torch.zeros_like(piece) for piece in pieces]
    for edge in boxes.edges:
        slope = _derivative(edge, neighbours.glued(tile, pieces, edge.need), gradient, autocast)
        neighbours.add_glued(slope, edge.need, mine, backs)
    # As soon as the edges are done: the neighbours wait for these.
    exchange = neighbours.send_back(backs, tile, route)
    boxes.inner(mine).add_(_derivative(boxes.inside, boxes.inner(tile), gradient, autocast))
    neighbours.add_back(mine, exchange)
    return mine


def _derivative(part: BoxPart, piece: Tensor, gradient: Tensor, autocast: Autocast) -> Tensor:
    """The gradient of what one box was computed from, by computing the box again under autograd."""
    with torch.enable_grad(), autocast.again():
        leaf = piece.detach().requires_grad_()
        (slope,) = torch.autograd.grad(part.compute(leaf), leaf, gradient[part.place])
    return slope


def _glued_backward(
    boxes: Boxes, route: Route, tile: Tensor, pieces: list[Tensor], gradient: Tensor, autocast: Autocast
) -> Tensor:
    """The same gradient as a differentiable function of the tile, from the halo glued to it."""
    arrived = boxes.neighbours.glued(tile.detach(), [piece.detach() for piece in pieces])

    def compute(tile: Tensor) -> Tensor:
        return boxes.glued(KnownMove.apply(tile, arrived, boxes.neighbours.transfer, route))

    (slope,) = differentiated(compute, [tile], [True], gradient, autocast)
    return slope
