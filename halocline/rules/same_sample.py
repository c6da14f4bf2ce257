"""Checks that all ranks hand the same tensor to ``hc.shard``, and to a model whose parameters are cut.

If they did not, each rank would keep its part of another sample, and the sample would be put together from several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor

from .._torch_private import no_torch_functions, transforming
from ..errors import Refused
from ..tensor import here
from ..world import Label, Mesh

_FIRST = 64  # calls that are all checked
_EVERY = 61  # of those after: no multiple of two, so that inputs and targets both have their turn
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def check_same(tensor: Tensor, mesh: Mesh, axes: Collection[str], check: bool | None, operation: str = "shard") -> None:
    """Refuse on all ranks along ``axes``, which share the sample, unless all bring the same. By all of them
    together."""
    ranks, world = mesh.ranks_along(axes), mesh.world
    if len(ranks) == 1 or check is False or transforming():
        return
    if check is None:
        world.samples[ranks] += 1
        count = world.samples[ranks]
        if count > _FIRST and count % _EVERY:
            return
    # A few numbers leave the device, whatever the size of the tensor.
    mine = fingerprint(tensor)
    # The most and the least, as one maximum: all ranks come to the same verdict.
    both = torch.tensor([mine, ~mine], dtype=torch.int64, device="cpu")
    most, least = world.maximum(both, ranks, Label(f"comparing samples for {operation}", here())).tolist()
    if most != ~least:
        raise Refused(
            operation,
            here(),
            f"the ranks {', '.join(map(str, ranks))} bring different tensors, and each would keep its part of another "
            f"sample (rank {world.rank} has one of shape {list(tensor.shape)}, {tensor.dtype})",
            "give all ranks the same batch: no DistributedSampler (Lightning: use_distributed_sampler=False; "
            "Accelerate: do not prepare the loader), and the same seed for shuffling and augmentation, as with "
            "DataLoader(generator=torch.Generator().manual_seed(0)). If each rank has read its own part of one sample, "
            "use hc.from_tile. hc.shard(..., check=False) skips the comparison",
        )


def fingerprint(tensor: Tensor) -> int:
    """63 bits that depend on shape, dtype and every element: for each dim, the elements' bits are summed over all
    others.

    Whole numbers are added, so that the order of addition plays no part; a few numbers leave the device.
    """
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    if not tensor.is_meta and tensor.numel():
        with torch.no_grad(), no_torch_functions():
            digest.update(_marginals(tensor.detach()).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()) >> 1


def _marginals(tensor: Tensor) -> Tensor:
    """The bits of a tensor summed over all dims but one, for each dim: few numbers, which change with any element."""
    plain = tensor.resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    bits = real.view(_BITS[real.element_size()])
    if bits.ndim == 0:
        return bits.reshape(1).long()
    rest = bits.sum(-1, dtype=torch.int64)
    last = bits.sum(tuple(range(bits.ndim - 1)), dtype=torch.int64) if bits.ndim > 1 else bits.long()
    others = [
        rest.sum([d for d in range(rest.ndim) if d != dim]) if rest.ndim > 1 else rest for dim in range(rest.ndim)
    ]
    return torch.cat([last.reshape(-1), *(each.reshape(-1) for each in others)])
