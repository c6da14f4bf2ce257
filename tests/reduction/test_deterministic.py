"""Equal runs give equal bits, however the ranks' times differ from run to run."""

import hashlib
import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import halocline as hc
from halocline.reduction import engine_of
from halocline.reduction.buckets.cutting import LinkCost
from halocline.reduction.schedule.clock import FixedClock
from halocline.testing import shared_pool
from halocline.world import run_local

MODES: dict[str, dict[str, Any]] = {
    "backward": {},
    "levels": {"rings": "levels"},
    "auto": {"rings": "auto"},
    "next-forward": {"overlap": "next-forward"},
    "lag": {"lag": 1},
    "lag on rings": {"lag": 1, "rings": (2, 2)},
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    widths = [12, 300, 40, 500, 24, 700, 6]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def hash_of_weights(mode: str, run: int) -> str:
    """After some steps, in which each rank's gradients come at moments of chance."""
    mesh, model, chance = hc.Mesh(data=-1), network(), random.Random(f"{run} {time.perf_counter_ns()}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    how = dict(MODES[mode])
    if how.get("overlap"):
        how["optimizer"] = optimizer
    hc.distribute(model, mesh, deterministic=True, **how)
    nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda _: time.sleep(chance.choice((0, 0, 0.001, 0.004))))
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        model(x).square().mean().backward()
        optimizer.step()
    if how.get("overlap"):
        hc.flush(model)
    words = hashlib.sha256()
    for parameter in model.parameters():
        words.update(parameter.detach().numpy().tobytes())
    return words.hexdigest()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_four_equal_runs_have_one_hash(mode: str) -> None:
    found = {word for run in range(4) for word in shared_pool(4).run(hash_of_weights, mode, run, deadline=120.0)}
    assert len(found) == 1


def hashes_of_passes(mode: str, wire: str | None) -> list[str]:
    """The hash of the means of each of five backward passes over the same weights and the same input."""
    mesh, model = hc.Mesh(data=-1), network()
    how = dict(MODES[mode])
    if how.get("overlap"):
        how["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
    hc.distribute(model, mesh, deterministic=True, wire=wire, **how)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(mesh.rank))
    found = []
    for _ in range(5):
        model.zero_grad()
        model(x).square().mean().backward()
        if how.get("overlap"):
            how["optimizer"].step()
            hc.flush(model)
        words = hashlib.sha256()
        for parameter in model.parameters():
            words.update(b"none" if parameter.grad is None else parameter.grad.numpy().tobytes())
        found.append(words.hexdigest())
    return found[1:] if how.get("lag") else found  # the first step of lag has no means


@pytest.mark.parametrize(("mode", "wire"), [("backward", None), ("levels", None), ("lag on rings", "bf16")])
def test_a_pass_has_the_same_bits_before_there_is_a_plan_and_after(mode: str, wire: str | None) -> None:
    passes = shared_pool(4).run(hashes_of_passes, mode, wire, deadline=120.0)
    assert len({word for rank in passes for word in rank}) == 1


def test_groups_follow_from_order_and_sizes() -> None:
    def groups() -> list[list[int]]:
        model = hc.distribute(network(), hc.Mesh(data=2), deterministic=True)
        nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
        for node in nodes:
            node.register_prehook(lambda _: time.sleep(random.random() * 0.003))
        for _ in range(3):
            model(torch.ones(2, 12)).sum().backward()
        engine = engine_of(model)
        assert engine is not None and engine.plan is not None
        return [bucket.indices for bucket in engine.plan.buckets]

    first, again = run_local(2, groups), run_local(2, groups)
    assert first == again and len(first[0]) > 1


def test_the_default_is_to_be_deterministic_in_float64() -> None:
    def clocks() -> list[bool]:
        mesh = hc.Mesh(data=2)
        models = [hc.distribute(model, mesh) for model in (network(), network().double())]
        engines = [engine_of(model) for model in models]
        return [isinstance(engine.clock, FixedClock) for engine in engines if engine is not None]

    assert run_local(2, clocks) == [[False, True]] * 2


def test_a_fixed_clock_looks_at_no_watch() -> None:
    clock, other = FixedClock([8, 4, 100]), FixedClock([8, 4, 100])
    clock.learn({2: 5.0, 0: 7.0, 1: 7.5})
    other.learn({2: 1.0, 0: 1.1, 1: 90.0})
    assert clock.times == other.times and clock.link == LinkCost()
    clock.learn_link(3, 1 << 22, 0.5)
    assert clock.link == LinkCost() and not clock.time_to_look
