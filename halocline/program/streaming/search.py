"""Chooses segments and tiles: the least recomputation whose predicted peak stays within a limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import torch

from ..._torch_private import convolution_backend
from ...errors import Refused
from ...geometry import Box, shape_of
from ...sizes import size_text
from .boxes import Share, made_boxes, shares_of
from .operations import Operation, Trace
from .segments import TiledSegment, boundaries, tile_boxes

_log = logging.getLogger("halocline")
_MOST_TILES = 512
_LONGEST = 32  # operations of a segment
_SHARES = (0.5, 0.25, 0.7, 0.12)  # of the limit, that a tile may take
_PRICES = (0.0, 0.02, 0.1, 0.5, 4.0)  # multiplications that a kept byte is worth, as a share of the mean
_FORWARD, _BACKWARD = 1.0, 2.0  # work of a pass, in forwards


@dataclass(frozen=True)
class Layout:
    """Segments with their tiles, the predicted peak in bytes, and how much more is computed than without them."""

    segments: tuple[TiledSegment, ...]
    peak: int
    overhead: float


@dataclass(frozen=True)
class TileCost:
    """What one inner tile of a segment takes: bytes while it runs, and multiplications or elements computed."""

    bytes: int
    work: float


def choose_layout(trace: Trace, limit: int, training: bool) -> Layout:
    """The cheapest layout whose peak is within ``limit``; refused, with the smallest limit that works, if none is."""
    search = _Search(trace, training)
    whole_step = search.layout(tuple(TiledSegment(a, b, search.untiled) for a, b in search.units))
    candidates = [whole_step] if whole_step.peak <= limit else []
    if not candidates:
        for share, price in product(_SHARES, _PRICES):
            found = search.solve(int(limit * share), price)
            if found is not None:
                candidates.append(found)
    fitting = [layout for layout in candidates if layout.peak <= limit]
    if not fitting:
        fitting = [layout for layout in search.leanest(limit) if layout.peak <= limit]
    if not fitting:
        raise _too_small(search, limit, [*candidates, *search.leanest(limit)])
    best = min(fitting, key=lambda layout: layout.overhead)
    _log.info(
        "hc.stream: %d segments, up to %d tiles each; peak %s of %s, %.2f times the work of a plain step",
        len(best.segments),
        max(segment.count for segment in best.segments),
        size_text(best.peak),
        size_text(limit),
        best.overhead,
    )
    return best


def _too_small(search: _Search, limit: int, candidates: list[Layout]) -> Refused:
    """Names the operation that takes most, and the limit that would do."""
    least = min((layout.peak for layout in candidates), default=0)
    heaviest = max(
        search.trace.operations, key=lambda o: max((search.trace.values[v].bytes for v in o.results), default=0)
    )
    return Refused(
        heaviest.name,
        heaviest.place,
        f"no segments and tiles are found whose step takes at most {size_text(limit)}; the leanest takes "
        f"{size_text(least)}",
        f"give memory={size_text(int(least * 1.05)).replace(' ', '')!r} or more, or cut the sample over ranks",
    )


class _Search:
    """The search over one trace; costs of tiles are computed once."""

    def __init__(self, trace: Trace, training: bool) -> None:
        self.trace, self.training = trace, training
        self.dims = max((len(value.tiled) for value in trace.values), default=0)
        self.untiled = (1,) * self.dims
        self.units = list(units_of(trace))
        self.plain = sum(self.tile_cost(a, b, self.untiled).work for a, b in self.units) or 1.0
        self._outputs = cache(self._outputs_of)

    def layout(self, segments: tuple[TiledSegment, ...]) -> Layout:
        """Segments with their predicted peak and overhead."""
        passes = _FORWARD + _BACKWARD if self.training else _FORWARD
        again = _FORWARD if self.training else 0.0
        work = sum(s.count * self.tile_cost(s.first, s.last, s.tiles).work for s in segments)
        return Layout(segments, self._peak(segments), work * (passes + again) / (self.plain * passes))

    def solve(self, tile_limit: int, price: float) -> Layout | None:
        """The cheapest segments whose tiles take at most ``tile_limit`` bytes, where keeping a byte has a price."""
        a_byte = price * self.plain / max(1, sum(value.bytes for value in self.trace.values))
        segments: list[TiledSegment] = []
        for first, last in self.units:
            best: dict[int, tuple[float, list[TiledSegment]]] = {first: (0.0, [])}
            for end in range(first + 1, last + 1):
                options = []
                for start in range(max(first, end - _LONGEST), end):
                    segment = self._smallest(start, end, tile_limit) if start in best else None
                    if segment is not None:
                        kept = sum(self.trace.values[value].bytes for value in self._outputs(start, end))
                        work = segment.count * self.tile_cost(start, end, segment.tiles).work
                        options.append((best[start][0] + work + a_byte * kept, [*best[start][1], segment]))
                if options:
                    best[end] = min(options, key=lambda option: option[0])
            if last not in best:
                return None
            segments += best[last][1]
        return self.layout(tuple(segments))

    def leanest(self, limit: int) -> list[Layout]:
        """Layouts that keep little, for tiles of many sizes, whatever they cost."""
        largest = max(limit, max((value.bytes for value in self.trace.values), default=1))
        sizes = [largest >> power for power in range(16)]
        return [found for size, price in product(sizes, (0.5, 100.0)) if (found := self.solve(size, price))]

    def _smallest(self, first: int, last: int, tile_limit: int) -> TiledSegment | None:
        """The fewest tiles that stay within the limit."""
        for tiles in self._grids(first, last):
            if self.tile_cost(first, last, tiles).bytes <= tile_limit:
                return TiledSegment(first, last, tiles)
        return None

    def _grids(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        """More and more tiles, the longest side halved each time."""
        outputs = [self.trace.values[v] for v in self._outputs(first, last)]
        tiled = [value for value in outputs if len(value.tiled) == self.dims]
        yield self.untiled
        if not tiled or not self.dims:
            return
        largest = max(tiled, key=lambda value: value.bytes)
        sizes, tiles = [largest.shape[dim] for dim in largest.tiled], list(self.untiled)
        while prod(tiles) < _MOST_TILES:
            sides = [size / count for size, count in zip(sizes, tiles, strict=True)]
            longest = sides.index(max(sides))
            if sides[longest] < 2:
                return
            tiles[longest] *= 2
            yield tuple(tiles)

    def tile_cost(self, first: int, last: int, tiles: tuple[int, ...]) -> TileCost:
        """Of an inner tile, which has a halo on every side."""
        known = self.__dict__.setdefault("_costs", {})
        key = (first, last, tiles)
        if key not in known:
            known[key] = self._tile_cost(*key)
        return known[key]

    def _tile_cost(self, first: int, last: int, tiles: tuple[int, ...]) -> TileCost:
        """Bytes and work of one tile of a segment, an inner one where there is any: it reads halos on both sides."""
        operations = self.trace.operations[first:last]
        outputs = self._outputs_of(first, last)
        places = list(tile_boxes(self.trace, outputs, tiles))
        wanted = places[_inner(tiles)] or next((each for each in places if each), {})
        shares, boxes = shares_of(self.trace, operations, wanted)
        sizes = [self._bytes(share) for share in shares]
        work = sum(_work(self.trace, share) for share in shares)
        space = max((self._workspace(share) for share in shares), default=0)
        if self.training:  # autograd holds all of a tile, and gradients of two neighbours
            read = sum(_box_bytes(self.trace, v, b) for v, b in boxes.items() if self.trace.values[v].requires_grad)
            return TileCost(sum(sizes) + 2 * max(sizes, default=0) + space + read // 2, work)
        return TileCost(3 * max(sizes, default=0) + space, work)

    def _bytes(self, share: Share) -> int:
        """Results of a share, and operands that are copied to be padded or joined."""
        results = zip(share.operation.results, made_boxes(self.trace.values, share), strict=True)
        size = sum(_box_bytes(self.trace, value, box) for value, box in results)
        recipe, work = share.operation.recipe, share.work
        if recipe is not None and work is not None:
            for read, (value, box) in zip(recipe.reads, share.reads, strict=True):
                slots = work.slots[read.operand.index]
                needed = [sum(need.size for need in slot.needs) for slot in slots]
                if needed != [interval.size for interval in box]:
                    size += prod(needed) * self.trace.values[value].dtype.itemsize
        return size

    def _workspace(self, share: Share) -> int:
        """What a convolution on a CPU unfolds, where torch takes kernels that do. Those of GPUs are not known here."""
        operation, work = share.operation, share.work
        if operation.reduces:  # copies of its input, to add what the statistics contribute to its gradient
            return 3 * self._bytes(share)
        if work is None or not _is_convolution(operation) or self.trace.device.type != "cpu":
            return 0
        volume, kernel = (self.trace.values[value] for value in operation.operands[:2])
        brought = tuple(sum(need.size for need in slot.needs) for slot in work.slots[0])
        dims, patch = len(kernel.shape) - 2, prod(kernel.shape[1:]) * volume.dtype.itemsize
        if "transpose" in operation.name:
            return patch * prod(brought[-dims:])
        voxels = prod(shape_of(made_boxes(self.trace.values, share)[0])[-dims:])
        return patch * voxels if _unfolds(brought, kernel.shape, volume.dtype) else 0

    def _outputs_of(self, first: int, last: int) -> list[int]:
        """Values that operations of a range make and others, or the user, read."""
        made = [value for o in self.trace.operations[first:last] for value in o.results]
        read = {v for o in self.trace.operations[last:] for v in o.operands} | set(self.trace.outputs)
        return [value for value in made if value in read]

    def _peak(self, segments: tuple[TiledSegment, ...]) -> int:
        """The most bytes of kept values, their gradients and one tile at any time of the step."""
        borders, values = boundaries(self.trace, segments), self.trace.values
        tile = [self.tile_cost(s.first, s.last, s.tiles).bytes for s in segments]
        peak = kept = 0
        for number, border in enumerate(borders):
            kept += sum(values[v].bytes for v in border.outputs)
            peak = max(peak, kept + tile[number])
            if not self.training:
                later = {v for b in borders[number + 1 :] for v in b.inputs} | set(self.trace.outputs)
                kept = sum(values[v].bytes for b in borders[: number + 1] for v in b.outputs if v in later)
        if not self.training:
            return peak
        gradients = {v for v in self.trace.outputs if values[v].requires_grad}
        for number in reversed(range(len(segments))):
            gradients |= {v for v in borders[number].inputs if values[v].requires_grad}
            held = sum(values[v].bytes for v in gradients)
            peak = max(peak, kept + held + tile[number])
            kept -= sum(values[v].bytes for v in borders[number].outputs)
            gradients -= set(borders[number].outputs)
        return peak


def _is_convolution(operation: Operation) -> bool:
    """With a weight among its operands: such operations may take workspace."""
    return operation.name.startswith("conv") and len(operation.operands) > 1


@cache
def _unfolds(volume: tuple[int, ...], kernel: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Does torch take kernels that unfold the volume? Asked for stride 1 and no padding, which decide nothing."""
    dims = len(kernel) - 2
    ones, zeros = (1,) * dims, (0,) * dims
    large = (*volume[:-dims], *map(max, volume[-dims:], kernel[-dims:]))
    groups = large[-dims - 1] // kernel[1]
    return "Slow" in convolution_backend((large, kernel), dtype, (ones, zeros, ones, False, zeros, groups))


