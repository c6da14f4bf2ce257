"""Ranks that take different ways through a model, and ranks that stop in the middle of it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, drawn, loss_of, part, small_model
from ranges import often
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import halocline as hc
from halocline.reduction import Coordinator, Doubling, Tree, engine_of
from halocline.testing import RankPool, shared_pool
from halocline.world import Mesh, run_local, this_world


class Branches(nn.Module):
    """Which of its layers are used is up to the caller."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))
        self.last = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        x = self.first(x)
        for index in used:
            x = x + torch.tanh(self.layers[index](x))
        return self.last(x)


branches = drawn(Branches)


def ways(step: int, ranks: int) -> list[list[int]]:
    """Of each rank; in some steps the same for all, in some all different, some layers by nobody."""
    rng = random.Random(step)
    if step % 3 == 0:
        return [[0, 1, 2]] * ranks
    return [sorted(rng.sample(range(4), rng.randrange(0, 4))) for _ in range(ranks)]  # the fifth by nobody, ever


def one_rank_of_branches(ranks: int, steps: int) -> list[Tensor]:
    model = branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        parts = batch(step).chunk(ranks)
        losses = [model(x, used).square().mean() for x, used in zip(parts, ways(step, ranks), strict=True)]
        (sum(losses) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def branches_on_rank(
    steps: int, control: Callable[..., Any] = Doubling, delays: bool = False
) -> tuple[list[Tensor], bool]:
    mesh = Mesh(data=-1) if this_world().size > 1 else Mesh(data=1)
    model = hc.distribute(branches(), mesh)
    engine = engine_of(model)
    assert engine is not None
    engine._make_control = control
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rng = random.Random(mesh.rank)
    for step in range(steps):
        optimizer.zero_grad()
        if delays and rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        model(part(batch(step), mesh), ways(step, mesh.size)[mesh.rank]).square().mean().backward()
        optimizer.step()
    unused = [p.grad is None for p in model.layers[4].parameters()]
    return [p.detach().clone() for p in model.parameters()], all(unused)


@pytest.mark.parametrize(
    "control",
    [Doubling, Tree, partial(Tree, radix=2), Coordinator],
    ids=["doubling", "tree", "tree of 2", "coordinator"],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_take_different_ways(ranks: int, control: Callable[..., Any]) -> None:
    found = run_local(ranks, lambda: branches_on_rank(12, control))
    check_equal([parameters for parameters, _ in found], one_rank_of_branches(ranks, 12))
    assert all(unused for _, unused in found)  # what nobody uses has no gradient


@pytest.mark.sweep
def test_many_random_steps_between_processes() -> None:
    """Random branches and delays: no hang, and the weights of one rank."""
    steps = often(200)
    found = shared_pool(4).run(branches_on_rank, steps, Doubling, True, deadline=120)
    check_equal([parameters for parameters, _ in found], one_rank_of_branches(4, steps))


def test_ranks_that_go_one_way_again_stop_asking() -> None:
    def run() -> tuple[bool, bool, list[Tensor]]:
        mesh = Mesh(data=2)
        model = hc.distribute(branches(), mesh)
        engine = engine_of(model)
        assert engine is not None
        was = False
        for step in range(80):
            used = [0, mesh.rank] if step < 3 else [0, 1]
            model(part(batch(step), mesh), used).square().mean().backward()
            was |= engine.plan is not None and engine.plan.dynamic
        return was, engine.plan is not None and engine.plan.dynamic, [p.grad.clone() for p in model.first.parameters()]  # type: ignore[union-attr]

    found = run_local(2, run)
    assert [(was, still) for was, still, _ in found] == [(True, False)] * 2


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_where_ranks_differ() -> None:
    """backward(create_graph=True): the mean is part of the graph on every rank, whoever had a gradient."""

    def penalty(model: nn.Module, losses: list[Tensor]) -> Tensor:
        (sum(losses) / len(losses)).backward(create_graph=True)  # type: ignore[union-attr]
        return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)  # type: ignore[return-value]

    def shared(model: Any) -> list[Tensor]:
        """What all ranks use: ``autograd.grad`` asks all ranks for the same."""
        return [*model.first.parameters(), *model.layers[1].parameters(), *model.last.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = hc.distribute(branches(), mesh)
        x, used = part(batch(0), mesh), [[0, 1], [1, 2]][mesh.rank]
        total = penalty(model, [model(x, used).square().mean()])
        return list(torch.autograd.grad(total, shared(model)))

    one = branches()
    both = [one(x, used).square().mean() for x, used in zip(batch(0).chunk(2), [[0, 1], [1, 2]], strict=True)]
    true = torch.autograd.grad(penalty(one, both), shared(one))
    for found in run_local(2, run):
        assert all(float((a - b).abs().max()) < 1e-12 for a, b in zip(found, true, strict=True))


def fails_in_the_middle(kind: str) -> str:
    """Rank 1 stops in the middle of the third backward."""
    mesh = Mesh(data=-1)
    mesh.world.set_deadline(2.0)
    model = hc.distribute(small_model(), mesh)

    def stop(gradients: tuple[Tensor, ...]) -> None:
        if mesh.rank == 1 and step == 2:
            if kind == "dies":
                os._exit(3)
            time.sleep(7)

    node = get_gradient_edge(model[2].weight).node  # hooks on a parameter run when backward has ended
    node.register_prehook(stop)
    step = 0
    for step in range(4):
        loss_of(model, part(batch(step), mesh), step).backward()
    return "no error"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dies", "stalls"])
def test_a_rank_that_stops_in_the_middle_of_a_sum_is_named(kind: str) -> None:
    with RankPool(3, collective_timeout=2.0) as pool:
        outcomes = pool.outcomes(fails_in_the_middle, kind, deadline=15, grace=8)
    texts = [str(outcome) for outcome in outcomes if outcome.rank != 1]
    assert len(texts) == 2
    assert all("RankFailure" in text and "rank 1" in text for text in texts), texts
