"""What else a program does with a model whose parameters are cut: optimizers, state, sharing, mistakes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_axes import compared, mean_square
from test_model_axes import made, mlp, numbers
from torch import Tensor, nn

import halocline as hc
from halocline.errors import MeshError, Refused
from halocline.reduction import engine_of
from halocline.testing.compare import EXACT, relative_error
from halocline.world import run_local

ROWS = {"0.weight": {0: "model"}, "0.bias": {0: "model"}, "2.weight": {1: "model"}}
CUBE = {"data": 2, "depth": 2, "model": 2}


def trained(
    model: nn.Module, make: Callable[[Any], Any], x: Tensor, steps: int = 4, clip: float | None = None
) -> Tensor:
    """All weights after some steps, as one vector."""
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mean_square(model(x * (step + 1))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat([hc.gather(p.detach()).reshape(-1) for p in model.parameters()])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize(
    ("name", "clip"), [*((name, None) for name in OPTIMIZERS), ("adamw", 0.05), ("sgd foreach", 0.05)]
)
def test_stock_optimizers(name: str, clip: float | None) -> None:
    model, x = mlp(), numbers(4, 6)
    true = trained(copy.deepcopy(model), OPTIMIZERS[name], x, clip=clip)

    def body() -> Tensor:
        mesh = hc.Mesh(data=2, model=2)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=ROWS)
        return trained(cut, OPTIMIZERS[name], hc.shard(x, mesh, {0: "data"}), clip=clip)

    for found in run_local(4, body):
        assert relative_error(found, true) <= EXACT


def test_an_optimizer_made_before_distribute_steps_cut_parameters() -> None:
    model, x = mlp(), numbers(4, 6)

    def body() -> tuple[Tensor, list[int]]:
        mesh, own = hc.Mesh(model=2), copy.deepcopy(model)
        optimizer = torch.optim.Adam(own.parameters(), 0.1)
        hc.distribute(own, mesh, layout=ROWS)
        found = trained(own, lambda _: optimizer, x)
        return found, [hc.unwrap(s["exp_avg"]).numel() for s in optimizer.state.values()]

    true = trained(copy.deepcopy(model), lambda p: torch.optim.Adam(p, 0.1), x)
    for found, sizes in run_local(2, body):
        assert relative_error(found, true) <= EXACT
        assert sizes == [24, 4, 20, 5]  # moments of this rank's tiles alone


class Shared(nn.Module):
    """One weight under two names, used three times, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 6)
        self.inner = nn.Linear(6, 6)
        self.fixed = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.fixed.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.inner(self.tokens(tokens))))
        return self.head(self.fixed(x))


@pytest.mark.parametrize("dims", [{0: "model"}, {1: "model"}, {0: "depth", 1: "model"}, {0: "data"}])
def test_tied_weights_and_frozen_ones(dims: dict[int, str]) -> None:
    model, tokens = made(Shared()), torch.arange(12).reshape(4, 3) % 10
    layout = {"tokens.weight": dims, "inner.*": {0: "model"}, "fixed.weight": {1: "model"}}
    error = compared(model, [tokens], CUBE, layout, {0: "data", 1: "depth"}, twice=True)
    assert error <= EXACT


def test_gradient_accumulation_and_unfreezing() -> None:
    model, x = mlp(), numbers(4, 6)

    def run(model: nn.Module, x: Tensor, pause: Callable[[], Any]) -> list[Tensor]:
        model[2].weight.requires_grad_(False)
        with pause():
            mean_square(model(x)).backward()
        mean_square(model(2 * x)).backward()
        model[2].weight.requires_grad_(True)
        mean_square(model(3 * x)).backward()
        return [hc.gather(p.grad).detach() for p in model.parameters()]

    def body() -> list[Tensor]:
        mesh = hc.Mesh(data=2, model=2)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=ROWS)
        return run(cut, hc.shard(x, mesh, {0: "data"}), lambda: hc.no_sync(cut))

    from contextlib import nullcontext

    true = run(copy.deepcopy(model), x, nullcontext)
    for found in run_local(4, body):
        assert all(relative_error(a, b) <= EXACT for a, b in zip(found, true, strict=True))


def test_local_batches_are_averaged_as_in_ddp() -> None:
    """Plain inputs: each replica of axis data has a batch of its own, the ranks of axis model the same one."""
    model, x = mlp(), numbers(4, 6)

    def body() -> list[Tensor]:
        mesh = hc.Mesh(data=2, model=2)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=ROWS)
        mean_square(cut(x.chunk(2)[mesh.coordinates["data"]])).backward()
        return [hc.gather(p.grad) for p in cut.parameters()]

    plain = copy.deepcopy(model)
    mean_square(plain(x)).backward()
    for found in run_local(4, body):
        assert all(relative_error(a, p.grad) <= EXACT for a, p in zip(found, plain.parameters(), strict=True))


