"""Proves that the backward of a movement is its adjoint: ``<F x, y> == <x, F* y>``, by inner products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from ..world import Mesh, run_local


def check_adjoint(
    movement: Callable[[Mesh, Tensor], Tensor],
    source: Callable[[Mesh], tuple[int, ...]],
    mesh: Mapping[str, int],
    *,
    whole_source: bool = False,
    whole_target: bool = False,
    dtype: torch.dtype = torch.float64,
) -> float:
    """The relative gap between both inner products; 0 but for rounding where backward is the adjoint.

    ``movement(mesh, x)`` maps this rank's plain tensor of shape ``source(mesh)`` to its plain result. The inner product
    of cut values is the sum over ranks; that of whole values the mean, since a whole gradient is the mean of what the
    ranks hold.
    """
    ranks = prod(mesh.values())

    def on_rank() -> tuple[float, float]:
        """Both inner products of this rank: of the result with y, and of x with the pulled-back y."""
        layout = Mesh(**dict(mesh))
        x = _random(source(layout), dtype, 0 if whole_source else layout.rank).requires_grad_()
        moved = movement(layout, x)
        y = _random(tuple(moved.shape), dtype, 1000 + layout.rank)
        (pulled,) = torch.autograd.grad(moved, x, y)
        return _product(moved, y), _product(x, pulled)

    products = run_local(ranks, on_rank)
    forward = sum(p for p, _ in products) / (ranks if whole_target else 1)
    adjoint = sum(p for _, p in products) / (ranks if whole_source else 1)
    return abs(forward - adjoint) / max(abs(forward), abs(adjoint), 1e-30)


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _product(a: Tensor, b: Tensor) -> float:
    return float((a.detach() * b.detach().conj()).sum().real)
