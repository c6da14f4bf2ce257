"""The same elements under other dims. A cut stays where the cut dim leads its group of dims; else tiles are exchanged.

Input and output dims fall into groups of equal product: [N, C, D, H] -> [N, C*D*H] has the groups N -> N and
C, D, H -> C*D*H, which C leads (or D, where C is one). A group is cut along one axis: others are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry import Access
from ...geometry.access import Digit, Rows
from ..recipe import WHOLE, Link, Operand, Recipe, Work
from ..table import refuse
from .view import each, local_shape, made_of, normal, on_tile, operands, shape, viewing


class DimGroup(NamedTuple):
    """Dims of the input and of the output that hold the same elements; the first of each leads."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def groups(old: Sequence[int], new: Sequence[int]) -> Iterator[DimGroup]:
    """The smallest groups, from the left; dims of size one are in none.

    >>> list(groups((4, 1, 6, 5), (4, 3, 10)))
    [DimGroup(before=(0,), after=(0,)), DimGroup(before=(2, 3), after=(1, 2))]
    """
    lefts, rights = ([d for d, size in enumerate(sizes) if size != 1] for sizes in (old, new))
    while lefts and rights:
        before, after = [lefts.pop(0)], [rights.pop(0)]
        while (held := prod(old[d] for d in before)) != (made := prod(new[d] for d in after)):
            # The side with fewer elements takes one more dim, until both hold the same.
            short, rest = (before, lefts) if held < made else (after, rights)
            if not rest:  # nothing is in a tensor of size 0, and no product tells its dims apart
                return
            short.append(rest.pop(0))
        yield DimGroup(tuple(before), tuple(after))


class Regroup(NamedTuple):
    """A group, how many elements share an index of each of its input dims, and how many an output row holds."""

    group: DimGroup
    strides: tuple[int, ...]
    made: int


def regroup(old: Sequence[int], new: Sequence[int]) -> list[Regroup]:
    """How the dims of two shapes of the same elements belong together."""
    regroups = []
    for group in groups(old, new):
        sizes = [old[d] for d in group.before]
        strides = tuple(prod(sizes[place + 1 :]) for place in range(len(sizes)))
        made = prod(new[d] for d in group.after[1:])
        if prod(sizes) and made:
            regroups.append(Regroup(group, strides, made))
    return regroups


def reshaped(input: Operand, space: tuple[int, ...], either: bool = False) -> Recipe:
    """The recipe of a reshape: a view where it is one on each rank."""
    parts = regroup(input.shape, space)
    # Whatever has no leading dim to follow is gathered.
    links = [WHOLE] * input.ndim
    for one, other in _ones(input, space):
        links[one] = Link(other)
    for part in parts:
        for dim, access in _accesses(input, part):
            links[dim] = Link(part.group.after[0], access)

    def local(work: Work, tile: Tensor) -> Tensor:
        made = local_shape(work)
        # Rows at the edge of the box may bring elements that belong to a neighbour's rows.
        if tile.numel() != prod(made):
            tile = _trimmed(work, tile)
        return tile.reshape(made)

    def _trimmed(work: Work, tile: Tensor) -> Tensor:
        """Each group as one dim, without the elements of the outermost rows that belong to neighbours."""
        flat = tile.reshape([prod(tile.shape[d] for d in part.group.before) for part in parts])
        for place, (group, strides, made) in enumerate(parts):
            slots, box = work.slots[input.index], work.box[group.after[0]]
            first = sum(slots[d].needs[0].lo * stride for d, stride in zip(group.before, strides, strict=True))
            flat = flat.narrow(place, box.lo * made - first if box.size else 0, box.size * made)
        return flat

    return viewing(input, space, links, on_tile(local), either=either)


def _accesses(input: Operand, part: Regroup) -> Iterator[tuple[int, Access]]:
    """A cut dim that leads its group keeps its cut. One behind it has rows all over the output: they change places."""
    before, strides = part.group.before, part.strides
    inner = next((place for place, dim in enumerate(before) if dim in input.cut_dims), 0)
    yield before[0], Rows(strides[0], part.made)
    for dim, stride in zip(before[1 : inner + 1], strides[1:], strict=False):
        yield dim, Digit(input.shape[dim], stride, part.made)


def _ones(input: Operand, space: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A dim of size one may be cut too: one rank has it all. Any other of size one can take its place."""
    # Cut dims first: they find a place before the others.
    old = sorted((d for d, size in enumerate(input.shape) if size == 1), key=lambda d: d not in input.cut_dims)
    new = (d for d, size in enumerate(space) if size == 1)
    return zip(old, new, strict=False)


@each("view view_as unflatten squeeze unsqueeze")
def view(function: Any, *args: Any, **kwargs: Any) -> Recipe:
    """Refused where torch would have to copy on one rank."""
    input = next(operands((args, kwargs)))
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise refuse("view(dtype)", "it looks at the bytes, and a rank has those of a tile only", "use .to(dtype)")
    return reshaped(input, shape(function, *args, **kwargs))


@each("reshape reshape_as flatten ravel atleast_1d atleast_2d atleast_3d")
def reshape(function: Any, *args: Any, **kwargs: Any) -> Recipe:
    """A view, or a copy where torch makes one."""
    input, *others = operands((args, kwargs))
    if others and function.__name__.startswith("atleast"):
        raise refuse(function, "it was given several tensors at once", "call it on each of them")
    return reshaped(input, shape(function, *args, **kwargs), either=True)


@made_of("repeat_interleave", fresh=True)
def repeat_interleave(input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: Any = None) -> Tensor:
    """A new dim after ``dim``, stretched and merged into it: the cut leads the merge."""
    if isinstance(input, int) or isinstance(repeats, Tensor) or repeats is None:
        raise refuse(
            "repeat_interleave", "repeats given as a tensor make a shape that depends on values", "give an integer"
        )
    if dim is None:
        input, dim = input.flatten(), 0
    place = normal(dim, input.ndim) + 1
    stretched = list(input.shape)
    stretched.insert(place, repeats)
    return input.unsqueeze(place).expand(stretched).flatten(place - 1, place)


@made_of("pixel_shuffle", fresh=True)
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Channels become pixels inside each pixel: rows and columns lead the merge, and keep their cuts."""
    r, meta = upscale_factor, torch.empty(input.shape, device="meta")
    *lead, channels, height, width = torch.pixel_shuffle(meta, r).shape
    # Channels as (channel, row in the pixel, column in the pixel).
    split = input.reshape(*lead, channels, r, r, height // r, width // r)
    return split.permute(*_placed(len(lead), 0, 3, 1, 4, 2)).reshape(*lead, channels, height, width)


@made_of("pixel_unshuffle", fresh=True)
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Pixels become channels: the inverse of a shuffle."""
    r, meta = downscale_factor, torch.empty(input.shape, device="meta")
    if input.numel() == 0 and torch.pixel_unshuffle(torch.empty(input.shape), r).shape == input.shape:
        return input.clone()  # torch's kernel for the CPU leaves an empty tensor as it is
    *lead, channels, height, width = torch.pixel_unshuffle(meta, r).shape
    split = input.reshape(*lead, channels // (r * r), height, r, width, r)
    return split.permute(*_placed(len(lead), 0, 2, 4, 1, 3)).reshape(*lead, channels, height, width)


def _placed(lead: int, *order: int) -> tuple[int, ...]:
    """A permutation of the last dims, behind ``lead`` dims that stay."""
    return (*range(lead), *(lead + dim for dim in order))
