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
