"""In which precision sums travel: the gradients' own, or rounded to fewer bits.

bfloat16 has the range of float32 and needs no scale. float16 has not: gradients are scaled by a power of two that
depends on the largest element of the bucket's last mean, which all ranks know. If a sum overflows all the same, every
rank sees that in the result, and the bucket is summed once more in its own precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import MeshError
from ..buckets.bucket import Bucket

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_AIM = 6  # the largest element of a mean is scaled to 2^6, which leaves 2^10 for ranks whose own gradient is larger
_FAR = 120  # the scale is at most 2^120


class GradientCompression:
    """Rounds a bucket before its sum and restores it after. ``name`` as in WIRES; None keeps the gradients' dtype."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None and name not in WIRES:
            raise MeshError(f"wire is {', '.join(WIRES)} or None (as gradients are), not {name!r}")
        self._dtype = None if name is None else WIRES[name]

    @property
    def may_go_again(self) -> bool:
        """May a sum overflow and be repeated, which all ranks must begin at the same point?"""
        return self._dtype == torch.float16

    def dtype_for(self, bucket: Bucket) -> torch.dtype:
        """The dtype in which a bucket travels: never one of more bits than its gradients have."""
        narrow = self._dtype is not None and self._dtype.itemsize < bucket.dtype.itemsize
        return self._dtype if narrow and self._dtype is not None else bucket.dtype

    def compress(self, bucket: Bucket, replan: bool = False) -> Tensor:
        """The tensor to sum: the bucket's own memory, or a rounded copy. The numbers behind the gradients are small and
        go unscaled."""
        dtype, memory = self.dtype_for(bucket), bucket.seal(replan)
        if dtype == bucket.dtype or (dtype == torch.float16 and bucket.largest is None):
            return memory
        if dtype != torch.float16 or bucket.largest is None:
            return memory.to(dtype)
        bucket.scale = _scale(bucket.largest)
        message = (memory * bucket.scale).to(dtype)
        message[bucket.elements :] = memory[bucket.elements :].to(dtype)
        return message

    def restore(self, bucket: Bucket, message: Tensor) -> bool:
        """Write the sum into the bucket's memory. False if it overflowed: the bucket must be summed uncompressed."""
        scale, bucket.scale = bucket.scale, 1.0
        bucket.counted_in = message.dtype
        if self.dtype_for(bucket) == torch.float16:
            largest = _largest(message[: bucket.elements])
            finite = largest is not None and math.isfinite(largest)
            bucket.largest = largest / scale if finite and largest is not None else None
            if not finite and message is not bucket.memory:
                bucket.counted_in = bucket.dtype
                return False
        if message is not bucket.memory:
            bucket.memory.copy_(message)
            if scale != 1.0:
                bucket.values.mul_(1 / scale)
        return True


def _largest(values: Tensor) -> float | None:
    """The largest magnitude: None if all are zero, NaN if any is."""
    largest = float(values.abs().max()) if values.numel() and not values.is_meta else 0.0
    return largest or None


def _scale(largest: float) -> float:
    """The power of two that brings ``largest`` to 2^6.

    >>> _scale(1.0), _scale(0.001)
    (64.0, 65536.0)
    """
    if not math.isfinite(largest):
        return 1.0
    power = _AIM - math.frexp(largest)[1] + (math.frexp(largest)[0] == 0.5)
    return 2.0 ** max(-_FAR, min(_FAR, power))
