"""Elements by positions held in a tensor.

Which rank holds what is asked for depends on values. The dim that positions point into is therefore read whole; all
other dims, and those of the positions themselves, keep their cuts.

    table[tokens]   # the table is whole on every rank, tokens are cut: each rank looks up its own tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...geometry import Window
from ...tensor import ShardedTensor
from ..recipe import WHOLE, Link, Operand, Read, Recipe, Work, follow, read_whole, stretched
from ..table import run_rule
from .masks import put
from .pointwise import broadcast_shape
from .view import as_called, each, made_of, made_of_each, normal, shape


def looked_up(input: Tensor, indices: tuple[Tensor | None, ...]) -> Tensor:
    """``input[indices]`` with None for a dim that is taken as it is."""
    given = [index for index in indices if index is not None]
    if not any(isinstance(tensor, ShardedTensor) for tensor in (input, *given)):
        return input[tuple(slice(None) if index is None else index for index in indices)]
    return run_rule(Tensor.__getitem__, _lookup_rule, (input, indices), {})


def chosen_place(places: Sequence[int]) -> int:
    """Where torch puts the dims of the positions: where they point, or first if the dims they point into lie apart."""
    return places[0] if places[-1] - places[0] == len(places) - 1 else 0


def _lookup_rule(input: Operand, indices: tuple[Operand | None, ...]) -> Recipe:
    """The dims of the positions follow the positions; a dim they point into is read whole, all others stay."""
    places = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    chosen = broadcast_shape(*(index.shape for index in given))
    first = chosen_place(places)
    kept = [dim for dim in range(input.ndim) if dim not in places]
    space = [input.shape[dim] for dim in kept]
    space[first:first] = chosen
    # Dims behind the positions move back by as many dims as the positions have.
    after = {dim: place if place < first else place + len(chosen) for place, dim in enumerate(kept)}
    links = tuple(Link(after[dim]) if dim in after else WHOLE for dim in range(input.ndim))

    def local(work: Work, tile: Tensor, indices: tuple[Tensor | None, ...]) -> Tensor:
        return tile[tuple(slice(None) if index is None else index for index in indices)]

    ends = first + len(chosen)
    positions = [Read(index, stretched(index.shape, space[:ends])) for index in given]
    return Recipe(space=tuple(space), reads=(Read(input, links), *positions), local=local, runs_empty=True)


@each("index_select")
def index_select(function: Any, input: Operand, dim: int, index: Operand) -> Recipe:
    """Any index may be asked for: along ``dim`` every rank reads all, of index and input."""
    place = normal(dim, input.ndim)
    space = tuple(index.numel() if d == place else size for d, size in enumerate(input.shape))
    rest = follow(input, *(None if d == place else d for d in range(input.ndim)))
    return Recipe(space=space, reads=(rest, read_whole(index)), local=as_called(function), runs_empty=True)


@each("gather")
def gather_along(function: Any, input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Recipe:
    """``out[i][j] = input[index[i][j]][j]``: the input whole along ``dim``, elsewhere what the index has."""
    shape(torch.gather, input, dim, index)
    place = normal(dim, input.ndim)
    links = tuple(WHOLE if d == place else Link(d, Window()) for d in range(input.ndim))
    reads = (Read(input, links), follow(index))
    return Recipe(space=index.shape, reads=reads, local=as_called(function), runs_empty=True)


@made_of("take_along_dim")
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """A gather whose operands stretch, but for ``dim``."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    place = normal(dim, input.ndim)
    sizes = [1 if d == place else size for d, size in enumerate(input.shape)]
    others = [1 if d == place else size for d, size in enumerate(indices.shape)]
    common = list(broadcast_shape(tuple(sizes), tuple(others)))
    both = [[*common[:place], t.shape[place], *common[place + 1 :]] for t in (input, indices)]
    return input.expand(both[0]).gather(place, indices.expand(both[1]))


@made_of("take")
def take(input: Tensor, index: Tensor) -> Tensor:
    """Elements by their position in the flattened tensor."""
    return input.flatten()[index]


@made_of("masked_select")
def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """What a mask takes, in one dim; how much is known after a sum over ranks."""
    input, mask = torch.broadcast_tensors(input, mask)
    return input[mask]


@made_of_each("masked_scatter masked_scatter_")
def masked_scatter(function: Any, input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Values in order where a mask is true, into a copy or in place."""
    if function is Tensor.masked_scatter_:
        return input.copy_(put(input, mask.expand(input.shape), source))
    input, mask = torch.broadcast_tensors(input, mask)
    return put(input, mask, source)
