"""Value, gradients and second derivatives of a function, compared: shared by the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def derivatives(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """The value, all gradients, and the gradients of their squares."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    value = function(*leaves)
    weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
    first = torch.autograd.grad((weights * value).sum() + 0.1 * (value**3).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves, allow_unused=True)
    return [t.detach() for t in (value, *first, *second) if t is not None]


def same(found: list[Tensor], true: list[Tensor], tolerance: float = 1e-10) -> None:
    assert len(found) == len(true)
    for a, b in zip(found, true, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert not b.numel() or float((a - b).abs().max()) <= tolerance * (1 + float(b.abs().max()))
