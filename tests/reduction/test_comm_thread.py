"""The thread that copies gradients, begins their sums and makes steps beside the rank's own: what it must not break."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.reduction.buckets.cutting import BucketTiming, LinkCost, done_by_need, urgent_lateness
from halocline.reduction.transport.rings import Rings
from halocline.testing import shared_pool
from halocline.world import Label, Mesh
from halocline.world.mesh import this_world

WIDTH, STEPS = 130, 6
PARTED = 5  # the step after whose backward ranks know, one step late, that they part


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def trained_into_own_memory(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> list[Tensor]:
    """Gradients are added to tensors of the user's, who sets them to zero as soon as the step was asked for."""
    own = [torch.zeros_like(parameter) for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
        for parameter, memory in zip(model.parameters(), own, strict=True):
            parameter.grad = memory
        model(x).square().mean().backward()
        optimizer.step()
        for memory in own:
            memory.zero_()
    return [parameter.detach().clone() for parameter in model.parameters()]


def on_a_rank() -> list[Tensor]:
    mesh, model = Mesh(data=-1), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    hc.distribute(model, mesh, overlap="next-forward", optimizer=optimizer)
    engine = engine_of(model)
    assert engine is not None and engine.queue is not None and engine.queue.told
    return trained_into_own_memory(model, optimizer, mesh.rank, mesh.size)


def test_gradients_in_memory_of_the_users() -> None:
    model = network()
    true = trained_into_own_memory(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 0, 1)
    for found in shared_pool(2).run(on_a_rank, deadline=60.0):
        for mine, one_rank in zip(found, true, strict=True):
            torch.testing.assert_close(mine, one_rank, rtol=1e-12, atol=1e-14)


def sums_in_a_hurry() -> tuple[float, float]:
    """The last rank looks at the large sum before it knows of the small one, the others the other way round."""
    rings = Rings(this_world(), "levels", urgent=True)
    small, large = torch.ones(100), torch.ones(600_000)
    first = rings.begin(large, Label("large", "backward", "gradients", 2.0))
    if this_world().rank == this_world().size - 1:
        time.sleep(0.3)
    second = rings.begin(small, Label("small", "backward", "gradients", 1.0))
    first.wait()
    second.wait()
    rings.close()
    return float(small.sum()), float(large.sum())


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_that_hurry_with_different_sums(ranks: int) -> None:
    """Of three ranks one stands in for another, so that they connect in other orders than they sum."""
    assert shared_pool(ranks).run(sums_in_a_hurry, deadline=60.0) == [(100.0 * ranks, 600_000.0 * ranks)] * ranks


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, way: bool) -> Tensor:
        return (self.left(x) + self.right(x) if way else self.left(x)).tanh()


def ways_that_part(slow: bool) -> list[Tensor]:
    """From some step on ranks take different ways. A clerk has still to begin the sums of the step before when
    those begin for which the ranks have agreed."""
    mesh = Mesh(data=-1)
    torch.manual_seed(1)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hc.distribute(model, mesh, lag=1, rings="levels")
    engine: Any = engine_of(model)
    begin, step = engine.queue._begin, 0

    def begin_slowly(added: Any) -> None:
        time.sleep(1.5 if step == PARTED else 0.0)
        begin(added)

    if slow and mesh.rank == 0:
        engine.queue._begin = begin_slowly
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None] * (1 + mesh.rank)
    for step in range(PARTED + 3):
        assert engine.plan is None or engine.plan.dynamic == (step > PARTED)
        optimizer.zero_grad()
        time.sleep(0.3 if step == PARTED else 0.0)  # the clerk has taken in what came, and looks for what to begin
        model(x, step < PARTED - 1 or mesh.rank == 0).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_sums_begin_in_one_order_when_ranks_part() -> None:
    quick, slow = (shared_pool(2).run(ways_that_part, late, deadline=60.0) for late in (False, True))
    for mine, theirs, before in zip(*slow, quick[0], strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, before, rtol=1e-12, atol=1e-14)


PROGRAM = """
import torch
import halocline as hc
from torch import nn

mesh = hc.Mesh(data=-1)
torch.manual_seed(1)
model = nn.Sequential(*(nn.Linear(900, 900) for _ in range(6)))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
hc.distribute(model, mesh, {how})
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 900)).square().mean().backward()
    optimizer.step()
if mesh.rank == 0:
    print(len(model.state_dict()), "saved")
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ['overlap="next-forward", optimizer=optimizer', "lag=1"])
def test_a_program_that_ends_right_after_a_step(how: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Sums are under way on all ranks then, one of which still wants its weights."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(how=how))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0 and "12 saved" in ended.stdout, ended.stderr[-2000:]


def test_what_is_needed_first_breaks_in() -> None:
    assert done_by_need([0.0, 1.0, 1.0], [9.0, 2.0, 1.0], [4.0, 1.0, 1.0]) == [6.0, 3.0, 2.0]


def test_small_messages_do_not_wait_for_those_under_way() -> None:
    link = LinkCost(0.0, 1.0)
    late = [urgent_lateness([BucketTiming(0.0, 5.0, size)], link, express=3, chunk=8) for size in (3, 4)]
    assert late == [-2.0, 3.0]
