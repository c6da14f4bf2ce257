"""Long runs: a step leaves nothing behind, in no mode. What is kept of each of a million steps fills any memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import halocline as hc
from halocline.reduction import Lag, engine_of
from halocline.testing import shared_pool
from halocline.world import Mesh

STEPS = 150  # what one step happens to hold is little, divided by them
MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "next-forward": {"overlap": "next-forward"},
    "next-forward, flat": {"overlap": "next-forward", "rings": "flat"},
    "lag": {"lag": 1},
    "rings": {"rings": "levels"},
    "bf16": {"wire": "bf16"},
}


def objects(model: nn.Module) -> int:
    """When nothing is under way."""
    engine = engine_of(model)
    if isinstance(getattr(engine, "overlap", None), Lag):
        hc.lagged_gradients(model)
    hc.flush(model)
    gc.collect()
    return len(gc.get_objects())


def growth(axes: dict[str, int], options: dict[str, Any]) -> float:
    """Objects that Python's collector knows, more after each step than before it."""
    mesh = Mesh(**axes)
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if "overlap" in options:
        options = {**options, "optimizer": optimizer}
    model = hc.distribute(model, mesh, **options)
    before, sample = 0, torch.ones(2, 2, 16, 16)
    for step in range(10 + STEPS):  # in the first ten plans are made
        if step == 10:
            before = objects(model)
        optimizer.zero_grad()
        x = hc.shard(sample, mesh, {2: "height"}) if "height" in axes else sample
        model(x).square().mean().backward()
        optimizer.step()
    return (objects(model) - before) / STEPS


@pytest.mark.parametrize("mode", MODES)
def test_nothing_stays_of_a_step(mode: str) -> None:
    for found in shared_pool(2).run(growth, {"data": 2}, MODES[mode], deadline=60.0):
        assert found < 0.4


def test_nothing_stays_of_a_step_over_a_cut() -> None:
    for found in shared_pool(2).run(growth, {"height": 2}, {}, deadline=60.0):
        assert found < 0.4
