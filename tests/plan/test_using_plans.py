"""A plan as a file and in use: what runs is what was planned, and a plan for something else is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_unet import SIDE, SmallUNet, subject

import halocline as hc
from halocline.arrangement import Arrangement
from halocline.data import Npy
from halocline.errors import ConfigError, PlanError
from halocline.plan.api import repriced
from halocline.plan.machine import load_machine
from halocline.plan.plan_file import Plan, parse_plan, read_plan
from halocline.plan.recording import record_step
from halocline.program import record
from halocline.testing import shared_pool
from halocline.train.config import make_settings
from halocline.train.log import read_log
from halocline.train.reporting import write_report
from halocline.train.settings import Settings
from halocline.train.task import defaults_of
from halocline.train.trainer import Trainer
from halocline.workloads.unet3d import UNet3d
from halocline.world import run_local
from halocline.world.events import Begun, Computed, Event, Summed

SHAPE = (1, 1, SIDE, SIDE, SIDE)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hc.plan(SmallUNet, SHAPE, machine="perlmutter", devices=2, batch=1)


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert hc.load_plan(tmp_path / "plan.json") == plan
    assert plan.batch == 1 and plan.arrangement.ranks == 2 and plan.predicted.seconds > 0
    assert all(each.lost_by for each in plan.alternatives)


def test_a_module_is_planned_as_its_factory(plan: Plan) -> None:
    model = SmallUNet()
    made = hc.plan(model, SHAPE, machine="perlmutter", devices=2, batch=1)
    assert made.mesh_sizes == plan.mesh_sizes and made.fingerprint == plan.fingerprint
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_plan_is_priced_anew_on_another_machine(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    same = hc.load_plan(tmp_path / "plan.json", machine="perlmutter")
    other = hc.load_plan(tmp_path / "plan.json", machine="piz-daint", model=SmallUNet)
    assert same == plan and other.arrangement == plan.arrangement
    assert other.machine == "piz-daint" and other.predicted.seconds != plan.predicted.seconds
    with pytest.raises(
        PlanError, match="it was priced on perlmutter, and to price it on piz-daint the network is needed"
    ):
        hc.load_plan(tmp_path / "plan.json", machine="piz-daint")
    with pytest.raises(PlanError, match="made for another network"):
        repriced(plan, subject(make_model=lambda: SmallUNet(8)), load_machine("piz-daint"))


def changed(plan: Plan, **values: object) -> str:
    return json.dumps({**plan.model_dump(mode="json"), **values})


def test_a_file_that_is_no_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"its version is 7, and this release reads 1; make the plan again"):
        parse_plan(changed(plan, version=7), "mine.json")
    with pytest.raises(PlanError, match=r"plan mine.json: mesh: unknown key"):
        parse_plan(changed(plan, mesh={}), "mine.json")
    with pytest.raises(PlanError, match=r"plan mine.json: batch: .*greater than or equal to 1"):
        parse_plan(changed(plan, batch=0), "mine.json")
    with pytest.raises(PlanError, match=r"not JSON: .*; `halocline plan --out` writes a plan"):
        parse_plan("{", "mine.json")
    with pytest.raises(PlanError, match=r"none.json: it cannot be read: No such file"):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh_sizes": {"data": 2, "deep": 1}}, "mesh_sizes: no axis 'deep'; axes are data, depth, height, width"),
        ({"mesh_sizes": {"data": 1, "depth": 0}}, "mesh_sizes.depth: 0 ranks; an axis has one or more"),
        ({"mesh_sizes": {"data": 3}}, "batch: 1 samples do not divide over 3 ranks of data"),
        (
            {"mesh_sizes": {"depth": 2}, "points": {"depth": [0, 30, 24]}},
            r"points.depth: \[0, 30, 24\] does not cut 24",
        ),
        ({"mesh_sizes": {"depth": 2}, "points": {"depth": [0, 24]}}, "does not cut 24 voxels into 2 parts"),
        ({"mesh_sizes": {"depth": 2}, "speeds": [1.0]}, "speeds: 1 of them for 2 ranks"),
        ({"mesh_sizes": {"depth": 2}, "speeds": [1.0, -2.0]}, "are to be positive numbers"),
        ({"input_bytes": -1}, "input_bytes: .*greater than or equal to 0"),
    ],
)
def test_what_a_plan_says_of_its_mesh_is_checked(plan: Plan, changes: Mapping[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as error:
        parse_plan(changed(plan, **changes), "mine.json")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.long
def test_speeds_and_input_bytes_are_priced_anew_too() -> None:
    told = {"speeds": (2.0, 1.0), "input_bytes": 10**12}
    plan = hc.plan(SmallUNet, SHAPE, machine="perlmutter", devices=2, batch=1, **told)
    other = repriced(plan, subject(), load_machine("piz-daint"))
    assert (other.speeds, other.input_bytes) == (plan.speeds, plan.input_bytes) == ((2.0, 1.0), 10**12)
    assert other.predicted.binds == "input"
    with pytest.raises(PlanError, match=r"for samples of \[\[1, 1, 24, 24, 24\]\], and these are \[\[1, 1, 16"):
        repriced(plan, subject(shapes=((1, 1, 16, 16, 16),)), load_machine("piz-daint"))


# ---- what runs is what was planned ----


def communication(events: tuple[Event, ...]) -> list[object]:
    """What goes over the links, in order; gradients by their bytes, for their buckets follow from measured times."""
    found: list[object] = []
    gradients = 0
    for event in events:
        if isinstance(event, Begun | Summed) and event.label.channel.startswith("gradients"):
            gradients += event.bytes if isinstance(event, Summed) else 0
        elif isinstance(event, Begun):
            found.append((event.label.operation, event.label.place, event.sends, event.receives, event.dtype))
        elif isinstance(event, Summed):
            found.append((event.label.operation, event.label.place, event.ranks, event.bytes, event.dtype))
    return [*found, ("gradients", gradients)]


def operations(events: tuple[Event, ...]) -> list[object]:
    """Local operations in order, without those by which ranks of one process carry each other's flat messages."""
    carry = {("clone", "forward"), ("copy_", "forward"), ("clone", "backward"), ("copy_", "backward")}
    carry.add(("add_", "backward"))
    return [
        (event.name, event.place, event.phase, event.shapes, event.dtype)
        for event in events
        if isinstance(event, Computed)
        and not ((event.name, event.phase) in carry and all(len(shape) == 1 for shape in event.shapes))
    ]


