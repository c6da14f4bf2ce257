"""Training with ``overlap="next-forward"`` next to one rank: shared by the tests of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from averaging import batch, check_equal, part, small_model
from torch import Tensor, nn

import halocline as hc
from halocline.world import Mesh, run_local

STEPS = 6
Train = Callable[[nn.Module, Any, Callable[[Tensor], Tensor]], Any]
Place = Callable[[Tensor], Tensor]
MakeOptimizer = Callable[[nn.Module], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def check(
    train: Train, make: Callable[[], nn.Module] = small_model, optimizer: MakeOptimizer = sgd, ranks: int = 2
) -> None:
    """Same bits on all ranks, and what one rank would have: parameters, the optimizer's state and what was returned."""

    def run() -> list[Tensor]:
        mesh = Mesh(data=ranks)
        model = make()
        mine = optimizer(model)
        hc.distribute(model, mesh, overlap="next-forward", optimizer=mine)
        return outcome(train(model, mine, lambda x: part(x, mesh)), model, mine)

    def outcome(told: Any, model: nn.Module, mine: Any) -> list[Tensor]:
        states = [v for _, s in sorted(mine.state_dict()["state"].items()) for v in s.values() if isinstance(v, Tensor)]
        return [*(told or []), *(p.detach().clone() for p in model.parameters()), *(s.clone() for s in states)]

    model = make()
    mine = optimizer(model)
    check_equal(run_local(ranks, run), outcome(train(model, mine, lambda x: x), model, mine))


def plain(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(place(batch(step))).square().mean().backward()
        optimizer.step()


def step_of(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def weights(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def ahead(mesh: Mesh) -> Callable[[nn.Module, Any], nn.Module]:
    return lambda model, optimizer: hc.distribute(model, mesh, overlap="next-forward", optimizer=optimizer)


def alike(steps: Callable[[Place, Callable[[nn.Module, Any], Any]], list[Tensor]]) -> None:
    """Loops that make their models and optimizers themselves, on two ranks and on one."""

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return steps(lambda x: part(x, mesh), ahead(mesh))

    check_equal(run_local(2, run), steps(lambda x: x, lambda model, optimizer: model))
