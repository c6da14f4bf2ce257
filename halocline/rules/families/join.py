"""Joining and splitting: cat, stack, repeat; split, chunk and unbind, made of slices.

Along a dim that is not cut, a join is local. Along a cut one the result is cut evenly, since the tiles of the operands
do not lie side by side in it, and each rank fetches its part of every operand. Splits are slices, which stay on their
owners.

    torch.cat([a, b], 1)   # channels are not cut: each rank joins its own tiles
    torch.cat([a, b], 2)   # depth is cut over 2 ranks: rank 0 gets the first half of [a, b], mostly from a
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...geometry import Concatenated
from ...geometry.access import Wrapped
from ..recipe import WHOLE, Link, Operand, Read, Recipe, Work
from ..table import refuse
from .view import as_called, each, made_of, made_of_each, normal, on_tile, operands, shape, viewing

Operands = Sequence[Operand]


@each("cat concat concatenate")
def cat(function: Any, tensors: Operands, dim: int = 0) -> Recipe:
    """Each operand is a part of the joined dim. Where one is cut there, so is the result, evenly."""
    space = shape(torch.cat, tensors, dim)
    place, offset, reads = normal(dim, len(space)), 0, []
    for tensor in tensors:
        # An old habit of torch that models still rely on.
        if tensor.shape == (0,) and len(space) > 1:  # torch passes over these, whatever the others' dims
            reads.append(Read(tensor, (WHOLE,)))
            continue
        links = [Link(d, Concatenated(offset)) if d == place else Link(d) for d in range(len(space))]
        reads.append(Read(tensor, tuple(links)))
        offset += tensor.shape[place]
    local = as_called(function if len(space) > 1 else _cat_rows)
    return Recipe(space=space, reads=tuple(reads), local=local, runs_empty=True)


def _cat_rows(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """torch's cat passes over empty 1D tensors, and its backward forgets them: ranks' graphs would differ."""
    return torch.cat([tensor.unsqueeze(1) for tensor in tensors]).squeeze(1)


@each("stack")
def stack(function: Any, tensors: Operands, dim: int = 0) -> Recipe:
    """A new dim, never cut, and a join along it."""
    space = shape(torch.stack, tensors, dim)
    place = normal(dim, len(space))
    links = tuple(Link(d) for d in range(len(space)) if d != place)
    reads = tuple(Read(tensor, links) for tensor in tensors)
    return Recipe(space=space, reads=reads, local=as_called(function), runs_empty=True)


@made_of("hstack")
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """A join along the second dim."""
    parts = [torch.atleast_1d(tensor) for tensor in tensors]
    return torch.cat(parts, 0 if parts[0].ndim == 1 else 1)


@made_of("vstack row_stack")
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """A join along the first dim."""
    return torch.cat([torch.atleast_2d(tensor) for tensor in tensors], 0)


@made_of("dstack")
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """A join along the third dim."""
    return torch.cat([torch.atleast_3d(tensor) for tensor in tensors], 2)


@made_of("column_stack")
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """A join of columns."""
    return torch.cat([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1)


@made_of("meshgrid")
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Each line stretched over the grid; a cut line cuts the grid along its own dim."""
    given = list(operands(tensors, Tensor))
    # The first two lines exchange their places in the grid.
    if indexing == "xy" and len(given) > 1:
        second, first, *rest = meshgrid(given[1], given[0], *given[2:])
        return first, second, *rest
    sizes = [tensor.numel() for tensor in given]
    lines = [t.reshape([n if d == i else 1 for d, n in enumerate(sizes)]) for i, t in enumerate(given)]
    return tuple(line.expand(sizes) for line in lines)


@each("repeat tile")
def repeat(function: Any, *args: Any, **kwargs: Any) -> Recipe:
    """Along a cut dim the rounds are laid side by side as they are fetched; along others they are still to do."""
    (input,) = operands((args, kwargs))
    space = shape(function, *args, **kwargs)
    new = len(space) - input.ndim
    old = (*(1,) * new, *input.shape)
    # How often each dim is repeated follows from both shapes.
    counts = [made // size if size else 1 for made, size in zip(space, old, strict=True)]
    links = [
        Link(new + d) if counts[new + d] == 1 else Link(new + d, Wrapped(size)) for d, size in enumerate(input.shape)
    ]

    def local(work: Work, tile: Tensor) -> Tensor:
        done = [d >= new and not work.native(input, d - new) for d in range(len(space))]
        return tile.repeat([1 if ready else count for ready, count in zip(done, counts, strict=True)])

    return viewing(input, space, links, on_tile(local), view=False, fresh=True)


def _pieces(input: Tensor, dim: int, function: Any, *args: Any) -> tuple[Tensor, ...]:
    """As torch itself would split a dim of this size, slice by slice."""
    place, offset, pieces = normal(dim, input.ndim), 0, []
    # torch itself decides where a dim of this size is split.
    for part in function(torch.empty(input.shape[place], device="meta"), *args):
        pieces.append(input.narrow(place, offset, part.shape[0]))
        offset += part.shape[0]
    return tuple(pieces)


@made_of("split split_with_sizes")
def split(
    tensor: Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None, split_sizes: Any = None
) -> tuple[Tensor, ...]:
    """Slices of given sizes."""
    sizes = [s for s in (split_size_or_sections, split_size, split_sizes) if s is not None]
    return _pieces(tensor, dim, torch.split, *sizes)


@made_of("chunk")
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Slices, as many as asked for."""
    return _pieces(input, dim, torch.chunk, chunks)


@made_of("tensor_split")
def tensor_split(
    input: Tensor, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Tensor, ...]:
    """Slices at given positions."""
    given = [v for v in (indices_or_sections, sections, indices) if v is not None]
    if isinstance(given[0], Tensor):
        raise refuse("tensor_split", "positions held in a tensor are not known when moves are planned", "give integers")
    place = normal(dim, input.ndim)
    if isinstance(given[0], int):
        return _pieces(input, place, torch.tensor_split, given[0])
    # Positions may go down as well as up, where pieces overlap or are empty: each is a slice of its own.
    ends = [0, *given[0]], [*given[0], input.shape[place]]
    before = (slice(None),) * place
    return tuple(input[(*before, slice(lo, hi))] for lo, hi in zip(*ends, strict=True))


@made_of_each("hsplit vsplit dsplit")
def split_along(
    function: Any, input: Tensor, indices_or_sections: Any = None, *, sections: Any = None, indices: Any = None
) -> Any:
    """``tensor_split`` along the first, second or third dim; a number must divide the size of the dim."""
    place = {torch.hsplit: min(1, input.ndim - 1), torch.vsplit: 0, torch.dsplit: 2}[function]
    given = next(v for v in (indices_or_sections, sections, indices) if v is not None)
    if isinstance(given, int) and input.shape[place] % given:
        raise RuntimeError(f"{function.__name__}: dim {place} of size {input.shape[place]} does not split into {given}")
    return input.tensor_split(given, place)


@made_of("unbind")
def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Every index of a dim, by itself."""
    place = normal(dim, input.ndim)
    return tuple(input.select(place, index) for index in range(input.shape[place]))
