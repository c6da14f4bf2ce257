"""Pipelines in a plan: where it cuts, what it predicts, and that ``hc.pipeline`` follows it exactly."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.errors import MeshError, PlanError
from halocline.parts.cutting import CutTables, best_cut, step_seconds
from halocline.parts.schedules import make_schedule
from halocline.plan.api import make_subject, plan
from halocline.plan.cost import Prices
from halocline.plan.machine import Machine, load_machine
from halocline.plan.meshes import NoPlan
from halocline.plan.pipelines import _recorded, pipelines
from halocline.plan.plan_file import parse_plan
from halocline.world import run_local

SHAPE = (1, 3, 8, 8)
BATCH = 16


def make_net() -> nn.Module:
    """Layers of unequal work."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(),
        nn.Conv2d(16, 4, 1), nn.Flatten(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 4),
    )  # fmt: skip


def small(machine: Machine, gigabytes: float) -> Machine:
    """The same with less memory."""
    room = machine.device.memory_gb.model_copy(update={"value": gigabytes, "low": gigabytes, "high": gigabytes})
    return machine.model_copy(update={"device": machine.device.model_copy(update={"memory_gb": room})})


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.long
def test_a_planned_pipeline_is_followed_and_exact() -> None:
    made = plan(make_net, SHAPE, machine="cpu", devices=4, batch=BATCH, stages="auto")
    assert {tuple(each.mesh_sizes.values()) for each in made.pipelines} == {(2, 2), (4, 1)}
    read = parse_plan(made.to_json(), "test")
    assert read.pipelines == made.pipelines
    model = make_net().double()
    x, y = torch.randn(BATCH, *SHAPE[1:], dtype=torch.float64), torch.randn(BATCH, 4, dtype=torch.float64)
    one = copy.deepcopy(model)
    expected = square(one(x), y)
    expected.backward()
    for best in read.pipelines:

        def body(best=best) -> float:  # type: ignore[no-untyped-def]
            pipe = hc.pipeline(copy.deepcopy(model), hc.Mesh(**best.mesh_sizes), loss=square, example=(x, y),
                               microbatches=best.microbatches, schedule=best.schedule, stages=best.cut,
                               cuts=[{0: "data"}] * 2)  # fmt: skip
            assert pipe.cut == best.cut
            worst, named = abs(float(pipe.step(x, y)) - float(expected.detach())), dict(one.named_parameters())
            return max([worst, *(float((p.grad - named[n].grad).abs().max()) for n, p in pipe.named_parameters())])

        assert max(run_local(4, body)) <= 1e-8


def test_the_cut_of_another_model_is_refused() -> None:
    made = plan(make_net, SHAPE, machine="cpu", devices=2, batch=BATCH, stages="auto")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    cut = made.pipelines[0].cut

    def body() -> str:
        told = {"loss": square, "example": (x, y), "stages": cut, "microbatches": 2}
        with pytest.raises(MeshError) as other:
            hc.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), hc.Mesh(stage=2), **told)
        with pytest.raises(MeshError, match="the cut has 2 stages, and the schedule 1f1b has 1"):
            hc.pipeline(nn.Linear(4, 4), hc.Mesh(stage=1, data=2), **told)
        return str(other.value)

    assert all("these stages are of another model" in said for said in run_local(2, body))


def test_the_planned_cut_is_the_best_of_all_cuts() -> None:
    """Brute force over every cut into two and three stages, with the prices of the machine."""
    machine = load_machine("cpu")
    record, costs = _recorded(make_subject(make_net, [SHAPE]), 4, Prices(machine.device))
    tables = CutTables(record, costs)
    for stages in (2, 3):
        every = [
            max(float(tables.cost[a, b]) for a, b in pairwise((0, *begins, len(record.calls))))
            for begins in combinations(range(1, len(record.calls)), stages - 1)
            if all(tables.allowed[begin] for begin in begins)
        ]
        assert best_cut(record, costs, stages, [1] * stages).cost == pytest.approx(min(every), rel=1e-12)


def test_predicted_steps_follow_the_schedule() -> None:
    """Equal stages without borders: the bubble of theory."""
    machine = load_machine("cpu")
    record, costs = _recorded(make_subject(make_net, [SHAPE]), 4, Prices(machine.device))
    cut = best_cut(record, costs, 2, [2, 1])
    even = cut.stages[0]
    equal = type(cut)(cut.begins, cut.cost, (even, even))
    for count in (2, 4, 8):
        alone = step_seconds(make_schedule("1f1b", 2, count), equal, 0.0, 0.0)
        assert alone == pytest.approx((count + 1) * even.seconds, rel=1e-9)
        assert step_seconds(make_schedule("zero-bubble", 2, count), equal, 0.0, 0.0) < alone
        assert step_seconds(make_schedule("1f1b", 2, count), equal, 0.0, 1.0) > alone + 2


def test_where_no_cut_of_samples_fits_a_pipeline_is_named() -> None:
    """Weights count: with three quarters of their bytes on each of two stages, only stages fit."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), *(nn.Linear(3000, 3000, bias=False) for _ in range(4)))

    machine = small(load_machine("cpu"), 0.4)  # four layers of 36 MB with gradients and moments take 0.58 GB
    assert all(each.fits for each in pipelines(make_subject(wide, [(1, 3000)]), machine, 2, 8, Prices(machine.device)))
    with pytest.raises(NoPlan, match=r"a pipeline: stage=2 .* fits"):
        plan(wide, (1, 3000), machine=machine, devices=2, batch=8, stages="auto")


def test_options_are_checked() -> None:
    with pytest.raises(PlanError, match="give batch"):
        plan(make_net, SHAPE, machine="cpu", devices=2, stages="auto")
    with pytest.raises(PlanError, match="it is 'auto'"):
        plan(make_net, SHAPE, machine="cpu", devices=2, batch=4, stages="even")
