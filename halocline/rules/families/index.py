"""Parts of a tensor by position: slices, single indices, flips and rolls, and differences made of them.

A slice is a window with a stride: the result is cut where its elements lie, and nothing moves. A single index goes from
its owner to all ranks. Positions held in tensors go to ``lookup.py``, masks to ``masks.py``. On one rank all these are
views; where data had to move, the result is a copy that is written back (``tensor/copy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...geometry import Window
from ...geometry.access import Only, Reversed, Wrapped
from ...tensor import ShardedTensor
from ..recipe import WHOLE, Link, Operand, Recipe, Work
from ..table import composite, refuse, run_rule
from .lookup import looked_up
from .masks import taken as taken_by
from .subscript import Basic, is_basic, is_mask, items_of, located
from .view import as_called, each, flat_ints, made_of, normal, on_tile, shape, viewing, whole_on_every_rank


@composite(Tensor.__getitem__, family="index")
def getitem(self: Tensor, index: Any) -> Tensor:
    """First what stands at known places, as a view; then tensors of positions, which may look anywhere."""
    if is_basic(index):
        return run_rule(Tensor.__getitem__, _basic_rule, (self, index), {})
    given = items_of(index, self.ndim)
    if any(is_mask(item) and isinstance(item, ShardedTensor) for item in given):
        return _masked(self, given)
    items = located(given, self.shape)
    basic = tuple(slice(None) if isinstance(item, Tensor) else item for item in items)
    if not any(isinstance(item, Tensor) for item in items):
        return self[basic]
    part = self if all(item == slice(None) for item in basic) else self[basic]
    indices = tuple(item if isinstance(item, Tensor) else None for item in items if not isinstance(item, int))
    return looked_up(part, indices)


def _masked(self: Tensor, items: list[Any]) -> Tensor:
    """One cut mask among slices and integers. Beside positions it is gathered."""
    if sum(isinstance(item, Tensor) for item in items) > 1:
        return self[tuple(whole_on_every_rank(item) if is_mask(item) else item for item in items)]
    (place,) = (place for place, item in enumerate(items) if isinstance(item, Tensor))
    mask = items[place]
    part = self[(*items[:place], *[slice(None)] * mask.ndim, *items[place + 1 :])]
    return taken_by(part, mask, sum(not isinstance(item, int) for item in items[:place]))


def _basic_rule(input: Operand, index: Any) -> Recipe:
    items = items_of(index, input.ndim)
    shape(Tensor.__getitem__, input, tuple(items))  # torch's own error for a bad index
    return taken(input, items)


def taken(input: Operand, items: Sequence[Basic]) -> Recipe:
    """Integers, slices and new dims, in the order of the input's dims."""
    space: list[int] = []
    links: list[Link] = []
    cuts: list[tuple[int, slice] | Basic] = []
    for item in items:
        size = input.shape[len(links)] if item is not None else 1
        if item is None:
            space.append(1)
            cuts.append(None)
        # The owner's index goes to all ranks, and the dim is gone.
        elif isinstance(item, int):
            links.append(Link(None, Only(item % size)))
            cuts.append(0)
        else:
            # Python's own rules for slices: negative ends, ends past the size.
            steps = range(size)[item]
            links.append(Link(len(space), Window(stride=steps.step, padding=-steps.start)))
            cuts.append((len(links) - 1, slice(steps.start, steps.stop, steps.step)))
            space.append(len(steps))

    def local(work: Work, tile: Tensor) -> Tensor:
        """Where a dim was cut, what was fetched begins and ends with the slice; where not, the slice is still to do."""
        return tile[tuple(_here(work, cut) if isinstance(cut, tuple) else cut for cut in cuts)]

    def _here(work: Work, cut: tuple[int, slice]) -> slice:
        dim, steps = cut
        return steps if work.native(input, dim) else slice(None, None, steps.step)

    return viewing(input, space, links, on_tile(local), index=tuple(items))


def _at(input: Operand, dim: int, item: Basic) -> list[Basic]:
    """An index of one dim, and all of the others."""
    items: list[Basic] = [slice(None)] * input.ndim
    items[normal(dim, input.ndim)] = item
    return items


@each("narrow")
def narrow(function: Any, input: Operand, dim: int, start: Any, length: int) -> Recipe:
    """A slice, which stays on its owners."""
    _no_tensor(function, start)
    shape(function, input, dim, start, length)
    first = start % input.shape[dim] if start < 0 else start
    return taken(input, _at(input, dim, slice(first, first + length)))


@each("select")
def select(function: Any, input: Operand, dim: int, index: Any) -> Recipe:
    """One index of a dim, which its owner sends to all ranks."""
    _no_tensor(function, index)
    shape(function, input, dim, index)
    return taken(input, _at(input, dim, int(index)))


def _no_tensor(function: Any, value: Any) -> None:
    if isinstance(value, (Tensor, Operand)):
        raise refuse(function, "a position held in a tensor is not known when the move is planned", "give an integer")