def measured_step(arrangement: Arrangement) -> tuple[list[object], list[object]]:
    """A steady step of this rank, really run: what it communicates, and what it computes."""
    torch.manual_seed(0)
    mesh = arrangement.mesh()
    model = hc.distribute(SmallUNet(), plan=arrangement)
    optimizer = torch.optim.Adam(model.parameters())
    x = arrangement.shard(torch.ones(*SHAPE), "NCDHW")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    events = record(step, mesh).events
    return communication(events), operations(events)


@pytest.mark.parametrize(
    "changes",
    [{}, {"points": {"depth": (0, 8, SIDE)}}, {"gather": ("down",)}, {"recompute": ("down", "norm")}],
    ids=["even", "uneven", "gather", "recompute"],
)
def test_the_run_does_as_planned(changes: Mapping[str, Any]) -> None:
    arrangement = replace(Arrangement({"data": 1, "depth": 2, "height": 1, "width": 1}), **changes)
    planned = subject(optimizer=torch.optim.Adam)
    run = run_local(2, lambda: measured_step(arrangement))
    for rank in range(2):
        step = record_step(planned, arrangement.sizes, 1, rank, arrangement=arrangement)
        communicated, computed = run[rank]
        assert communication(step.record.events) == communicated and len(communicated) > 5
        recorded = operations(step.record.events)
        assert recorded == computed and len(computed) > 100


def test_a_loader_takes_a_plan(tmp_path: Path) -> None:
    arrangement = Arrangement({"data": 1, "depth": 2, "height": 1, "width": 1}, {"depth": (0, 2, 8)})
    np.save(tmp_path / "x.npy", np.zeros((2, 1, 8, 4, 4), np.float32))
    fields = {"x": Npy(tmp_path / "x.npy", "NCDHW")}

    def body() -> tuple[int, ...]:
        with hc.data.Loader(fields, plan=arrangement, batch=2) as loader:
            return tuple(hc.unwrap(next(iter(loader))["x"]).shape)

    assert run_local(2, body) == [(2, 1, 2, 4, 4), (2, 1, 6, 4, 4)]
    with pytest.raises(hc.HaloclineError, match="a plan holds mesh, cut and points"):
        run_local(2, lambda: hc.data.Loader(fields, plan=arrangement, cut={"D": "depth"}))


# ---- halocline train --plan ----


def settings(*changes: str) -> Settings:
    small = [
        "data.arguments.size=16",
        "data.samples=4",
        "data.validation=0",
        "batch=2",
        "steps=3",
        "checkpoint_every=0",
    ]
    return make_settings({}, [*small, "machine=perlmutter", *changes], defaults_of("unet3d"))


@pytest.mark.long
def test_a_run_follows_a_plan_and_its_report_compares(tmp_path: Path) -> None:
    shared_pool(2).run(train_with_plan, tmp_path / "run", deadline=120)
    plan = read_plan(tmp_path / "run" / "plan.json")
    assert plan.network == "unet3d" and plan.shapes == ((1, 1, 16, 16, 16),) and plan.batch == 2
    entry = next(iter(read_log(tmp_path / "run", "plan")))
    assert entry["predicted"]["seconds"] == plan.predicted.seconds
    tiles = [each["tile"] for each in read_log(tmp_path / "run", "rank")]
    assert len(tiles) == plan.arrangement.ranks == 2
    page = write_report(tmp_path / "run").path.read_text()
    assert "Predicted and measured" in page and "memory of a rank" in page


def train_with_plan(folder: Path) -> None:
    torch.set_num_threads(1)
    Trainer(settings("plan=auto"), folder).train()


def test_a_plan_for_another_run_is_refused(plan: Plan, tmp_path: Path) -> None:
    def refused(*changes: str) -> str:
        with pytest.raises(ConfigError) as error:
            Trainer(settings(*changes), tmp_path / "run")
        return str(error.value)

    path = tmp_path / "plan.json"
    plan.save(path)
    assert "made for another network: this UNet3d has other parameters" in refused(f"plan={path}")
    mine = hc.plan(lambda: UNet3d(width=4), (1, 1, 16, 16, 16), machine="perlmutter", devices=2)
    mine.save(path)
    assert "it is for 2 ranks, and this run has 1; start that many, or use plan = 'auto'" in refused(f"plan={path}")
    mine.model_copy(update={"mesh_sizes": {"data": 1}}).save(path)
    other = refused(f"plan={path}", "data.arguments.size=24")
    assert "for samples of [1, 1, 16, 16, 16], and the data have [1, 1, 24, 24, 24]" in other
    assert "a plan makes its own mesh" in refused_settings("plan=auto", "mesh.D=1")
    assert "it cannot be read" in refused("plan=none.json") and "no machine 'sumit'" in refused(
        "plan=auto", "machine=sumit"
    )


def refused_settings(*changes: str) -> str:
    with pytest.raises(ConfigError) as error:
        settings(*changes)
    return str(error.value)
