"""Generators of random fields as functions of place and noise, discriminators, and the source that the PDE induces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class RandomField(nn.Module):
    """A random field: [batch, points, dims] and noise [batch, size] to values [batch, points]."""

    def __init__(self, dims: int, noise: int, width: int, depth: int) -> None:
        super().__init__()
        self.net = perceptron([dims + noise, *[width] * depth, 1])

    def forward(self, points: Tensor, noise: Tensor) -> Tensor:
        """Values of one realisation for each row of noise."""
        spread = noise[:, None].expand(-1, points.shape[1], -1)
        return self.net(torch.cat([points, spread], 2))[..., 0]


def perceptron(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def initialise(module: nn.Module, seed: int) -> None:
    """Weights by Glorot's rule and no bias, the same for a seed whatever else draws numbers."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            nn.init.zeros_(part.bias)


def gradient(values: Tensor, points: Tensor) -> Tensor:
    """The derivative of each value by its own point, of [batch, points] by [batch, points, dims]."""
    (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    return slope


def induced_source(log_k: Callable[[Tensor], Tensor], u: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """``div(K grad u)`` at the points, [batch, points], by automatic differentiation."""
    points = points.detach().requires_grad_()
    flux = torch.exp(log_k(points))[..., None] * gradient(u(points), points)
    return sum(gradient(flux[..., dim], points)[..., dim] for dim in range(points.shape[2]))  # type: ignore[return-value]
