"""Elements that a cut mask takes: ``x[mask]``, and values written where a mask is true.

How many elements a rank takes depends on values, so the ranks first sum their counts. Each rank then knows which run of
the result its own elements are. This needs a mask that is cut along one axis once the dims that it covers are
flattened; other masks are gathered.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...geometry.access import PieceToPiece
from ...tensor import ShardedTensor
from ..recipe import Link, Operand, Output, Read, Recipe, Work, follow, per_tile
from ..table import refuse, run_rule
from .view import whole_on_every_rank

Points = tuple[int, ...]


def taken(input: Tensor, mask: Tensor, dim: int) -> Tensor:
    """What a mask over the dims from ``dim`` on takes of ``input``, under one dim in their place."""
    covered = tuple(input.shape[dim : dim + mask.ndim])
    if tuple(mask.shape) != covered:
        raise IndexError(f"The shape of the mask {list(mask.shape)} does not match that of the indexed dims {covered}")
    flat = input.flatten(dim, dim + mask.ndim - 1)
    # Flattened, the covered dims are one, cut along one axis or not at all.
    points = _points(flat, dim)
    if points is None:
        return input[_behind(dim, whole_on_every_rank(mask))]
    kept = _kept(mask.flatten(), points)
    return run_rule("masked_select", _take_rule, (flat, mask.flatten(), dim, points, kept), {})


def put(input: Tensor, mask: Tensor, source: Tensor, *, exactly: bool = False) -> Tensor:
    """A copy of ``input`` whose elements where ``mask`` is true are those of ``source``, in order.

    ``exactly``: as many as there are, and no fewer.
    """
    flat, source = input.flatten(), source.flatten()
    points = _points(flat, 0)
    if points is None:  # of few elements, perhaps, that one rank held
        written = flat.masked_scatter(whole_on_every_rank(mask).flatten(), whole_on_every_rank(source))
    else:
        kept = _kept(mask.flatten(), points)
        if source.numel() < kept[-1] or (exactly and source.numel() > kept[-1]):
            raise RuntimeError(f"shape mismatch: the mask takes {kept[-1]} elements, and there are {source.numel()}")
        # torch ignores what is left of the source.
        call = (flat, mask.flatten(), source[: kept[-1]], points, kept)
        written = run_rule("masked_scatter", _put_rule, call, {})
    if not isinstance(input, ShardedTensor):
        return whole_on_every_rank(written.reshape(input.shape))
    return torch.empty_like(input).copy_(written.reshape(input.shape))  # cut as the input is


def _behind(dim: int, mask: Tensor) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, mask)


def _points(tensor: Tensor, dim: int) -> Points | None:
    """Where the tiles along ``dim`` begin and end, one tile a rank; None if the dim is not cut."""
    cut = tensor.sharding.cuts[dim] if isinstance(tensor, ShardedTensor) else None
    return None if cut is None else cut.partition.points


def _kept(mask: Tensor, points: Points) -> Points:
    """How many elements the mask takes before each of ``points``. Waits for the ranks that hold the mask."""
    if isinstance(mask, ShardedTensor):
        counts = run_rule("size of a mask", _counts_rule, (mask, points), {})
    else:
        counts = _counts(mask, 0, points)
    if counts.is_meta:
        raise refuse(
            "indexing",
            "how much a mask takes depends on its values, and a dry run has none",
            "use torch.where(mask, x, 0) and divide by mask.sum()",
        )
    return (0, *accumulate(counts.tolist()))


def _counts_rule(mask: Operand, points: Points) -> Recipe:
    output = Output((len(points) - 1,), (None,), constant=True, dtype=torch.int64)
    local = lambda work, tile, *_: _counts(tile, work.box[0].lo, points)  # noqa: E731
    return per_tile(mask, local, outputs=(output,), combine="sum")


def _counts(tile: Tensor, first: int, points: Points) -> Tensor:
    """What a part of the mask that begins at ``first`` takes between two points."""
    ends = [min(max(point - first, 0), len(tile)) for point in points]
    return torch.stack([tile[lo:hi].sum() for lo, hi in pairwise(ends)])


def _take_rule(input: Operand, mask: Operand, dim: int, points: Points, kept: Points) -> Recipe:
    """Each rank takes from its own piece; the pieces of the result are as long as what each takes."""
    space = (*input.shape[:dim], kept[-1], *input.shape[dim + 1 :])
    piece = Link(dim, PieceToPiece(points, kept))
    links = tuple(piece if d == dim else Link(d) for d in range(input.ndim))
    return Recipe(
        space=space,
        reads=(Read(input, links), Read(mask, (piece,))),
        local=lambda work, tile, taken, *_: tile[_behind(dim, taken)],
        runs_empty=True,
    )


def _put_rule(input: Operand, mask: Operand, source: Operand, points: Points, kept: Points) -> Recipe:
    """Each rank fetches the values that go into its own piece."""

    def local(work: Work, tile: Tensor, taken: Tensor, values: Tensor, *_: Any) -> Tensor:
        return tile.masked_scatter(taken, values)

    values = Read(source, (Link(0, PieceToPiece(kept, points)),))
    return per_tile(input, local, follow(mask), values)
