"""Runs a trace segment by segment, each tile by tile: forward, and backward by recomputation.

Between segments whole values are kept. Inside one, a tile computes exactly what its part of the results needs, halos
included; results of the tiles do not overlap, so their gradients add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ...geometry import Box, Partition, slices
from ...kernels.layout import memory_format_of
from .boxes import Part, Parts, Share, compute, shares_of
from .norms import Norm, input_of
from .operations import Trace


@dataclass(frozen=True)
class TiledSegment:
    """Operations ``first`` to ``last`` (excluded), computed in so many tiles along each spatial dim."""

    first: int
    last: int
    tiles: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many tiles."""
        total = 1
        for count in self.tiles:
            total *= count
        return total


@dataclass
class Boundary:
    """What a segment takes from outside, and what others take from it."""

    inputs: list[int]
    outputs: list[int]


def boundaries(trace: Trace, segments: Sequence[TiledSegment]) -> list[Boundary]:
    """Which values cross the borders of each segment."""
    made_in = {
        value: number
        for number, segment in enumerate(segments)
        for operation in trace.operations[segment.first : segment.last]
        for value in operation.results
    }
    found = [Boundary([], []) for _ in segments]
    for number, segment in enumerate(segments):
        for operation in trace.operations[segment.first : segment.last]:
            for value in operation.operands:
                home = made_in.get(value)
                if home != number and value not in found[number].inputs:
                    found[number].inputs.append(value)
                if home is not None and home != number and value not in found[home].outputs:
                    found[home].outputs.append(value)
    for value in trace.outputs:
        home = made_in.get(value)
        if home is not None and value not in found[home].outputs:
            found[home].outputs.append(value)
    return found


def tile_boxes(trace: Trace, values: Sequence[int], tiles: tuple[int, ...]) -> Iterator[dict[int, Box]]:
    """For each tile, its box of each of these values, if it has one. Together the boxes cover each value once."""
    for place in product(*(range(count) for count in tiles)):
        boxes = {value: _tile_box(trace, value, tiles, place) for value in values}
        yield {value: box for value, box in boxes.items() if box is not None}


def _tile_box(trace: Trace, value: int, tiles: tuple[int, ...], place: tuple[int, ...]) -> Box | None:
    """Tiled dims are cut evenly, the last dim by the last count. What has fewer of them belongs to the first tiles."""
    known = trace.values[value]
    dims = known.tiled[-len(tiles) :] if tiles else ()
    extra = len(tiles) - len(dims)
    if any(place[:extra]):
        return None
    box = list(known.box)
    for dim, count, index in zip(dims, tiles[extra:], place[extra:], strict=True):
        box[dim] = Partition.even(known.shape[dim], count).piece(index)
    return None if any(interval.empty for interval in box) else tuple(box)


