"""Triangles and diagonals: which elements of a matrix, by their place in the whole.

On which side of a diagonal an element lies follows from its global place. Each rank asks torch for the same triangle of
its tile, with the diagonal shifted by where the tile begins.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Window
from ..recipe import Link, Operand, Read, Recipe, Work, per_tile
from ..table import composite, run_rule
from .view import each, made_of, normal, on_tile, shape, viewing


@each("tril triu tril_ triu_")
def triangle(function: Any, input: Operand, diagonal: int = 0) -> Recipe:
    """A tile's own diagonal lies as far from the whole's as its corner does."""
    shape(torch.tril, input)
    rows, columns = input.ndim - 2, input.ndim - 1

    def local(work: Work, tile: Tensor) -> Tensor:
        return function(tile, diagonal + work.box[rows].lo - work.box[columns].lo)

    return per_tile(input, on_tile(local), inplace=function.__name__.endswith("_"))


@each("diagonal")
def diagonal(function: Any, input: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Recipe:
    """Element i of the diagonal needs row and column i, each from its own first one on."""
    made = shape(torch.diagonal, input, offset, dim1, dim2)
    rows, columns = normal(dim1, input.ndim), normal(dim2, input.ndim)
    last = len(made) - 1
    firsts = {rows: max(0, -offset), columns: max(0, offset)}
    places = iter(range(last))
    links = [Link(last, Window(padding=-firsts[d])) if d in firsts else Link(next(places)) for d in range(input.ndim)]

    def local(work: Work, tile: Tensor) -> Tensor:
        return tile.diagonal(offset if work.native(input, rows) else 0, rows, columns)

    return viewing(input, made, links, on_tile(local))


def _embed_rule(input: Operand, offset: int) -> Recipe:
    """The last dim as the diagonal of the last two. Rows are cut as the input is, columns are not."""
    size = input.shape[-1] + abs(offset)
    space, rows = (*input.shape[:-1], size, size), input.ndim - 1
    first = max(0, -offset)

    def local(work: Work, tile: Tensor, offset: int) -> Tensor:
        """This rank's rows: its part of the vector, each element at its own column."""
        box = work.box[rows]
        if work.native(input, rows):
            return tile.diag_embed(offset)
        # Rows before the first element of the vector are zero.
        before = min(max(0, first - box.lo), box.size)
        wide = F.pad(tile, (before, box.size - before - tile.shape[-1])).unsqueeze(-1)
        row, column = (torch.arange(n, device=tile.device) for n in (box.size, size))
        return torch.where(column == row.unsqueeze(1) + box.lo + offset, wide, torch.zeros_like(wide))

    return Recipe(
        space=space,
        reads=(Read(input, (*map(Link, range(rows)), Link(rows, Window(padding=first)))),),
        local=local,
        uncut=frozenset({len(space) - 1}),
        runs_empty=True,
    )


@made_of("diag_embed")
def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """A vector as a diagonal; its cut becomes that of the rows."""
    rows, columns = normal(dim1, input.ndim + 1), normal(dim2, input.ndim + 1)
    if rows > columns:  # the other way round is the other side of the diagonal
        rows, columns, offset = columns, rows, -offset
    embedded = run_rule(torch.diag_embed, _embed_rule, (input, offset), {})
    return embedded.movedim((-2, -1), (rows, columns))


@made_of("diag")
def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    """A diagonal taken, or a matrix made of one."""
    if input.ndim not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {input.ndim}D")
    return input.diag_embed(diagonal) if input.ndim == 1 else input.diagonal(diagonal).clone()


@made_of("diagflat")
def diagflat(input: Tensor, offset: int = 0) -> Tensor:
    """A matrix with the flattened input as its diagonal."""
    return input.flatten().diag_embed(offset)


@made_of("trace")
def trace(input: Tensor) -> Tensor:
    """The diagonal summed over the ranks."""
    if input.ndim != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {input.ndim}")
    return input.diagonal().sum()


@made_of("cross")
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Products of the components before and behind, by rolling."""
    input, other = torch.broadcast_tensors(input, other)
    sizes = list(input.shape)
    if dim is None:
        if 3 not in sizes:
            raise RuntimeError("no dimension of size 3 in input")
        dim = sizes.index(3)
    if sizes[dim] != 3:
        raise RuntimeError("linalg.cross: inputs dimension must have length 3")
    return input.roll(-1, dim) * other.roll(-2, dim) - input.roll(-2, dim) * other.roll(-1, dim)


@made_of("kron")
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Each dim of one beside the same dim of the other, merged: the first leads, and keeps its cut."""
    ndim = max(input.ndim, other.ndim)
    one, two = (t.reshape([1] * (ndim - t.ndim) + list(t.shape)) for t in (input, other))
    product = one.reshape([n for size in one.shape for n in (size, 1)]) * two.reshape(
        [n for size in two.shape for n in (1, size)]
    )
    return product.reshape([a * b for a, b in zip(one.shape, two.shape, strict=True)])


@composite(torch.linalg.cross, family="matrix")
def linalg_cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """As torch.cross."""
    return torch.cross(input, other, dim)


@composite(torch.linalg.diagonal, family="matrix")
def linalg_diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """As torch.diagonal."""
    return torch.diagonal(A, offset, dim1, dim2)


composite(torch.linalg.matmul, family="matrix")(torch.matmul)
