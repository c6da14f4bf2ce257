"""Models in training on one rank and on several: shared by the tests of gradient averages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import halocline as hc
from halocline.world import Mesh, run_local

STEPS = 20


def drawn(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    """Drawn once, and copied: ranks in one process share torch's random stream."""

    @cache
    def once() -> nn.Module:
        torch.manual_seed(3)
        return make()

    once()
    return lambda: copy.deepcopy(once())


small_model = drawn(
    lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 2)).double()
)


def batch(step: int, size: int = 8) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)


def part(x: Tensor, mesh: Mesh) -> Tensor:
    return x.chunk(mesh.size)[mesh.rank]


Body = Callable[[nn.Module, Tensor, int], Tensor]


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x).square().mean()


def trained(
    model: nn.Module, place: Callable[[Tensor], Tensor], body: Body = loss_of, steps: int = STEPS
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        body(model, place(batch(step)), step).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_equal(found: Sequence[Sequence[Tensor]], true: Sequence[Tensor]) -> None:
    """Same bits on every rank, and what one rank would have."""
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    for a, b in zip(found[0], true, strict=True):
        assert not b.numel() or float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


def on_ranks(ranks: int, make: Callable[[], nn.Module], body: Body = loss_of, steps: int = STEPS) -> list[list[Tensor]]:
    def run() -> list[Tensor]:
        mesh = Mesh(data=ranks)
        return trained(hc.distribute(make(), mesh), lambda x: part(x, mesh), body, steps)

    return run_local(ranks, run)