def test_ranks_of_a_cut_parameter_must_bring_the_same_input() -> None:
    model = mlp()

    def body() -> str:
        mesh = hc.Mesh(data=2, model=2)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=ROWS)
        with pytest.raises(Refused, match="bring different tensors") as caught:
            cut(numbers(2, 6, seed=mesh.rank))
        return str(caught.value)

    assert "a model whose parameters are cut" in run_local(4, body)[0]


@pytest.mark.parametrize("mesh", [{"model": 2}, {"data": 2, "model": 2}])
def test_next_forward_steps_whole_parameters_later(mesh: dict[str, int]) -> None:
    model, x = mlp(), numbers(4, 6)
    make = OPTIMIZERS["adamw"]
    true = trained(copy.deepcopy(model), make, x)

    def body() -> Tensor:
        ranks, own = hc.Mesh(**mesh), copy.deepcopy(model)
        optimizer = make(own.parameters())
        hc.distribute(own, ranks, layout=ROWS, overlap="next-forward", optimizer=optimizer)
        found = trained(own, lambda _: optimizer, hc.shard(x, ranks, {0: "data"}) if "data" in mesh else x)
        hc.flush(own)
        return torch.cat([hc.gather(p.detach()).reshape(-1) for p in own.parameters()]) + 0 * found

    for found in run_local(len(mesh) * 2, body):
        assert relative_error(found, true) <= EXACT


def test_what_is_refused() -> None:
    def body() -> None:
        mesh = hc.Mesh(data=2, model=2)
        with pytest.raises(MeshError, match=r"no parameter is called '0.weights'; the nearest are 0.weight"):
            hc.distribute(mlp(), mesh, layout={"0.weights": {0: "model"}})
        with pytest.raises(MeshError, match=r"0.bias of shape \[8\] cannot be cut as \{1: 'model'\}"):
            hc.distribute(mlp(), mesh, layout={"0.*": {1: "model"}})
        with pytest.raises(MeshError, match="axis"):
            hc.distribute(mlp(), mesh, layout={"0.weight": {0: "depth"}})
        with pytest.raises(MeshError, match="an axis may cut one dim only"):
            hc.distribute(mlp(), mesh, layout={"0.weight": {0: "model", 1: "model"}})
        with pytest.raises(MeshError, match="are one parameter, and are cut differently"):
            hc.distribute(Shared(), mesh, layout={"tokens.weight": {0: "model"}, "head.weight": {1: "model"}})
        with pytest.raises(MeshError, match="layout maps patterns"):
            hc.distribute(mlp(), mesh, layout={"0.weight": "model"})  # type: ignore[dict-item]
        with pytest.raises(MeshError, match="lag=1"):
            hc.distribute(mlp(), mesh, layout=ROWS, lag=1)
        with pytest.raises(MeshError, match="averaging"):
            hc.distribute(mlp(), mesh, layout=ROWS, averaging="external")
        used = mlp()
        used[0].weight.grad = torch.zeros_like(used[0].weight)
        with pytest.raises(MeshError, match="has a gradient or hooks"):
            hc.distribute(used, mesh, layout=ROWS)

    run_local(4, body)


def test_state_and_copies() -> None:
    model, x = mlp(), numbers(4, 6)

    def body() -> None:
        mesh = hc.Mesh(data=2, model=2)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=ROWS)
        assert isinstance(cut[0].weight, nn.Parameter) and cut[0].weight.shape == (8, 6)
        assert hc.unwrap(cut[0].weight).shape == (4, 6)
        state = hc.gather(cut.state_dict())
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        other = hc.distribute(mlp().float().double(), mesh, layout={"0.weight": {1: "model"}})
        other.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        other.load_state_dict(cut.state_dict())  # from one layout to another
        assert all(
            torch.equal(value, hc.gather(other.state_dict()[name])) for name, value in model.state_dict().items()
        )
        twin = copy.deepcopy(cut)
        assert isinstance(twin[0].weight, nn.Parameter) and twin[0].weight.requires_grad
        hc.distribute(twin, mesh)  # with the cuts that it has
        mean_square(twin(hc.shard(x, mesh, {0: "data"}))).backward()
        plain = copy.deepcopy(model)
        mean_square(plain(x)).backward()
        for copied, parameter in zip(twin.parameters(), plain.parameters(), strict=True):
            assert relative_error(hc.gather(copied.grad), parameter.grad) <= EXACT
        assert cut[0].weight.grad is None

    run_local(4, body)


def test_a_model_is_converted_before_it_is_cut() -> None:
    def body() -> None:
        cut = hc.distribute(mlp(), hc.Mesh(model=2), layout=ROWS)
        first = cut[0].weight
        cut.to("cpu").double().train()
        assert cut[0].weight is first
        with pytest.raises(Refused, match="convert a model"):
            cut.float()

    run_local(2, body)