def _inner(tiles: tuple[int, ...]) -> int:
    """The number of a tile in the middle, in the order in which tiles are gone through."""
    place = 0
    for count in tiles:
        place = place * count + min(1, count - 1)
    return place


def _box_bytes(trace: Trace, value: int, box: Box) -> int:
    return prod(shape_of(box)) * trace.values[value].dtype.itemsize


def _work(trace: Trace, share: Share) -> float:
    """Multiplications of convolutions and products, elements of anything else."""
    operation, work = share.operation, share.work
    if work is None:
        return float(sum(prod(trace.values[v].shape) for v in operation.operands))
    if _is_convolution(operation):
        made = prod(shape_of(made_boxes(trace.values, share)[0]))
        return float(made * prod(trace.values[operation.operands[1]].shape[1:]))
    return float(prod(shape_of(work.box)))


def units_of(trace: Trace) -> Iterator[tuple[int, int]]:
    """Runs of operations that may lie in one segment: a norm's input is kept, and so is what is read whole."""
    first, made = 0, set[int]()
    for index, operation in enumerate(trace.operations):
        alone = _reads_all(trace, operation)
        input_here = operation.reduces and operation.operands[0] in made
        if index > first and (alone or input_here):
            yield first, index
            first, made = index, set()
        made |= set(operation.results)
        if alone:
            yield first, index + 1
            first, made = index + 1, set()
    if first < len(trace.operations):
        yield first, len(trace.operations)


def _reads_all(trace: Trace, operation: Operation) -> bool:
    """Does any part of the result need all of a sample-sized operand?"""
    tiled = [value for value in operation.operands if trace.values[value].tiled]
    if not tiled:
        return False
    if operation.recipe is None or not all(trace.values[value].tiled for value in operation.results):
        return True
    if operation.reduces:
        return False
    result = operation.results[0]
    sizes = trace.values[result]
    tiles = tuple(2 if sizes.shape[dim] > 1 else 1 for dim in sizes.tiled)
    wanted = next(tile_boxes(trace, [result], tiles))
    (share,), _ = shares_of(trace, [operation], wanted)
    return all(tile == 1 for tile in tiles) or any(
        box == trace.values[value].box for value, box in share.reads if value in tiled and prod(tiles) > 1
    )
