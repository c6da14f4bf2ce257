"""Sums over ranks that wait: parts are added first, and one sum follows; every answer is that of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from model_axes import gradients, mean_square
from test_model_axes import made, numbers
from torch import Tensor, nn

import halocline as hc
from halocline.errors import Refused
from halocline.program import dry, record
from halocline.testing.compare import EXACT, relative_error
from halocline.world import run_local

WAITING = hc.Choices(defer_sums=True)
MESHES = [
    pytest.param({"model": 2}, id="2"),
    pytest.param({"data": 2, "model": 2}, id="2x2"),
    pytest.param({"model": 3}, id="3", marks=pytest.mark.long),
]
LAYOUT = {"left.weight": {1: "model"}, "right.weight": {1: "model"}, "rise.*": {0: "model"}}


class Parallel(nn.Module):
    """Two products side by side, as attention and MLP in one residual; ``join`` puts them together."""

    def __init__(self, join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rise, self.norm = nn.Linear(6, 12), nn.LayerNorm(6)
        self.left, self.right, self.join = nn.Linear(12, 6), nn.Linear(12, 6), join

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.rise(x))
        return self.norm(self.join(x, self.left(h), self.right(h * h)))


def _written(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    total = a + b
    total += x
    return total


def _written_under_its_name(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The name still stands for the sum that waited."""
    a.add_(1.0)
    b[:, 0] = 0.5
    return a + b + x