def test_whoever_asks_sees_true_gradients() -> None:
    """Hooks on cut parameters and gradients of intermediate results, whole on the axis that cuts the weights."""
    model, x = mlp(), numbers(4, 6)

    def look(model: nn.Module, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        model[0].weight.register_hook(lambda g: seen.append(hc.gather(g).clone()))
        hidden = model[0](x)
        middle = torch.tanh(hidden)
        out = model[2](middle)
        seen += [hc.gather(g) for g in torch.autograd.grad(mean_square(out), [middle, hidden], retain_graph=True)]
        mean_square(out).backward()
        return seen

    def body() -> list[Tensor]:
        mesh = hc.Mesh(data=2, model=2)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout={"2.weight": {0: "model"}, "0.weight": {0: "model"}})
        return look(cut, hc.shard(x, mesh, {0: "data"}))

    true = look(copy.deepcopy(model), x)
    for found in run_local(4, body):
        assert len(found) == len(true) == 3
        assert all(relative_error(a, b) <= EXACT for a, b in zip(found, true, strict=True))


class Annotated(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.rise, self.fall, self._first, self._second = nn.Linear(6, 8), nn.Linear(8, 6), first, second

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(hc.annotate(self.rise(x), self._first))
        return self.fall(hc.annotate(y, self._second))


@pytest.mark.parametrize("first", [{-1: "model"}, {0: "data", 1: "model"}, hc.WHOLE])
@pytest.mark.parametrize("second", [{1: hc.WHOLE}, {0: "model"}])
@pytest.mark.parametrize("dims", [{}, {0: "data"}])
def test_annotations_change_nothing_but_places(first: Any, second: Any, dims: dict[int, str]) -> None:
    model = made(Annotated(first, second))
    layout = {"rise.weight": {0: "model"}}
    assert compared(model, [numbers(4, 6)], {"data": 2, "model": 2}, layout, dims, twice=True) <= EXACT


def test_an_annotation_lays_a_tensor() -> None:
    def body() -> None:
        mesh = hc.Mesh(data=2, model=2)
        x = hc.shard(torch.arange(24.0).reshape(4, 6), mesh, {0: "data"})
        y = hc.annotate(x, {1: "model"})
        assert y.sharding.dims_by_axis() == {0: "data", 1: "model"}
        assert hc.annotate(y, {0: "model"}).sharding.dims_by_axis() == {0: "model"}
        assert hc.annotate(y, {1: hc.WHOLE}).sharding.dims_by_axis() == {0: "data"}
        assert torch.equal(hc.annotate(y, hc.WHOLE), torch.arange(24.0).reshape(4, 6))
        plain = torch.ones(4)
        assert hc.annotate(plain, {0: "model"}) is plain
        assert hc.annotate(plain, {0: "model"}, mesh=mesh).sharding.dims_by_axis() == {0: "model"}
        with pytest.raises(hc.ShardingError, match="dim 5 does not exist"):
            hc.annotate(x, {5: "model"})

    run_local(4, body)


class Built(nn.Module):
    """Built on meta as torch's own modules are: reset_parameters fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4, 6))
        self.attention, self.tokens = nn.Linear(6, 6), nn.Embedding(5, 6)


def test_models_on_meta_are_filled_tile_by_tile() -> None:
    layouts: list[dict[str, dict[int, str]]] = [{}, {"*.weight": {0: "model"}}, {"net.3.weight": {1: "model"}}]
    found = []
    for layout in layouts:

        def body(layout: dict[str, dict[int, str]] = layout) -> dict[str, Tensor]:
            with torch.device("meta"):
                model = Built()
            with hc.random.reproducible(5):
                hc.distribute(model, hc.Mesh(model=2), layout=layout)
            assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
            return {name: hc.gather(each).clone() for name, each in model.state_dict().items()}

        ranks = run_local(2, body)
        assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
        found.append(ranks[0])
    one = Built()
    with hc.random.reproducible(5), torch.no_grad():
        for module in one.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    assert all(torch.equal(value, each[name]) for each in found for name, value in one.state_dict().items())


def test_a_module_on_meta_that_nothing_fills_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, device="meta"))

    def body() -> None:
        with pytest.raises(Refused, match="no reset_parameters"):
            hc.distribute(Bare(), hc.Mesh(model=2), layout={"scale": {0: "model"}})

    run_local(2, body)


def test_gradients_travel_over_the_axes_on_which_a_parameter_is_whole() -> None:
    def body() -> list[tuple[list[str], int]]:
        mesh = hc.Mesh(**CUBE)
        cut = hc.distribute(mlp(), mesh, layout={"0.weight": {0: "model"}, "2.weight": {0: "depth", 1: "model"}})
        engine = engine_of(cut)
        assert engine is not None
        return [(each.names, len(each.ranks)) for each in (engine, *engine.partners)]

    for engines in run_local(8, body):
        assert engines == [(["0.bias", "2.bias"], 8), (["0.weight"], 4), (["2.weight"], 2)]
