"""torch's factories of random tensors. They see no sharded tensor, so they make whole ones, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .draw import Draw
from .generator import GlobalBox

Number = Callable[[Draw, torch.dtype], Tensor]


def _made(number: Number, *size: Any, requires_grad: bool = False, generator: Any = None, **options: Any) -> Tensor:
    """torch itself says what size, dtype and device such arguments mean."""
    empty = torch.empty(*size, **options)
    draw = Draw(GlobalBox.all_of(tuple(empty.shape)), empty.device)
    return empty.copy_(number(draw, empty.dtype)).requires_grad_(requires_grad)


def rand(*size: Any, **options: Any) -> Tensor:
    """Uniform in [0, 1)."""
    return _made(lambda draw, dtype: draw.uniform(dtype), *size, **options)


def randn(*size: Any, **options: Any) -> Tensor:
    """Normal with mean 0 and deviation 1."""
    return _made(lambda draw, dtype: draw.normal(dtype), *size, **options)


def randint(low: int = 0, high: Any = None, size: Any = None, *, dtype: Any = None, **options: Any) -> Tensor:
    """``(high, size)`` or ``(low, high, size)``, with or without names."""
    if size is None:
        high, size = None, high
    if high is None:
        low, high = 0, low
    kind = torch.int64 if dtype is None else dtype
    return _made(lambda draw, dtype: draw.integers(dtype, low, high - low), size, dtype=kind, **options)


def randperm(n: int, *, dtype: Any = torch.int64, **options: Any) -> Tensor:
    """The numbers below ``n`` in random order."""
    return _made(lambda draw, dtype: draw.permutation(dtype), n, dtype=dtype, **options)


def normal(mean: float, std: float, size: Any, **options: Any) -> Tensor:
    """Normal with one mean and one deviation for all elements."""
    return _made(lambda draw, dtype: draw.normal(dtype).mul_(std).add_(mean), size, **options)


#: torch.normal is one of these only where it is given a size.
FACTORIES: dict[Any, Callable[..., Tensor]] = {
    torch.rand: rand,
    torch.randn: randn,
    torch.randint: randint,
    torch.randperm: randperm,
}
