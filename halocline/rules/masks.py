"""Elements that a cut mask takes: ``x[mask]``, and values written where it is true.

Under one dim for all that it covers, in the order of all elements, a mask is cut along one axis, so that what each rank
takes is one run of the result. How many elements that is depends on values: the ranks tell each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..geometry import Partition
from ..tensor import Cut, ShardedTensor, Sharding, here, unwrap, wrap
from ..world import Label
from .api import cut_like, gather
from .table import refuse


def taken(input: Tensor, mask: Tensor, dim: int) -> Tensor:
    """What a mask over the dims from ``dim`` on takes of ``input``, under one dim in their place."""
    _check_shape(input, mask, dim)
    flat = input.flatten(dim, dim + mask.ndim - 1)
    cut = flat.sharding.cuts[dim] if isinstance(flat, ShardedTensor) else None
    if cut is None:
        return input[_behind(dim, gather(mask))]
    sharding: Sharding = flat.sharding  # type: ignore[attr-defined]
    here_taken = _mask_tile(mask, Sharding(sharding.mesh, (mask.numel(),), (cut,)))
    return wrap(unwrap(flat)[_behind(dim, here_taken)], _shortened(sharding, dim, int(here_taken.sum())))


def _behind(dim: int, mask: Tensor) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, mask)


def put(input: Tensor, mask: Tensor, source: Tensor, *, exactly: bool = False) -> Tensor:
    """A copy of ``input`` whose elements where ``mask`` is true are those of ``source``, in order.

    ``exactly``: as many as there are, and no fewer.
    """
    flat = input.flatten()
    if not isinstance(flat, ShardedTensor):  # of few elements, perhaps, that one rank held
        whole = flat.masked_scatter(gather(mask).flatten(), gather(source).flatten()).reshape(input.shape)
        return cut_like(whole, input.sharding) if isinstance(input, ShardedTensor) else whole
    here_taken = _mask_tile(mask, flat.sharding)
    wanted = _shortened(flat.sharding, 0, int(here_taken.sum()))
    if source.numel() < wanted.shape[0] or (exactly and source.numel() > wanted.shape[0]):
        raise RuntimeError(f"shape mismatch: the mask takes {wanted.shape[0]} elements, and there are {source.numel()}")
    values = unwrap(cut_like(source.flatten()[: wanted.shape[0]], wanted))
    written = wrap(unwrap(flat).masked_scatter(here_taken, values), flat.sharding).reshape(input.shape)
    return cut_like(written, input.sharding) if isinstance(input, ShardedTensor) else gather(written)


def _check_shape(input: Tensor, mask: Tensor, dim: int) -> None:
    covered = tuple(input.shape[dim : dim + mask.ndim])
    if tuple(mask.shape) != covered:
        raise IndexError(f"The shape of the mask {list(mask.shape)} does not match that of the indexed dims {covered}")


def _mask_tile(mask: Tensor, sharding: Sharding) -> Tensor:
    tile = unwrap(cut_like(mask.flatten(), sharding))
    if tile.is_meta:
        raise refuse(
            "indexing",
            "how much a mask takes depends on its values, and a dry run has none",
            "use torch.where(mask, x, 0) and divide by mask.sum()",
        )
    return tile


def _shortened(sharding: Sharding, dim: int, size: int) -> Sharding:
    """The same with so many elements of ``dim`` on this rank. All ranks along the cut call it together."""
    cut, mesh = sharding.cuts[dim], sharding.mesh
    assert cut is not None
    counts = torch.zeros(mesh.sizes[cut.axis], dtype=torch.int64, device="cpu")
    counts[mesh.coordinates[cut.axis]] = size
    sizes = mesh.world.sum(counts, mesh.ranks_along([cut.axis]), Label("size of a mask", here())).tolist()
    shape, cuts = list(sharding.shape), list(sharding.cuts)
    shape[dim], cuts[dim] = sum(sizes), Cut(cut.axis, Partition.from_sizes(sizes))
    return Sharding(mesh, shape, cuts)