def _written_by_a_view(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a[:, :2].mul_(3.0)
    torch.relu_(b)
    return a * 2 + b + x


def _used_without_gradient_first(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        a.clamp_(-0.2, 0.2)
        scale = b.exp().mean()
    return (a + b) * scale + b.sum(dtype=torch.float32).double()


#: How the results are joined, and sums over ranks that it takes.
JOINS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "added": (lambda x, a, b: a + b, 1),
    "residual": (lambda x, a, b: x + a + b, 2),
    "scaled": (lambda x, a, b: (3 * a - b / 2).neg() + x, 1),
    "parts by hand": (lambda x, a, b: hc.annotate(x, hc.PARTIAL) + a - b, 1),
    "completed by hand": (lambda x, a, b: hc.annotate(a, hc.WHOLE) + b, 2),
    "multiplied": (lambda x, a, b: a * b, 2),
    "used twice": (lambda x, a, b: torch.sin(a) + a * a, 1),
    "divided by": (lambda x, a, b: 1 / (a * a + 2) + torch.div(b, 0.5, rounding_mode="floor").detach(), 2),
    "written to": (_written, 1),
    "written under its name": (_written_under_its_name, 2),
    "written by a view": (_written_by_a_view, 2),
    "used without gradient first": (_used_without_gradient_first, 2),
    "reduced": (lambda x, a, b: x + (a + b).mean(), 1),
    "stretched": (lambda x, a, b: a + b[:1], 2),
    "another kind": (lambda x, a, b: a + b.float().double(), 2),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", JOINS)
def test_sums_that_wait_are_those_of_one_rank(name: str, mesh: dict[str, int]) -> None:
    model, x = made(Parallel(JOINS[name][0])), numbers(4, 6)
    loss = mean_square
    true = gradients(copy.deepcopy(model), [x], loss, twice=True)

    def body() -> dict[str, Tensor]:
        ranks = hc.Mesh(WAITING, **mesh)
        cut = hc.distribute(copy.deepcopy(model), ranks, layout=LAYOUT)
        given = hc.shard(x, ranks, {0: "data"}) if "data" in mesh else x
        return gradients(cut, [given], loss, twice=True)

    scale = max(each.abs().max().item() for each in true.values())
    for found in run_local(prod(mesh.values()), body):
        assert set(found) == set(true)
        assert all(relative_error(found[key], true[key], scale) <= EXACT for key in true)


def sums(join: Callable[..., Tensor], choices: hc.Choices) -> int:
    """Sums over ranks in a forward, in a dry world. Large enough that they travel as sums."""
    with dry(0, 2):
        with torch.device("meta"):
            model = Parallel(join)
            model.left, model.right, model.rise = nn.Linear(64, 512), nn.Linear(64, 512), nn.Linear(512, 64)
            model.norm, x = nn.LayerNorm(512), torch.zeros(512, 512)
        mesh = hc.Mesh(choices, model=2)
        hc.distribute(model, mesh, layout=LAYOUT)
        return len(record(lambda: model(x), mesh).sums)


@pytest.mark.parametrize(
    "name",
    [name for name in JOINS if name not in ("reduced", "another kind", "divided by", "used without gradient first")],
)
def test_a_sum_that_is_followed_by_a_sum_travels_once(name: str) -> None:
    join, count = JOINS[name]
    assert sums(join, WAITING) == count
    assert name == "parts by hand" or sums(join, hc.Choices(product_tile=0)) == 2


def test_a_sum_is_received_in_tiles() -> None:
    """A reduce-scatter in place of a sum and a cut: half of the bytes."""
    weight, x = numbers(6, 12, seed=1), numbers(4, 12)
    true = torch.nn.functional.linear(x, weight)

    def body(choices: hc.Choices) -> tuple[Tensor, Tensor, dict[int, str], Any]:
        mesh = hc.Mesh(choices, data=2, model=2)
        layer = nn.Linear(12, 6, bias=False).double()
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer = hc.distribute(layer, mesh, layout={"weight": {1: "model"}})
        y = hc.annotate(layer(hc.shard(x, mesh, {0: "data"})), {1: "model"})
        mean_square(y).backward()
        return hc.gather(y).detach(), hc.gather(layer.weight.grad), y.sharding.dims_by_axis(), y

    leaf = weight.clone().requires_grad_()
    mean_square(torch.nn.functional.linear(x, leaf)).backward()
    for choices in (WAITING, hc.Choices()):
        for y, gradient, dims, _ in run_local(4, lambda choices=choices: body(choices)):
            assert dims == {0: "data", 1: "model"}
            assert relative_error(y, true) <= EXACT and relative_error(gradient, leaf.grad) <= EXACT


def test_what_sees_only_a_part_is_refused() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    model = made(Parallel(lambda x, a, b: Double.apply(a) + b))

    def body() -> None:
        cut = hc.distribute(copy.deepcopy(model), hc.Mesh(WAITING, model=2), layout=LAYOUT)
        with pytest.raises(Refused, match="complete the sum before"):
            mean_square(cut(numbers(4, 6))).backward()

    run_local(2, body)
    mesh: list[hc.Mesh] = []

    def plain_on_two_axes() -> None:
        mesh.append(hc.Mesh(data=2, model=2))
        with pytest.raises(hc.ShardingError, match="does not say on which axes"):
            hc.annotate(torch.ones(4), hc.PARTIAL, mesh=mesh[-1])

    run_local(4, plain_on_two_axes)


USES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "added to a value of its own": lambda a, b, rank: torch.sin((a + b) + torch.full((6,), rank + 0.5).double()),
    "and the other way round": lambda a, b, rank: torch.sin(torch.full((4, 6), rank + 0.5).double() - a) + b,
    "completed, then scaled": lambda a, b, rank: torch.sin(a + b) * (rank + 1.5),
    "scaled": lambda a, b, rank: (a + b) * (rank + 1.5),
    "otherwise added": lambda a, b, rank: torch.add(a, b, alpha=rank + 1),
}


@pytest.mark.parametrize("use", USES)
def test_ranks_with_values_of_their_own(use: str) -> None:
    """Plain values may differ between ranks; parts that ranks make differently are no parts of one sum."""
    model, x = made(Parallel(lambda x, a, b: a + b)), numbers(4, 6)

    def run(model: Parallel, ranks: list[int]) -> list[Tensor]:
        h = torch.tanh(model.rise(x))
        a, b = model.left(h), model.right(h)
        (torch.stack([mean_square(USES[use](a, b, rank)) for rank in ranks]).sum() / len(ranks)).backward()
        return [hc.gather(p.grad) for p in model.parameters() if p.grad is not None]

    true = run(copy.deepcopy(model), [0, 1])

    def body() -> list[Tensor]:
        mesh = hc.Mesh(WAITING, model=2)
        return run(hc.distribute(copy.deepcopy(model), mesh, layout=LAYOUT), [mesh.rank])

    if use in ("scaled", "otherwise added"):
        with pytest.raises(hc.RankFailure):
            run_local(2, body)
        return
    for found in run_local(2, body):
        assert all(relative_error(a, b) <= EXACT for a, b in zip(found, true, strict=True))


def test_a_plain_tensor_in_parts_must_be_the_same_on_all_ranks() -> None:
    def body() -> None:
        mesh = hc.Mesh(model=2)
        with pytest.raises(Refused, match="bring different tensors"):
            hc.annotate(torch.full((4,), float(mesh.rank)), hc.PARTIAL, mesh=mesh)

    run_local(2, body)
