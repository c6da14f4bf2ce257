"""One call's numbers at a place, in the distributions that torch's functions want."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..geometry import Box
from .generator import GlobalBox, bits, filled, keys, signed
from .state import current

#: As many random bits as the mantissa holds, so that nothing rounds up to 1 (as torch draws them).
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_HALF_RANGE = 1 << 63


class Draw:
    """The numbers of one call, for this rank's box of the whole.

    Making one takes the next number of the call count, on this rank as on all others. With ``numbered`` it is that
    (seed, call), and the count stays.
    """

    def __init__(self, place: GlobalBox, device: torch.device, numbered: tuple[int, int] | None = None) -> None:
        self._place, self._device = place, device
        if numbered is None:
            state = current()
            numbered = state.seed, state.next_call()
        self._seed, self._call = numbered

    def _filled(self, dtype: torch.dtype, numbers: Callable[[Box], Tensor]) -> Tensor:
        with torch.no_grad():
            return filled(self._place, dtype, self._device, numbers)

    def _bits(self, box: Box, stream: int) -> Tensor:
        return bits(self._place.shape, box, keys(self._seed, self._call, stream), self._device)

    def _inner(self, box: Box, stream: int) -> Tensor:
        """Uniform in (0, 1), ends excluded, in float64: for logarithms."""
        return _top(self._bits(box, stream), 52).double().add_(0.5).mul_(2.0**-52)

    def uniform(self, dtype: torch.dtype, stream: int = 0) -> Tensor:
        """In [0, 1)."""
        if dtype in _PARTS:
            return torch.complex(self.uniform(_PARTS[dtype], stream), self.uniform(_PARTS[dtype], stream + 1))
        # As many bits as the mantissa holds: more would round up to 1.
        digits = _DIGITS[_floating(dtype)]
        return self._filled(dtype, lambda box: _top(self._bits(box, stream), digits).to(dtype).mul_(2.0**-digits))

    def normal(self, dtype: torch.dtype, stream: int = 0) -> Tensor:
        """By Box and Muller's method in float64; a complex one has variance 1 in all."""
        if dtype in _PARTS:
            parts = self.normal(_PARTS[dtype], stream), self.normal(_PARTS[dtype], stream + 2)
            return torch.complex(*parts).mul_(math.sqrt(0.5))

        def numbers(box: Box) -> Tensor:
            radius = self._inner(box, stream).log_().mul_(-2.0).sqrt_()
            return radius.mul_(self._inner(box, stream + 1).mul_(2 * math.pi).cos_())

        return self._filled(_floating(dtype), numbers)

    def exponential(self, dtype: torch.dtype, rate: float = 1.0) -> Tensor:
        """Never zero, so that its logarithm is finite."""
        smallest = torch.finfo(_floating(dtype)).tiny
        # A number that rounds to zero in half precision is lifted to the smallest positive one.
        numbers = self._filled(dtype, lambda box: self._inner(box, 0).log_().mul_(-1.0 / rate))
        return numbers.clamp_(min=smallest)

    def cauchy(self, dtype: torch.dtype, median: float, sigma: float) -> Tensor:
        """By the inverse of its distribution."""

        def numbers(box: Box) -> Tensor:
            return self._inner(box, 0).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)

        return self._filled(_floating(dtype), numbers)

    def geometric(self, dtype: torch.dtype, p: float) -> Tensor:
        """How many trials until the first success."""
        scale = 1 / math.log1p(-p) if p < 1 else 0.0
        return self._filled(dtype, lambda box: self._inner(box, 0).log_().mul_(scale).ceil_().clamp_(min=1))

    def chosen(self, probability: float) -> Tensor:
        """True with this probability, to 64 bits of it."""
        limit = int(probability * 2.0**64) - _HALF_RANGE
        if limit >= _HALF_RANGE:
            return self._filled(torch.bool, lambda box: self._bits(box, 0).fill_(1))
        return self._filled(torch.bool, lambda box: self._bits(box, 0) < limit)

    def less_than(self, probability: Tensor) -> Tensor:
        """True with the probability that stands at each index."""
        return self.uniform(torch.float64) < probability

    def integers(self, dtype: torch.dtype, low: int, count: int) -> Tensor:
        """``low`` to ``low + count - 1``: the remainder of 63 bits, some likelier by ``count / 2^63`` at most."""
        if not 0 < count <= _HALF_RANGE:
            raise RuntimeError(f"random integers are drawn from a range of 1 to 2^63 numbers, not {count}")

        def numbers(box: Box) -> Tensor:
            words = self._bits(box, 0).bitwise_and_(_HALF_RANGE - 1)
            return words.add_(signed(low)) if count == _HALF_RANGE else words.remainder_(count).add_(low)

        return self._filled(dtype, numbers)

    def permutation(self, dtype: torch.dtype) -> Tensor:
        """The order of 64-bit words."""
        return self._filled(torch.int64, lambda box: self._bits(box, 0)).argsort(stable=True).to(dtype)


def _top(words: Tensor, digits: int) -> Tensor:
    return words.bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1)


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DIGITS:
        raise NotImplementedError(f"random real numbers are drawn in float64, 32, 16 or bfloat16, not in {dtype}")
    return dtype
