"""Products whose sums travel in tiles: the same values and gradients for every size of tile, at every place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from model_axes import Layout, gradients, mean_square
from test_model_axes import made, numbers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.testing import shared_pool
from halocline.testing.compare import EXACT, relative_error
from halocline.world import run_local, sameness

TILES = [0, 64, 300]  # none; eight; a few
MESHES = [{"model": 2}, {"model": 3}, {"data": 2, "model": 2}, {"other": 2, "model": 2}]
LAYOUTS: dict[str, Layout] = {
    "rows, columns": {"rise.*": {0: "model"}, "gate.*": {0: "model"}, "fall.weight": {1: "model"}},
    "columns, rows": {"rise.weight": {1: "model"}, "gate.weight": {0: "model"}, "fall.*": {0: "model"}},
    "columns": {"rise.weight": {1: "model"}, "gate.weight": {1: "model"}, "fall.weight": {1: "model"}},
}
WRAPPED: dict[str, Callable[..., Any]] = {
    "as it is": lambda run, x: run(x),
    "checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
}


class Gated(nn.Module):
    """One input that enters one product, another that enters two, and products without anything between them."""

    def __init__(self, wrapped: str = "as it is") -> None:
        super().__init__()
        self.norm, self.wrapped = nn.LayerNorm(6), wrapped
        self.rise, self.gate, self.fall = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)

    def block(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.fall(torch.tanh(self.rise(y)))
        y = torch.sin(self.norm(x))
        return x + self.fall(torch.tanh(self.rise(y)) * self.gate(y))

    def forward(self, x: Tensor) -> Tensor:
        wrap = WRAPPED[self.wrapped]
        x = wrap(self.block, wrap(self.block, torch.sin(self.norm(x))))
        return self.fall(self.rise(self.fall(self.rise(x))))


def found(model: nn.Module, mesh: dict[str, int], tile: int, layout: Layout, twice: bool) -> dict[str, Tensor]:
    """Loss and gradients on this rank."""
    ranks, x = hc.Mesh(hc.Choices(product_tile=tile), **mesh), numbers(5, 3, 6)
    cut = hc.distribute(copy.deepcopy(model), ranks, layout=layout)
    return gradients(cut, [hc.shard(x, ranks, {0: "data"}) if "data" in mesh else x], mean_square, twice)


def check(every: list[dict[str, Tensor]], true: dict[str, Tensor]) -> None:
    scale = max(each.abs().max().item() for each in true.values())
    for each in every:
        assert set(each) == set(true)
        assert all(relative_error(each[name], true[name], scale) <= EXACT for name in true)


@pytest.fixture(autouse=True, params=["compared", pytest.param("summed", marks=pytest.mark.long)])
def _however_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of any size are compared before their mean is taken, as large ones are, or never."""
    monkeypatch.setattr(sameness, "LEAST", 0 if request.param == "compared" else 1 << 40)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_change_nothing(layout: str, mesh: dict[str, int]) -> None:
    model = made(Gated())
    true = gradients(copy.deepcopy(model), [numbers(5, 3, 6)], mean_square, twice=True)
    for tile in TILES:
        every = run_local(prod(mesh.values()), lambda tile=tile: found(model, mesh, tile, LAYOUTS[layout], True))
        check(every, true)


@pytest.mark.parametrize(
    ("wrapped", "mesh"),
    [("checkpoint", {"model": 2}), ("checkpoint", {"data": 2, "model": 2}), ("reentrant", {"data": 2, "model": 2})],
)
def test_checkpoints_recompute_tiles(wrapped: str, mesh: dict[str, int]) -> None:
    model = made(Gated(wrapped))
    true = gradients(copy.deepcopy(model), [numbers(5, 3, 6)], mean_square, twice=False)
    for tile in TILES:
        every = run_local(
            prod(mesh.values()), lambda tile=tile: found(model, mesh, tile, LAYOUTS["rows, columns"], False)
        )
        check(every, true)


