"""``lag=1``: gradients applied one step late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, drawn, part, small_model
from torch import Tensor, nn

import halocline as hc
from halocline.world import Mesh, run_local

STEPS = 7
Place = Callable[[Tensor], Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def reference(model: nn.Module, steps: int = STEPS, pile: int = 1) -> list[Tensor]:
    """On one rank, as it is defined: step t applies the gradient of step t - 1, the first none."""
    optimizer = sgd(model)
    before: list[Tensor | None] = [None for _ in model.parameters()]
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(pile):
            loss_of(model, batch(pile * step + number)).backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for p, late in zip(model.parameters(), before, strict=True):
            p.grad = late
        optimizer.step()
        before = found
    return [p.detach().clone() for p in model.parameters()]


def lagged(model: nn.Module, place: Place, steps: range = range(STEPS)) -> list[Tensor]:
    optimizer = sgd(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, place(batch(step))).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_step_applies_the_gradient_before(ranks: int) -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=ranks)
        return lagged(hc.distribute(small_model(), mesh, lag=1), lambda x: part(x, mesh))

    check_equal(run_local(ranks, run), reference(small_model()))


def test_the_first_step_applies_none() -> None:
    def run() -> list[bool]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh, lag=1)
        found = []
        for step in range(2):
            model.zero_grad()
            loss_of(model, part(batch(step), mesh)).backward()
            found.append(all(p.grad is not None for p in model.parameters()))
        return found

    assert run_local(2, run) == [[False, True]] * 2


def test_accumulation() -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh, lag=1)
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            with hc.no_sync(model):
                loss_of(model, part(batch(2 * step), mesh)).backward()
            loss_of(model, part(batch(2 * step + 1), mesh)).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    check_equal(run_local(2, run), reference(small_model(), pile=2))


def test_gradients_kept_over_a_step_are_refused() -> None:
    def run() -> None:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh, lag=1)
        for step in range(4):
            loss_of(model, part(batch(step), mesh)).backward()

    with pytest.raises(hc.MeshError, match="zero_grad"):
        run_local(2, run)


@pytest.mark.parametrize("when", [0, 1, 4])
def test_a_run_goes_on_where_it_was_saved(when: int) -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        first = hc.distribute(small_model(), mesh, lag=1)
        optimizer = sgd(first)
        for step in range(when):
            optimizer.zero_grad()
            loss_of(first, part(batch(step), mesh)).backward()
            optimizer.step()
        saved: Any = (first.state_dict(), optimizer.state_dict(), hc.lagged_gradients(first))
        second = small_model()
        second.load_state_dict(saved[0])
        hc.distribute(second, mesh, lag=1)
        resumed = sgd(second)
        resumed.load_state_dict(saved[1])
        hc.load_lagged_gradients(second, saved[2])
        for step in range(when, STEPS):
            resumed.zero_grad()
            loss_of(second, part(batch(step), mesh)).backward()
            resumed.step()
        return [p.detach().clone() for p in second.parameters()]

    check_equal(run_local(2, run), reference(small_model()))


def test_saving_disturbs_nothing() -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh, lag=1)
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, part(batch(step), mesh)).backward()
            optimizer.step()
            hc.lagged_gradients(model)
        return [p.detach().clone() for p in model.parameters()]

    check_equal(run_local(2, run), reference(small_model()))


class Branch(nn.Module):
    """Of a row's sign depends which layer it takes, and of the step which of two is used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.never = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.c(self.a(row) if row[0] > 0 else self.b(row)) for row in x])


def test_ranks_that_go_different_ways() -> None:
    make = drawn(lambda: Branch().double())

    def run() -> list[Tensor]:
        mesh = Mesh(data=4)
        return lagged(hc.distribute(make(), mesh, lag=1), lambda x: part(x, mesh))

    check_equal(run_local(4, run), reference(make()))
