"""In which precision sums travel: as they are, or rounded to fewer bits on the way.

bfloat16 has the range of float32 and goes as it is. float16 has not: gradients are scaled by a power of two, chosen by
how large the bucket's last mean was, which all ranks know. Should a sum leave the range all the same, every rank sees
that in the result, and the bucket goes once more as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import MeshError
from ..buckets.bucket import Bucket
from .rings import Pending

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_AIM = 6  # the largest of a mean is brought to 2 to this, with 2^10 above it for what single ranks may have
_FAR = 120  # and scaled by no more than 2 to this


Carry = Callable[[Tensor], Pending]


class GradientCompression:
    """``name`` as in WIRES; None sends everything as it is."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None and name not in WIRES:
            raise MeshError(f"wire is {', '.join(WIRES)} or None (as gradients are), not {name!r}")
        self._dtype = None if name is None else WIRES[name]

    @property
    def may_go_again(self) -> bool:
        """What leaves the range is summed once more, which all ranks are to begin at the same point."""
        return self._dtype == torch.float16

    def dtype_for(self, bucket: Bucket) -> torch.dtype:
        """Never one of more bits than the gradients have."""
        return self._dtype if self._dtype is not None and self._dtype.itemsize < bucket.dtype.itemsize else bucket.dtype

    def begin(self, bucket: Bucket, begin: Carry, anew: bool = False) -> Pending:
        """Begin a bucket's sum."""
        dtype, memory = self.dtype_for(bucket), bucket.seal(anew)
        if dtype == bucket.dtype or (dtype == torch.float16 and bucket.largest is None):
            return _Whole(bucket, begin(memory), bucket.dtype, watched=dtype == torch.float16)
        return _Narrow(bucket, memory, dtype, begin)


class _Whole:
    def __init__(self, bucket: Bucket, pending: Pending, dtype: torch.dtype, watched: bool) -> None:
        self._bucket, self._pending, self._dtype, self._watched = bucket, pending, dtype, watched

    def wait(self) -> None:
        self._pending.wait()
        self._bucket.counted_in = self._dtype
        if self._watched:
            largest = _largest(self._bucket.values)
            self._bucket.largest = largest if largest is not None and math.isfinite(largest) else None


class _Narrow:
    """What is said of the gradients, behind them, is small numbers and goes unscaled."""

    def __init__(self, bucket: Bucket, memory: Tensor, dtype: torch.dtype, begin: Carry) -> None:
        self._bucket, self._memory, self._begin = bucket, memory, begin
        self._scale = 1.0 if bucket.largest is None or dtype != torch.float16 else _scale(bucket.largest)
        if self._scale == 1.0:
            self._sent = memory.to(dtype)
        else:
            self._sent = (memory * self._scale).to(dtype)
            self._sent[bucket.elements :] = memory[bucket.elements :].to(dtype)
        self._pending = begin(self._sent)

    def wait(self) -> None:
        self._pending.wait()
        bucket, values = self._bucket, self._sent[: self._bucket.elements]
        if self._sent.dtype == torch.float16:
            largest = _largest(values)
            if largest is None or not math.isfinite(largest):
                bucket.largest = None
                self._begin(self._memory).wait()
                bucket.counted_in = bucket.dtype
                return
            bucket.largest = largest / self._scale
        self._memory.copy_(self._sent)
        if self._scale != 1.0:
            bucket.values.mul_(1 / self._scale)
        bucket.counted_in = self._sent.dtype


def _largest(values: Tensor) -> float | None:
    """None where there is nothing but zeros; NaN if there is one."""
    found = float(values.abs().max()) if values.numel() and not values.is_meta else 0.0
    return found or None


def _scale(largest: float) -> float:
    """
    >>> _scale(1.0), _scale(0.001)
    (64.0, 65536.0)
    """
    if not math.isfinite(largest):
        return 1.0
    power = _AIM - math.frexp(largest)[1] + (math.frexp(largest)[0] == 0.5)
    return 2.0 ** max(-_FAR, min(_FAR, power))