class Streamed:
    """One forward of a traced model in segments, and its backward."""

    def __init__(self, trace: Trace, segments: Sequence[TiledSegment]) -> None:
        self.trace, self.segments = trace, segments
        self.borders = boundaries(trace, segments)
        self.kept: dict[int, Tensor] = {}
        self.norms: dict[int, Norm] = {}
        self.outside = {n: v.outside.detach() for n, v in enumerate(trace.values) if v.outside is not None}
        self._sums: set[int] = set()  # values whose gradient is a tensor of our own

    # ---- forward ----

    def forward(self, *, for_backward: bool) -> list[Tensor]:
        """The outputs of the model. With ``for_backward`` every value that backward starts from is kept."""
        with torch.no_grad():
            for number, segment in enumerate(self.segments):
                self._statistics(segment)
                for tile in self._tiles(number):
                    parts = self._run(number, *tile.shares)
                    for value, box in tile.wanted.items():
                        self._keep(value, box, parts[value].read(box))
                    del parts
                if not for_backward:
                    self._forget_used(number)
        return [self._read(value, self.trace.values[value].box) for value in self.trace.outputs]

    def _statistics(self, segment: TiledSegment) -> None:
        """The statistics of the segment's norms, from their kept inputs, tile by tile."""
        for index in range(segment.first, segment.last):
            operation = self.trace.operations[index]
            if operation.recipe is not None and operation.reduces:
                tiles = self._parts_of(input_of(operation, operation.recipe), segment.tiles)
                self.norms[index] = Norm(self.trace, operation, operation.recipe, tiles, self.outside)

    def _parts_of(self, value: int, tiles: tuple[int, ...]) -> Iterator[Part]:
        """A kept value in tiles."""
        boxes = (boxes[value] for boxes in tile_boxes(self.trace, [value], tiles) if value in boxes)
        return (Part(self._read(value, box), box) for box in boxes)

    def _tiles(self, number: int) -> Iterator[_Tile]:
        """The tiles of a segment that have something to compute."""
        segment, border = self.segments[number], self.borders[number]
        operations = self.trace.operations[segment.first : segment.last]
        for wanted in tile_boxes(self.trace, border.outputs, segment.tiles):
            if wanted:
                yield _Tile(wanted, shares_of(self.trace, operations, wanted))

    def _run(self, number: int, shares: list[Share], boxes: dict[int, Box], leaves: Parts | None = None) -> Parts:
        """Compute a tile. Parts that nothing needs any more are let go of, unless autograd holds them."""
        parts: Parts = dict(leaves or {})
        last_use = {value: at for at, share in enumerate(shares) for value, _ in share.reads}
        outputs = set(self.borders[number].outputs)
        first = self.segments[number].first
        order = {id(op): first + i for i, op in enumerate(self.trace.operations[first : self.segments[number].last])}
        for at, share in enumerate(shares):
            for value in share.operation.operands:
                if value not in parts:
                    box = boxes.get(value, self.trace.values[value].box)
                    parts[value] = Part(self._read(value, box), box)
            compute(self.trace, share, parts, lambda operation, local: self.norms[order[id(operation)]].apply(local))
            for value in share.operation.operands:
                if last_use.get(value, at) == at and value not in outputs and value in parts:
                    del parts[value]
        return parts

    # ---- what is kept between segments ----

    def _keep(self, value: int, box: Box, data: Tensor) -> None:
        """Put a tile's part of a border value into the whole, which is allocated with the first part."""
        known = self.trace.values[value]
        if box == known.box:
            self.kept[value] = data
            return
        if value not in self.kept:
            form = memory_format_of(data)
            self.kept[value] = torch.empty(known.shape, dtype=data.dtype, device=data.device, memory_format=form)
        self.kept[value][slices(box)] = data

    def _read(self, value: int, box: Box) -> Tensor:
        """A box of a value from outside the program, or of one that an earlier segment has kept."""
        data = self.outside.get(value)
        data = self.kept[value] if data is None else data
        return data if box == self.trace.values[value].box else data[slices(box)]

    def _forget_used(self, number: int) -> None:
        """Let go of values that no later segment reads."""
        later = {value for border in self.borders[number + 1 :] for value in border.inputs} | set(self.trace.outputs)
        for value in [value for value in self.kept if value not in later]:
            del self.kept[value]

    # ---- backward ----

    def backward(self, gradients: Sequence[Tensor | None], wanted: Sequence[int]) -> list[Tensor | None]:
        """The gradients of the ``wanted`` values, from those of the outputs."""
        found: dict[int, Tensor] = {}
        for value, gradient in zip(self.trace.outputs, gradients, strict=True):
            if gradient is not None and self.trace.values[value].requires_grad:
                found[value] = found[value] + gradient if value in found else gradient
        for number in reversed(range(len(self.segments))):
            self._segment_backward(number, found)
            for value in self.borders[number].outputs:
                found.pop(value, None)
                self.kept.pop(value, None)
        return [found.get(value) for value in wanted]

    def _segment_backward(self, number: int, found: dict[int, Tensor]) -> None:
        """Recompute each tile under autograd, and add the gradients of what it read."""
        values = self.trace.values
        if not any(value in found for value in self.borders[number].outputs):
            return
        for tile in self._tiles(number):
            shares, boxes = tile.shares
            leaves = {
                value: Part(self._read(value, box).detach().requires_grad_(), box)
                for value, box in ((v, boxes.get(v, values[v].box)) for v in self.borders[number].inputs)
                if values[value].requires_grad and any(value in share.operation.operands for share in shares)
            }
            with torch.enable_grad():
                parts = self._run(number, shares, boxes, leaves)
                ends = [
                    (parts[value].read(box), found[value][slices(box)])
                    for value, box in tile.wanted.items()
                    if value in found and parts[value].data.requires_grad
                ]
            if not ends or not leaves:
                continue
            made = torch.autograd.grad(
                [end for end, _ in ends],
                [leaf.data for leaf in leaves.values()],
                [gradient.to(end.dtype) for end, gradient in ends],
                allow_unused=True,
            )
            del parts, ends
            for (value, leaf), gradient in zip(leaves.items(), made, strict=True):
                if gradient is not None:
                    self._add(found, value, leaf.box, gradient)
        self._norm_corrections(number, found)

    def _norm_corrections(self, number: int, found: dict[int, Tensor]) -> None:
        """What statistics add to the gradient of each norm's input, now that all tiles are summed."""
        segment = self.segments[number]
        for index in range(segment.first, segment.last):
            norm = self.norms.get(index)
            if norm is not None and norm.slopes is not None and self.trace.values[norm.input].requires_grad:
                for tile in self._parts_of(norm.input, segment.tiles):
                    self._add(found, norm.input, tile.box, norm.correction(tile, norm.slopes))

    def _add(self, found: dict[int, Tensor], value: int, box: Box, gradient: Tensor) -> None:
        """Add to the gradient of a value. What autograd returns may share memory with other gradients, so that only
        sums of our own are added to in place.
        """
        whole = box == self.trace.values[value].box
        if value not in self._sums:
            if whole:
                found[value] = found[value] + gradient if value in found else gradient
                return
            shape = self.trace.values[value].shape
            found[value] = found[value].clone() if value in found else gradient.new_zeros(shape)
            self._sums.add(value)
        found[value][slices(box)] += gradient


@dataclass
class _Tile:
    """The boxes of a segment's outputs that one tile computes, and the work for them."""

    wanted: dict[int, Box]
    shares: tuple[list[Share], dict[int, Box]]
