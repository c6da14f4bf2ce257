"""What steps models that mix cut and whole parameters: loss scaling, LARC, moving averages of weights, FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_axes import mean_square
from test_model_axes import mlp, numbers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halocline as hc
from halocline.testing import shared_pool
from halocline.testing.compare import EXACT, relative_error
from halocline.train import LARC
from halocline.world import run_local

ROWS = {"0.weight": {0: "model"}, "0.bias": {0: "model"}, "2.weight": {1: "model"}}
Run = Callable[[nn.Module, Tensor], list[Tensor]]


def weights(model: nn.Module) -> list[Tensor]:
    return [hc.gather(p.detach()).clone() for p in model.parameters()]


def scaled(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Steps with a loss scaler, one of which overflows in a single element of one weight's gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(mean_square(model(x * (step + 1)))).backward()
        if step in (1, 4):
            model[0].weight.grad[7 if step == 1 else 0, 2] = float("inf" if step == 1 else "nan")  # type: ignore[index, union-attr]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*weights(model), torch.tensor(scales, dtype=torch.float64)]


def by_layers(mode: str) -> Run:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        optimizer = LARC(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), mode=mode)
        for step in range(4):
            optimizer.zero_grad()
            mean_square(model(x * (step + 1))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=bool(step % 2))
            optimizer.step()
        return weights(model)

    return run


def moving_average(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(4):
        optimizer.zero_grad()
        mean_square(model(x * (step + 1))).backward()
        optimizer.step()
        mean.update_parameters(model)
    return weights(mean)


RUNS: dict[str, Run] = {
    "loss scaler": scaled,
    "LARC clip": by_layers("clip"),
    "LARC scale": by_layers("scale"),
    "moving average": moving_average,
}


@pytest.mark.parametrize("sizes", [{"model": 2}, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_one_rank(name: str, sizes: dict[str, int]) -> None:
    model, x = mlp(), numbers(4, 6)
    true = RUNS[name](copy.deepcopy(model), x)

    def body() -> list[Tensor]:
        mesh = hc.Mesh(**sizes)
        cut = hc.distribute(copy.deepcopy(model), mesh, layout=ROWS)
        return RUNS[name](cut, hc.shard(x, mesh, {0: "data"}) if "data" in sizes else x)

    for found in run_local(2 * len(sizes), body):
        assert all(relative_error(a, b) <= EXACT for a, b in zip(found, true, strict=True))


def in_half_precision(model: nn.Module, x: Tensor, **options: Any) -> tuple[float, float]:
    """The loss before and after some steps under fp16 autocast."""
    optimizer, scaler = torch.optim.Adam(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mean_square(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses[-1], scaler.get_scale()


def test_half_precision_lowers_the_scale_and_the_loss_as_on_one_rank() -> None:
    model, x = mlp().float(), numbers(4, 6).float()
    true = in_half_precision(copy.deepcopy(model), x)
    assert true[1] < 2.0**20

    def body() -> tuple[float, float]:
        mesh = hc.Mesh(data=2, model=2)
        return in_half_precision(hc.distribute(copy.deepcopy(model), mesh, layout=ROWS), hc.shard(x, mesh, {0: "data"}))

    for loss, scale in run_local(4, body):
        assert scale == true[1] and loss == pytest.approx(true[0], rel=0.02)


DEEP = {"deep.0.*": {0: "model"}, "deep.2.weight": {1: "model"}}


def with_whole_and_cut() -> nn.Module:
    """The cut weights are in `deep`, whose own norm is whole as all else is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    model.add_module("deep", nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8)))
    model.add_module("last", nn.Linear(8, 5))
    return model.double()


def stepped(model: nn.Module, x: Tensor, foreach: bool) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, foreach=foreach)
    for step in range(4):
        optimizer.zero_grad()
        mean_square(model(x * (step + 1))).backward()
        optimizer.step()
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else hc.gather(p).clone() for p in found]


def beside_fsdp(over: str, foreach: bool) -> list[Tensor]:
    """Whole parameters are FSDP2's: in pieces over the data axis with copies over the other, or over all ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = hc.Mesh(data=2, model=2), with_whole_and_cut()
    grid = torch.arange(4).reshape(2, 2).t() if over == "data" else torch.arange(4)
    ranks = DeviceMesh("cpu", grid, mesh_dim_names=("model", "data")[-grid.ndim :])
    cut = {p for name, p in model.named_parameters() if name in ("deep.0.weight", "deep.0.bias", "deep.2.weight")}
    for module in (model.deep, model):  # type: ignore[attr-defined]
        fully_shard(module, mesh=ranks, ignored_params=cut)  # type: ignore[arg-type]
    hc.distribute(model, mesh, layout=DEEP)
    return stepped(model, hc.shard(numbers(4, 6), mesh, {0: "data"}), foreach)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("over", ["data", "all ranks"])
def test_fsdp_shards_what_is_whole_beside_cut_weights(over: str, foreach: bool) -> None:
    true = stepped(with_whole_and_cut(), numbers(4, 6), foreach)
    for found in shared_pool(4).run(beside_fsdp, over, foreach, deadline=60.0):
        assert all(relative_error(a, b) <= EXACT for a, b in zip(found, true, strict=True))