def on_processes(tile: int, layout: str, least: int) -> dict[str, Tensor]:
    """Of a model whose sums go by the transport, on ranks that are processes."""
    sameness.LEAST = least
    return found(made(Gated()), {"model": 2}, tile, LAYOUTS[layout], True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_between_processes(layout: str) -> None:
    true = gradients(made(Gated()), [numbers(5, 3, 6)], mean_square, twice=True)
    for tile in TILES:
        check(shared_pool(2).run(on_processes, tile, layout, sameness.LEAST, deadline=60.0), true)


def looks(model: Gated, x: Tensor) -> list[Tensor]:
    """Gradients of what enters products, asked for in turns, with products made between the passes."""
    y = torch.sin(model.norm(x))
    first = mean_square(model.rise(y))
    seen = [*torch.autograd.grad(first, [y], retain_graph=True)]
    second = mean_square(model.gate(y))  # now the input enters two products
    seen += torch.autograd.grad(first + second, [y], retain_graph=True)
    seen += torch.autograd.grad(first, [y], retain_graph=True)
    z = torch.cos(y)
    third = mean_square(model.rise(z)) + (z * y).sum() + first
    seen += [torch.autograd.grad(third, [each], retain_graph=True)[0] for each in (z, y, z)]
    # Of results that are made from each other, at once: torch takes the later one's before its hooks run.
    seen += torch.autograd.grad(third, [y, z], retain_graph=True)
    slopes = torch.autograd.grad(third, [z, y], create_graph=True)
    penalty = slopes[0].square().sum() + slopes[1].square().sum()
    seen += [*slopes, *torch.autograd.grad(penalty, [y, z, *model.norm.parameters()])]
    return [hc.gather(each).detach() for each in seen]


@pytest.mark.parametrize("tile", TILES)
def test_whoever_asks_sees_true_gradients(tile: int) -> None:
    """Of plain tensors, the same on every rank."""
    model, x = made(Gated()), numbers(5, 3, 6)
    true = looks(copy.deepcopy(model), x)

    def body() -> list[Tensor]:
        mesh = hc.Mesh(hc.Choices(product_tile=tile), model=2)
        return looks(hc.distribute(copy.deepcopy(model), mesh, layout=LAYOUTS["rows, columns"]), x)

    for each in run_local(2, body):
        assert all(relative_error(a, b) <= EXACT for a, b in zip(each, true, strict=True))


def test_under_autocast_a_product_is_computed_in_its_dtype() -> None:
    model, x = made(Gated()).float(), numbers(5, 3, 6).float()

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.fall(model.rise(torch.sin(model.norm(x))))  # type: ignore[operator]
        mean_square(y).backward()
        return y.detach(), hc.gather(model.rise.weight.grad)  # type: ignore[union-attr, arg-type]

    true = run(copy.deepcopy(model))

    def body() -> tuple[Tensor, Tensor]:
        mesh = hc.Mesh(hc.Choices(product_tile=32), model=2)
        return run(hc.distribute(copy.deepcopy(model), mesh, layout=LAYOUTS["rows, columns"]))

    for each in run_local(2, body):
        assert each[0].dtype == true[0].dtype == torch.bfloat16
        assert all(relative_error(a.double(), b.double()) <= 0.05 for a, b in zip(each, true, strict=True))


USES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "alike": lambda y, rank: y.square().sum(),
    "times a number of its own": lambda y, rank: (y * (rank + 1.5)).sum(),
    "on the first rank alone": lambda y, rank: y.square().sum() * float(rank == 0),
    "to a power of its own": lambda y, rank: (y.abs() ** (1 + 0.1 * rank)).sum(),
}


@pytest.mark.parametrize("tile", [0, 32])
@pytest.mark.parametrize("axis", ["data", "model", "depth"])
@pytest.mark.parametrize("use", USES)
def test_ranks_may_use_a_plain_result_differently(use: str, axis: str, tile: int) -> None:
    """A plain value's gradient is the mean of what the ranks hold, whatever each of them does with it."""
    model, x = made(Gated()), numbers(5, 3, 6)

    def run(model: Gated, x: Tensor, ranks: list[int]) -> dict[str, Tensor]:
        y = torch.sin(model.norm(x))
        results = model.fall(model.rise(y)), torch.einsum("btc,btd->cd", x, model.rise(x))
        terms = [USES[use](hc.annotate(each, hc.WHOLE), rank) for each in results for rank in ranks]
        terms += [USES[use](hc.annotate(y, hc.WHOLE), rank) for rank in ranks]
        (torch.stack(terms).sum() / len(ranks)).backward()
        return {name: hc.gather(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    true = run(copy.deepcopy(model), x, [0, 1])

    def body() -> dict[str, Tensor]:
        mesh = hc.Mesh(hc.Choices(product_tile=tile), **{axis: 2})
        layout = (
            {} if axis == "data" else {name: dict.fromkeys(d, axis) for name, d in LAYOUTS["rows, columns"].items()}
        )
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=layout)
        return run(cut, hc.shard(x, mesh, {0: axis}) if axis != "model" else x, [mesh.rank])

    check(run_local(2, body), true)
