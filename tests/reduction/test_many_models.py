"""Many models in one process: what an engine used of threads and descriptors is left to the next."""

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.reduction.transport.leases import LeasePool, lease
from halocline.testing import RankPool, shared_pool
from halocline.world import run_local


def used() -> tuple[int, int]:
    """Descriptors and threads of this process, once those that are to end have ended."""
    seen, end = [], time.monotonic() + 20
    while time.monotonic() < end and len(seen) < 5:
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))  # noqa: PTH208
        time.sleep(0.1)
    return min(seen)


def steps(model: nn.Module, optimizer: Any, count: int = 3) -> Tensor:
    for step in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
    return next(model.parameters()).detach().clone()


def new(mesh: hc.Mesh | None, mode: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    how: dict[str, Any] = {
        "backward": {},
        "deterministic": {"deterministic": True},  # nothing is measured
        "next-forward": {"overlap": "next-forward", "optimizer": optimizer},
        "lag": {"lag": 1},
    }[mode]
    if mesh is not None:
        hc.distribute(model, mesh, **how)
    return model, optimizer


def distribute_many(mode: str, count: int, keep: bool) -> tuple[list[tuple[int, int]], bool]:
    """What is used after a few models and after all; and does each come to the same weights?"""
    mesh, kept, seen, weights = hc.Mesh(data=-1), [], [], []
    for number in range(count):
        model, optimizer = new(mesh, mode)
        weights.append(steps(model, optimizer))
        if keep:
            kept.append((model, optimizer))
        del model, optimizer
        if number in (count // 4, count - 1):
            seen.append(used())
    return seen, all(torch.equal(each, weights[0]) for each in weights)


def check_flat(pool: RankPool, mode: str, count: int, keep: bool) -> None:
    for ((few, before), (many, after)), same in pool.run(distribute_many, mode, count, keep, deadline=600.0):
        assert same
        assert many <= few + 20 and after <= before + 8, (few, many, before, after)


@pytest.mark.long
def test_models_that_are_gone_leave_nothing() -> None:
    check_flat(shared_pool(2), "deterministic", 24, keep=False)


@pytest.mark.trial
@pytest.mark.parametrize("mode", ["backward", "next-forward", "lag"])
def test_three_hundred_models_one_after_another(mode: str) -> None:
    with RankPool(2) as pool:
        check_flat(pool, mode, 300, keep=False)


@pytest.mark.trial
def test_three_hundred_models_at_a_time() -> None:
    with RankPool(2) as pool:
        check_flat(pool, "backward", 300, keep=True)


def test_more_models_than_channels_train_alike() -> None:
    """All in one backward, as parts of one loss; the last of them without channels of their own."""

    def run() -> list[Tensor]:
        mesh = hc.Mesh(data=2)
        models = [hc.distribute(nn.Linear(3, 1).double(), mesh) for _ in range(20)]
        for step in range(4):
            x = torch.full((2, 3), 1.0 + step + mesh.rank).double()
            order = models if mesh.rank == 0 else models[::-1]  # ranks may come to them in different orders
            for model in models:
                model.zero_grad()
            sum(model(x).square().sum() for model in order).backward()
        channels = [engine.channel for engine in map(engine_of, models) if engine is not None]
        assert len(set(channels)) == 17 and channels.count("gradients") == 4
        true = []
        for model in models:
            alone = nn.Linear(3, 1).double()
            alone.load_state_dict(model.state_dict())
            parts = [alone(torch.full((2, 3), 4.0 + rank).double()).square().sum() for rank in range(2)]
            (sum(parts) / 2).backward()
            true.append(torch.equal(alone.weight.grad, model.weight.grad))
        return true

    assert run_local(2, run) == [[True] * 20] * 2


class Freed(set[int]):
    """While it is looked through, an engine is collected."""

    def __init__(self, leases: LeasePool, free: set[int]) -> None:
        super().__init__(free)
        self._leases = leases

    def copy(self) -> "Freed":
        return Freed(self._leases, set.copy(self))

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self._leases.free.add(9)
            yield number


def test_engines_may_be_collected_while_another_looks_for_what_is_free() -> None:
    world = run_local(1, lambda: hc.Mesh(data=1))[0].world
    first, second = (lease(world, "thing", str) for _ in range(2))
    assert first is not None and second is not None
    first.release()
    second.release()
    leases = first._leases
    leases.free = Freed(leases, leases.free)
    found = lease(world, "thing", str)
    assert found is not None and found.thing == "0" and 9 in set.copy(leases.free)