@each("flip")
def flip(function: Any, input: Operand, *given: Any, dims: Any = None) -> Recipe:
    """Each rank gets the tile that lies opposite."""
    turned = {normal(dim, input.ndim) for dim in flat_ints(given if dims is None else (dims,))}
    shape(torch.flip, input, tuple(turned))
    links = [Link(d, Reversed(size)) if d in turned else Link(d) for d, size in enumerate(input.shape)]
    local = on_tile(lambda work, tile: tile.flip(tuple(turned)))
    return viewing(input, input.shape, links, local, view=False, fresh=True)


@made_of("fliplr")
def fliplr(input: Tensor) -> Tensor:
    """A flip of the second dim."""
    return input.flip(1)


@made_of("flipud")
def flipud(input: Tensor) -> Tensor:
    """A flip of the first dim."""
    return input.flip(0)


@made_of("rot90")
def rot90(input: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    """Flips and a transposition, by the number of turns."""
    first, second = dims
    turned = input.flip(second) if k % 4 == 1 else input.flip(first) if k % 4 == 3 else input
    return input.flip(first, second) if k % 4 == 2 else turned.transpose(first, second) if k % 2 else turned.clone()


@each("roll")
def roll(function: Any, input: Operand, shifts: Any, dims: Any = ()) -> Recipe:
    """Along a cut dim the rolled order is how the rows are laid side by side; along others it is still to do."""
    shape(function, input, shifts, dims)
    given = flat_ints((dims,)) if dims is not None else ()
    if not given:  # in the order of all elements
        return viewing(input, input.shape, [WHOLE] * input.ndim, as_called(function), view=False, fresh=True)
    # A dim may be named twice: its shifts add up.
    moves = dict.fromkeys((normal(dim, input.ndim) for dim in given), 0)
    for dim, shift in zip(given, flat_ints((shifts,)), strict=True):
        moves[normal(dim, input.ndim)] += shift
    links = [Link(d, Wrapped(size, moves[d])) if d in moves else Link(d) for d, size in enumerate(input.shape)]

    def local(work: Work, tile: Tensor) -> Tensor:
        left = [dim for dim in moves if work.native(input, dim)]
        return tile.roll([moves[dim] for dim in left], left) if left else tile

    return viewing(input, input.shape, links, on_tile(local), view=False, fresh=True)


@made_of("diff")
def diff(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of slices: one row of a neighbour."""
    parts = [part for part in (prepend, input, append) if part is not None]
    values = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(min(n, values.shape[dim])):
        length = values.shape[dim] - 1
        above, below = values.narrow(dim, 1, length), values.narrow(dim, 0, length)
        values = above ^ below if values.dtype == torch.bool else above - below
    return values


@made_of("gradient")
def gradient(input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> tuple[Tensor, ...]:
    """Differences of both neighbours; at the ends, of the next one or two."""
    dims = [*range(input.ndim)] if dim is None else [normal(d, input.ndim) for d in flat_ints((dim,))]
    steps = [*spacing] if isinstance(spacing, (tuple, list)) else [spacing] * len(dims)
    if any(isinstance(step, Tensor) and step.ndim for step in steps):
        raise refuse("gradient", "coordinates given as tensors make spacings that differ", "give numbers")
    return tuple(_slope(input, d, step, edge_order) for d, step in zip(dims, steps, strict=True))


def _slope(input: Tensor, dim: int, step: Any, edge_order: int) -> Tensor:
    """Central differences along one dim, with one-sided differences of the given order at both ends."""
    length = input.shape[dim]
    # torch's own conditions, nearly in its words.
    if edge_order not in (1, 2) or length < edge_order + 1:
        raise RuntimeError("torch.gradient: each dim needs edge_order + 1 elements, and edge_order is 1 or 2")
    take = lambda start, count=1: input.narrow(dim, start, count)  # noqa: E731
    inner = (take(2, length - 2) - take(0, length - 2)) / (2 * step)
    if edge_order == 1:
        ends = [(take(1) - take(0)) / step, (take(length - 1) - take(length - 2)) / step]
    else:
        ends = [
            (-1.5 * take(0) + 2 * take(1) - 0.5 * take(2)) / step,
            (1.5 * take(length - 1) - 2 * take(length - 2) + 0.5 * take(length - 3)) / step,
        ]
    return torch.cat([ends[0], inner, ends[1]], dim)


def _slabs(y: Tensor, x: Tensor | None, dx: float, dim: int) -> Tensor:
    """The area between each two neighbours."""
    length = y.shape[dim] - 1
    middle = (y.narrow(dim, 1, length) + y.narrow(dim, 0, length)) / 2
    if x is None:
        return middle * dx
    widths = x.diff() if x.ndim == 1 else x.diff(dim=dim)
    shape = [-1 if d == normal(dim, y.ndim) else 1 for d in range(y.ndim)]
    return middle * (widths.reshape(shape) if x.ndim == 1 else widths)


@composite(torch.trapezoid, torch.trapz)
def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """The areas between neighbours, summed over the ranks."""
    return _slabs(y, x, dx, dim).sum(dim)


@composite(torch.cumulative_trapezoid)
def cumulative_trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """The running sum of the areas between neighbours."""
    return _slabs(y, x, dx, dim).cumsum(dim)
