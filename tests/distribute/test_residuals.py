"""Losses made of derivatives of the network (physics-informed residuals, gradient penalties) train as on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.testing import shared_pool

STEPS = 4
F64 = torch.float64
Place = Callable[[Tensor], Tensor]


def network(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    ).double()


def points(step: int) -> Tensor:
    return torch.randn(7, 2, dtype=F64, generator=torch.Generator().manual_seed(100 + step))


def first_order(models: list[nn.Module], x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(models[0](x).sum(), x, create_graph=True)
    return slope.square().mean()


def heat_equation(models: list[nn.Module], x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(models[0](x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 1].sum(), x, create_graph=True)
    return (slope[:, 0] - curve[:, 1]).square().mean()


def residual_and_data(models: list[nn.Module], x: Tensor) -> Tensor:
    return heat_equation(models, x) + models[0](x).square().mean()


def two_networks(models: list[nn.Module], x: Tensor) -> Tensor:
    """Of the second the residual needs the slope alone, of the first the value too."""
    first, second = (model(x) for model in models)
    (slope,) = torch.autograd.grad(second.sum(), x, create_graph=True)
    return (first[:, 0] * slope[:, 0]).square().mean()


def gradient_penalty(models: list[nn.Module], x: Tensor) -> Tensor:
    critic = models[0]
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return critic(x).mean() + 10 * (slope.square().sum(1).sqrt() - 1).square().mean()


LOSSES = {f.__name__: f for f in (first_order, heat_equation, residual_and_data, two_networks, gradient_penalty)}
MODES: dict[str, dict[str, Any]] = {
    "backward": {},
    "rings": {"rings": "levels"},
    "next-forward": {"overlap": "next-forward"},
    "next-forward on rings": {"overlap": "next-forward", "rings": "levels"},
    "lag": {"lag": 1},
}


def train(name: str, place: Place, prepare: Callable[[nn.Module, Any], Any], late: bool) -> list[Tensor]:
    models: list[nn.Module] = [network(1), network(2)][: 2 if name == "two_networks" else 1]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        prepare(model, optimizer)
    before: list[Any] = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        LOSSES[name](models, place(points(step)).requires_grad_()).backward()
        if late:  # the reference of lag=1: apply the gradients of the step before
            parameters = [p for model in models for p in model.parameters()]
            now = [p.grad for p in parameters]
            for p, gradient in zip(parameters, before or [None] * len(now), strict=True):
                p.grad = gradient
            before = now
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for model in models for p in model.parameters()]


def on_ranks(name: str, mode: str) -> list[Tensor]:
    mesh = hc.Mesh(points=-1)

    def prepare(model: nn.Module, optimizer: Any) -> None:
        how = dict(MODES[mode])
        if how.get("overlap"):
            how["optimizer"] = optimizer
        hc.distribute(model, mesh, **how)

    return train(name, lambda x: hc.shard(x, mesh, {0: "points"}), prepare, late=False)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_residuals_train_as_on_one_rank(mode: str, ranks: int) -> None:
    for name in LOSSES:
        true = train(name, lambda x: x, lambda model, optimizer: None, late=mode == "lag")
        for found in shared_pool(ranks).run(on_ranks, name, mode):
            for a, b in zip(found, true, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13, msg=f"{name}, {mode}, {ranks} ranks")
