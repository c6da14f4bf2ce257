"""Parts of a tensor by position: slices stay on their owners, a single index is sent to all, a flip comes from afar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry import Window
from ..geometry.access import Only, Reversed, Wrapped
from .recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work
from .table import composite, refuse, rule
from .view import as_called, each, flat_ints, made_of, normal, on_tile, shape, viewing

Item = int | slice | None


@rule(Tensor.__getitem__)
def getitem(input: Operand, index: Any) -> Recipe:
    items = _items(index, input.ndim)
    shape(Tensor.__getitem__, input, tuple(items))  # torch's own error for a bad index
    return taken(input, items)


def _items(index: Any, ndim: int) -> list[Item]:
    """One item a dim of the input, and a None for each new dim."""
    given = list(index) if isinstance(index, tuple) else [index]
    items: list[Item] = []
    for item in given:
        if item is Ellipsis:
            named = sum(other is not None and other is not Ellipsis for other in given)
            items += [slice(None)] * (ndim - named)
        else:
            items.append(_basic(item))
    return items + [slice(None)] * (ndim - sum(item is not None for item in items))


def _basic(item: Any) -> Item:
    if isinstance(item, slice) and not any(isinstance(end, Tensor) for end in (item.start, item.stop, item.step)):
        return item
    if item is None or (hasattr(item, "__index__") and not isinstance(item, (bool, Tensor, Operand))):
        return None if item is None else int(item)
    raise refuse(
        "indexing",
        "an index that is a tensor, a list or a mask may reach any tile, and a mask's result has a size of its own",
        "use integers and slices, torch.where(mask, x, 0), x.index_select(dim, index), or index hc.gather(x)",
    )


def taken(input: Operand, items: Sequence[Item]) -> Recipe:
    """Integers, slices and new dims, in the order of the input's dims."""
    space: list[int] = []
    links: list[Link] = []
    cuts: list[tuple[int, slice] | Item] = []
    for item in items:
        size = input.shape[len(links)] if item is not None else 1
        if item is None:
            space.append(1)
            cuts.append(None)
        elif isinstance(item, int):
            links.append(Link(None, Only(item % size)))
            cuts.append(0)
        else:
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

    return viewing(input, space, links, on_tile(local))


@each("narrow")
def narrow(function: Any, input: Operand, dim: int, start: Any, length: int) -> Recipe:
    _no_tensor(function, start)
    shape(function, input, dim, start, length)
    items: list[Item] = [slice(None)] * input.ndim
    place = normal(dim, input.ndim)
    first = start % input.shape[place] if start < 0 else start
    items[place] = slice(first, first + length)
    return taken(input, items)


@each("select")
def select(function: Any, input: Operand, dim: int, index: Any) -> Recipe:
    _no_tensor(function, index)
    shape(function, input, dim, index)
    items: list[Item] = [slice(None)] * input.ndim
    items[normal(dim, input.ndim)] = int(index)
    return taken(input, items)


def _no_tensor(function: Any, value: Any) -> None:
    if isinstance(value, (Tensor, Operand)):
        raise refuse(function, "a position held in a tensor is not known when the move is planned", "give an integer")


@composite(Tensor.__setitem__, family="index")
def setitem(self: Tensor, index: Any, value: Any) -> None:
    raise refuse(
        "indexed assignment",
        "it writes into part of a tensor whose parts lie on other ranks",
        "build the result with torch.where(mask, value, x) or torch.cat of slices",
    )


@each("index_select")
def index_select(function: Any, input: Operand, dim: int, index: Operand) -> Recipe:
    """Any index may be asked for: along ``dim`` every rank reads all, of index and input."""
    place = normal(dim, input.ndim)
    space = tuple(index.numel() if d == place else size for d, size in enumerate(input.shape))
    links = [WHOLE if d == place else Link(d) for d in range(input.ndim)]
    return Recipe(
        space=space,
        reads=(Read(input, tuple(links)), Read(index, (WHOLE,) * index.ndim)),
        outputs=(Output(space, tuple(range(len(space)))),),
        local=as_called(function),
        runs_empty=True,
    )


@each("gather")
def gather_along(function: Any, input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Recipe:
    """``out[i][j] = input[index[i][j]][j]``: the input whole along ``dim``, elsewhere what the index has."""
    shape(torch.gather, input, dim, index)
    place = normal(dim, input.ndim)
    links = [WHOLE if d == place else Link(d, Window()) for d in range(input.ndim)]
    return Recipe(
        space=index.shape,
        reads=(Read(input, tuple(links)), Read(index, tuple(map(Link, range(index.ndim))))),
        outputs=(Output(index.shape, tuple(range(index.ndim))),),
        local=as_called(function),
        runs_empty=True,
    )


@each("flip")
def flip(function: Any, input: Operand, *given: Any, dims: Any = None) -> Recipe:
    turned = {normal(dim, input.ndim) for dim in flat_ints(given if dims is None else (dims,))}
    shape(torch.flip, input, tuple(turned))
    links = [Link(d, Reversed(size)) if d in turned else Link(d) for d, size in enumerate(input.shape)]
    local = on_tile(lambda work, tile: tile.flip(tuple(turned)))
    return viewing(input, input.shape, links, local, view=False)


@made_of("fliplr")
def fliplr(input: Tensor) -> Tensor:
    return input.flip(1)


@made_of("flipud")
def flipud(input: Tensor) -> Tensor:
    return input.flip(0)


@each("roll")
def roll(function: Any, input: Operand, shifts: Any, dims: Any = ()) -> Recipe:
    """Along a cut dim the rolled order is how the rows are laid side by side; along others it is still to do."""
    shape(function, input, shifts, dims)
    given = flat_ints((dims,)) if dims is not None else ()
    if not given:  # in the order of all elements
        return _whole(function, input)
    moves = dict.fromkeys((normal(dim, input.ndim) for dim in given), 0)
    for dim, shift in zip(given, flat_ints((shifts,)), strict=True):
        moves[normal(dim, input.ndim)] += shift
    links = [Link(d, Wrapped(size, moves[d])) if d in moves else Link(d) for d, size in enumerate(input.shape)]

    def local(work: Work, tile: Tensor) -> Tensor:
        left = [dim for dim in moves if work.native(input, dim)]
        return tile.roll([moves[dim] for dim in left], left) if left else tile

    return viewing(input, input.shape, links, on_tile(local), view=False)


def _whole(function: Any, input: Operand) -> Recipe:
    return viewing(input, input.shape, [WHOLE] * input.ndim, as_called(function), view=False)


@made_of("diff")
def diff(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    parts = [part for part in (prepend, input, append) if part is not None]
    values = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(min(n, values.shape[dim])):
        length = values.shape[dim] - 1
        above, below = values.narrow(dim, 1, length), values.narrow(dim, 0, length)
        values = above ^ below if values.dtype == torch.bool else above - below
    return values
