"""Checkpoints of cut parameters load on any other layout, bit for bit, and end as one plain file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import halocline as hc
from halocline.cli.app import app
from halocline.testing import shared_pool
from halocline.train import Checkpoints
from halocline.train.optimizers import load_optimizer
from halocline.world import Mesh

Layout = dict[str, dict[int, str]]
#: Sizes that do not divide evenly: DTensor cuts elsewhere than the library.
FIRST: Layout = {"0.weight": {0: "model"}, "0.bias": {0: "model"}, "2.weight": {1: "model"}}
SECOND: Layout = {"0.weight": {1: "model"}, "2.*": {0: "model"}}


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh | None, number: int) -> float:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    x = hc.shard(x, mesh, {0: "data"}) if mesh is not None and "data" in mesh.sizes else x
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def begun(sizes: dict[str, int], layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer, Mesh]:
    mesh = hc.Mesh(**sizes)
    model = hc.distribute(network(), mesh, layout=layout)
    return model, torch.optim.AdamW(model.parameters(), 0.05), mesh


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and moments, whole."""
    moments = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return [hc.gather(t.detach()).clone() for t in (*model.parameters(), *moments)]


def saved(folder: Path) -> list[Tensor]:
    model, optimizer, mesh = begun({"data": 2, "model": 2}, FIRST)
    for number in range(3):
        step(model, optimizer, mesh, number)
    with Checkpoints(folder, mesh) as checkpoints:
        checkpoints.save(3, state(model, optimizer), {}, wait=True)
    return bits(model, optimizer)


def loaded(folder: Path, sizes: dict[str, int], layout: Layout) -> tuple[list[Tensor], list[float]]:
    model, optimizer, mesh = begun(sizes, layout)
    with Checkpoints(folder, mesh) as checkpoints:
        found = checkpoints.load(3, {"model": model.state_dict()})
    model.load_state_dict(found.tensors["model"])
    load_optimizer(optimizer, found.tensors["optimizer"])
    own = bits(model, optimizer)
    return own, [step(model, optimizer, mesh, number) for number in range(3, 6)]


@pytest.mark.long
def test_any_layout_loads_what_another_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    true = shared_pool(4).run(saved, folder, deadline=60.0)[0]
    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.05)
    curve = [step(plain, optimizer, None, number) for number in range(6)][3:]
    for sizes, layout in (({"model": 4}, FIRST), ({"data": 2, "model": 2}, SECOND), ({"data": 4}, {})):
        for found, losses in shared_pool(4).run(loaded, folder, sizes, layout, deadline=60.0):
            assert all(torch.equal(a, b) for a, b in zip(found, true, strict=True)), sizes
            torch.testing.assert_close(losses, curve, rtol=1e-5, atol=1e-6)
    with Checkpoints(folder, None) as checkpoints:  # one process, without a mesh
        one = checkpoints.load(3).tensors["model"]
    assert all(torch.equal(a, b) for a, b in zip(one.values(), true, strict=False))
    file = tmp_path / "weights.pt"
    result = CliRunner().invoke(app, ["export", str(folder), str(file), "--json"])
    assert result.exit_code == 0 and json.loads(result.output.splitlines()[-1])["step"] == 3
    other = network()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a.detach(), b) for a, b in zip(other.parameters(), true, strict=False))


def test_what_cannot_be_exported_is_said_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path / "nowhere"), str(tmp_path / "weights.pt")])
    assert result.exit_code == 2 and "there is no folder" in result.output
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "weights.pt")])
    assert result.exit_code == 2 and "has no checkpoint" in result.output


@pytest.mark.long
def test_a_run_with_cut_weights_has_the_curve_of_one_rank(tmp_path: Path) -> None:
    curves = []
    for name, options in (("one", []), ("two", ["--ranks", "2", "--set", "model_parts=2"])):
        words = ["train", "transformer", *options, "--set", "steps=6", "--out", str(tmp_path / name), "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        lines = map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
        curves.append([line["loss"] for line in lines if "loss" in line and "step" in line])
    assert len(curves[0]) >= 6
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-4, atol=1e-5)


def test_weights_without_a_layout_are_asked_for(tmp_path: Path) -> None:
    words = ["train", "unet3d", "--ranks", "1", "--set", "model_parts=2", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "model_parts = 2" in result.output
