"""``hc.all_reduce``: arrays of any framework over all ranks, with the buckets and the wire formats of gradients."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..errors import MeshError, Refused
from ..world import Label, World, this_world
from ..world.agreement import extremes
from .buckets.bucket import Bucket, by_kind
from .transport.compression import GradientCompression
from .transport.rings import rings_for
from .transport.sum_queue import BucketSum, FlatTransport, Transport

_LABEL = Label("all_reduce", "arrays", "gradients")
OPERATIONS = ("sum", "mean", "max")


def all_reduce(
    arrays: Any, op: str = "sum", *, wire: str | None = None, rings: str | Sequence[int] = "flat", world: Any = None
) -> Any:
    """The sum, mean or maximum over all ranks of an array, or of each in a list; new arrays of the same kinds.

        gradients = hc.all_reduce([jax_array, numpy_array], "mean", wire="bf16")

    An array is of NumPy or torch, or of any framework that speaks DLPack (JAX, CuPy, TensorFlow). Those of one dtype
    travel in one message. ``wire``: "bf16", "fp16" (scaled) or "fp32" rounds floating point numbers on the way.
    ``rings``: as in :func:`hc.distribute`. By all ranks together, with arrays of the same shapes and dtypes.
    """
    if op not in OPERATIONS:
        raise MeshError(f"hc.all_reduce: op is {', '.join(OPERATIONS)}, not {op!r}")
    several = isinstance(arrays, (list, tuple))
    given = list(arrays) if several else [arrays]
    tensors = [_tensor(array) for array in given]
    world = this_world() if world is None else world
    _check_alike(tensors, world)
    reduced = _reduced(tensors, op, GradientCompression(wire), rings, world)
    results = [_as(array, tensor) for array, tensor in zip(given, reduced, strict=True)]
    return type(arrays)(results) if several else results[0]


def _tensor(array: Any) -> Tensor:
    """A view of an array as a tensor. Raises Refused for what is none."""
    if isinstance(array, Tensor):
        if type(array) not in (Tensor, torch.nn.Parameter):
            why = f"a {type(array).__name__} is more than its values on this rank"
            raise Refused("hc.all_reduce", "arrays", why, "give plain tensors")
        return array.detach()
    if isinstance(array, (np.ndarray, np.generic)):
        return torch.as_tensor(np.array(array))  # a copy: torch takes no read-only memory
    if hasattr(array, "__dlpack__"):
        return from_dlpack(array)
    why = f"a {type(array).__name__} has no __dlpack__"
    raise Refused("hc.all_reduce", "arrays", why, "give an array of NumPy, torch, or a framework that speaks DLPack")


def _as(array: Any, tensor: Tensor) -> Any:
    """The result in the framework of the array that was given."""
    if isinstance(array, Tensor):
        return tensor
    if isinstance(array, (np.ndarray, np.generic)):
        return tensor.numpy()
    space = getattr(array, "__array_namespace__", None)
    return tensor if space is None else space().from_dlpack(tensor)


def _check_alike(tensors: list[Tensor], world: World) -> None:
    """Raise on all ranks unless they bring arrays of the same shapes and dtypes."""
    words = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest) >> 1], dtype=torch.int64)
    least, most = extremes(world, mine, Label("all_reduce", "arrays", "control"))
    if not torch.equal(least, most):
        raise MeshError(f"hc.all_reduce: rank {world.rank} brings {words}, and other ranks bring other shapes")


def _reduced(
    tensors: list[Tensor], op: str, compression: GradientCompression, rings: str | Sequence[int], world: World
) -> list[Tensor]:
    """The results, one message for each dtype and device."""
    results: list[Tensor] = list(tensors)
    everyone = tuple(range(world.size))
    made = rings_for(world, rings, tensors, measure=False)
    transport: Transport = made or FlatTransport(world, everyone)
    try:
        for indices in by_kind(range(len(tensors)), tensors):
            kind = tensors[indices[0]]
            if op == "max" or not (kind.is_floating_point() or kind.is_complex()):
                for index in indices:
                    results[index] = _exact(tensors[index], op, world, everyone)
            else:
                _sum_bucket(
                    indices, tensors, results, 1.0 if op == "sum" else 1 / world.size, compression, transport, world
                )
    finally:
        if made is not None:
            made.close()
    return results


def _exact(tensor: Tensor, op: str, world: World, everyone: tuple[int, ...]) -> Tensor:
    """Sums of whole numbers, and maxima, in the array's own dtype."""
    if op == "max" and not tensor.is_complex():
        return world.maximum(tensor.contiguous(), everyone, _LABEL).clone()
    if op == "sum" and tensor.dtype != torch.bool:
        return world.sum(tensor.contiguous(), everyone, _LABEL).clone()
    why = f"{tensor.dtype} has no {op}" if op == "max" else f"the {op} of {tensor.dtype} is not of that dtype"
    raise Refused("hc.all_reduce", "arrays", why, "convert the array to a floating point dtype first")


def _sum_bucket(
    indices: list[int],
    tensors: list[Tensor],
    results: list[Tensor],
    share: float,
    compression: GradientCompression,
    transport: Transport,
    world: World,
) -> None:
    """Sum the arrays of one dtype as one bucket."""
    bucket = Bucket(indices, tensors)
    bucket.begin(tensors)
    for index in indices:
        bucket.put(index, tensors[index])
    if compression.may_go_again:  # scaled by the largest number of all ranks
        bucket.largest = _largest([tensors[index] for index in indices], world) * share * world.size or None
    total = BucketSum(bucket, transport, compression, _LABEL, share, time.monotonic)
    total.begin()
    total.finish()
    for index in indices:
        results[index] = bucket.gradient(index).clone()


def _largest(tensors: list[Tensor], world: World) -> float:
    """The largest magnitude on any rank."""
    mine = max(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in tensors)
    return float(world.maximum(torch.tensor([mine], dtype=torch.float64), tuple(range(world.size)), _LABEL))
