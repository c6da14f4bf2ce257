"""``bench gradients``: what is trained, what is made of times, and that every way trains alike. No time is judged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import halocline as hc
from benchmarks import cluster, gradients, gradients_ranks
from benchmarks.gradients import GradientsPlan, TimeShares
from benchmarks.gradients_case import GradientsCase, summary
from benchmarks.gradients_models import (
    SUBJECTS,
    BenchResNet,
    GradientsModel,
)
from benchmarks.gradients_ranks import COMPUTE, IN_A_ROW, OURS, DdpSetting, StepRecord, StepTimes, task_of
from benchmarks.gradients_trace import trace_events
from benchmarks.machine import describe
from benchmarks.topology import Topology
from halocline.cli.app import app
from halocline.testing.pool import shared_pool
from halocline.world import Averaged, DryWorld, Label

CASE = GradientsCase(
    model="resnet24mb",
    nodes=4,
    ranks_per_node=1,
    megabytes=24.0,
    tensors=161,
    emulated=True,
    like_resnet=True,
    compute_s=0.3,
    communication_s=0.4,
    communication="flat",
    ddp_s=0.63,
    ddp_tuned_s=0.462,
    ddp_tuned={"cap": 1.0, "view": True, "static": False},
    ours_s=0.42,
    bound_s=0.4,
    ahead_s=0.41,
    ahead_bound_s=0.4,
    ahead_bf16_s=0.33,
    bf16_communication_s=0.2,
    lag_s=0.41,
    spread={COMPUTE: (0.29, 0.31)},
    tried={},
    rounds=3,
    messages=7,
    control_messages=0,
    oversubscribed=False,
    others_share=0.01,
)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "gradients", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


# ---- what all cases come to ----


def test_the_worst_emulated_case_counts() -> None:
    other = replace(CASE, model="unet3d", megabytes=51.0, like_resnet=False, ours_s=0.44, ddp_s=0.44)
    real = replace(CASE, model="resnet18", emulated=False, ours_s=9.0)
    result = summary([CASE, other, real])
    assert result["step_over_bound"] == result["step_over_ideal"] == pytest.approx(1.1)
    assert result["ddp_step_over_ideal"] == pytest.approx(1.575)
    assert (result["speedup_over_ddp"], result["speedup_over_tuned_ddp"]) == pytest.approx((1.0, 1.05))
    assert result["speedup_over_ddp_small_resnets"] == pytest.approx(1.5)
    assert result["cases"][0]["ddp_hidden_share"] == pytest.approx((0.3 + 0.4 - 0.63) / 0.4)
    assert json.loads(json.dumps(result))["cases"][2]["ours_s"] == 9.0
    assert summary([real])["step_over_bound"] is None


def test_time_is_divided_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = TimeShares(30.0, [1.0, 1.0, 1.0])
    assert clock.begin() and clock.until == 110 and not clock.over
    now[0] = 114.0  # the first took longer: the others share what is left
    assert clock.over
    clock.finish()
    assert clock.begin() and clock.until == 122
    now[0] = 120.0
    clock.finish()
    assert not clock.begin()  # at the pace of the first it would take longer than there is
    endless = TimeShares(None, [1.0])
    assert endless.begin() and endless.begin() and not endless.over


# ---- on ranks ----

TINY: dict[str, GradientsModel] = {
    "tiny": GradientsModel(partial(BenchResNet, (1, 1), True, 2), (1, 3, 32, 32), emulated=True, like_resnet=True),
    "real": GradientsModel(
        partial(BenchResNet, (1, 1), False, 4, 10), (2, 3, 32, 32), emulated=False, like_resnet=True, classes=10
    ),
}
WAYS = (OURS, DdpSetting(), DdpSetting(0.5, True, True), DdpSetting(1.0, True, False), DdpSetting(25.0, False, True))


@pytest.fixture(autouse=True)
def tiny_subjects() -> Iterator[None]:
    SUBJECTS.update(TINY)  # type: ignore[attr-defined]
    yield
    for name in TINY:
        del SUBJECTS[name]  # type: ignore[attr-defined]


def with_tiny(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """On a rank, which has imported the subjects by itself."""
    SUBJECTS.update(TINY)  # type: ignore[attr-defined]
    return function(*arguments, **options)


def weights_by_way(name: str) -> dict[str, list[torch.Tensor]]:
    task = task_of(name, 0.01, torch.float64)
    found = {}
    for way in (COMPUTE, *WAYS):
        gradients_ranks.build(task, way, 1)
        gradients_ranks.step(way)
        found[str(way)] = gradients_ranks.parameters_of(way)
    gradients_ranks.drop()
    return found


@pytest.mark.parametrize("name", TINY)
def test_every_way_trains_alike(name: str) -> None:
    first, second = shared_pool(2).run(with_tiny, weights_by_way, name)
    for way in WAYS:
        for mine, theirs, ours in zip(first[str(way)], second[str(way)], first[OURS], strict=True):
            assert torch.equal(mine, theirs)
            assert torch.allclose(mine, ours, rtol=1e-12, atol=1e-14)
    alone = [torch.equal(a, b) for a, b in zip(first[COMPUTE], second[COMPUTE], strict=True)]
    assert not all(alone)


def test_settings_tell_themselves_apart() -> None:
    assert str(DdpSetting(0.5, True, True)) == "ddp, 0.5 MB, view, static"
    assert len({str(setting) for setting in (DdpSetting(), *gradients.SETTINGS)}) == 25


class Loopback:
    """In place of the cluster: ranks of this machine."""

    def __init__(self, nodes: int, ranks_per_node: int, **_: Any) -> None:
        self.topology = Topology(nodes, ranks_per_node)
        self.size = self.topology.size

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return shared_pool(self.size).run(with_tiny, function, *arguments, **options)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "Cluster", Loopback)
    monkeypatch.setattr(gradients, "check_possible", lambda: None)


@pytest.mark.long
@pytest.mark.usefixtures("loopback")
def test_every_way_is_measured_in_turn() -> None:
    said: list[str] = []
    events: list[Any] = []
    plan = GradientsPlan(nodes=2, ranks_per_node=(1,), models=("tiny", "real"), rounds=2, quick=True)
    result = gradients.measure_gradients(plan, said.append, events)
    assert [case["model"] for case in result["cases"]] == ["tiny", "real"]
    for case in result["cases"]:
        assert min(case[key] for key in ("compute_s", "communication_s", "ddp_s", "ddp_tuned_s", "ours_s")) > 0
        assert case["bound_s"] > 0 and case["rounds"] == 2 and set(case["ddp_tuned"]) == {"cap", "view", "static"}
        assert len(case["tried"]) == 3 and len(case["spread"]) == 8
    assert "tiny on 2 x 1 ranks: round 1 of 2" in said
    assert len({event["pid"] for event in events}) == 4
    json.dumps([result, events], allow_nan=False)


@pytest.mark.long
@pytest.mark.usefixtures("loopback")
def test_the_best_settings_take_part_in_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "SETTINGS", gradients.SETTINGS[:4])
    plan = GradientsPlan(nodes=2, ranks_per_node=(1,), models=("tiny",), rounds=1)
    [case] = gradients.measure_gradients(plan)["cases"]
    best = sorted(case["tried"], key=case["tried"].get)[:3]
    assert set(case["spread"]) == {"communication", COMPUTE, OURS, *IN_A_ROW, "ddp", *best}
    assert case["communication"] in ("flat", "pieces")


def test_what_there_is_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch, loopback: None) -> None:
    monkeypatch.setattr(gradients, "QUICK_SECONDS", -1.0)
    result = gradients.measure_gradients(GradientsPlan(nodes=2, ranks_per_node=(1,), models=("tiny",), quick=True))
    assert (result["cases"], result["left_out"]) == ([], ["tiny on 2 x 1 ranks"])
    assert result["step_over_bound"] is None


# ---- the trace ----

GROUP = Averaged(1, 0, 0.4, Label("gradients", "backward"), 3, 0, ("a", "b"), 12, ready=0.1, sent=0.2)


def test_a_trace_shows_groups_from_the_start_of_the_step() -> None:
    events = trace_events(
        "tiny",
        [
            StepRecord(StepTimes(0.5, 1.0, 0.1, begun=-0.5), [GROUP], 1, 0),
            StepRecord(StepTimes(0.5, 1.0, 0.1), None, None, None),
        ],
    )
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert [name for name, *_ in spans] == ["forward", "backward and waiting", "optimizer"]
    assert spans[2][1:] == pytest.approx((1.5e6, 1e5))
    moments = {event["ph"]: event["ts"] for event in events if event["name"] == "group 0"}
    assert moments == pytest.approx({"i": 6e5, "b": 7e5, "e": 9e5})


def test_the_engine_tells_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = DryWorld(0, 1)
    engine = SimpleNamespace(world=world, control_messages=5)

    def step() -> StepTimes:
        world.emit(GROUP)
        engine.control_messages += 2
        return StepTimes(1, 1, 1)

    monkeypatch.setitem(gradients_ranks._trainers, OURS, SimpleNamespace(model=None, step=step))
    monkeypatch.setattr(gradients_ranks, "engine_of", lambda model: engine)
    told = gradients_ranks.tell()
    assert (told.groups, told.messages, told.control_messages) == ([GROUP], 1, 2)


# ---- the command ----


def canned(rate: str = "1gbit") -> dict[str, Any]:
    return {**summary([CASE]), "rate": rate, "left_out": ["unet3d on 4 x 2 ranks"], "machine": describe(0.2)}


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[GradientsPlan] = []

    def measure(plan: GradientsPlan, say: Any, events: list[Any] | None) -> dict[str, Any]:
        asked.append(plan)
        if events is not None:
            events.append({"ph": "M"})
        return canned(plan.rate)

    monkeypatch.setattr(gradients, "measure_gradients", measure)
    trace = tmp_path / "step.json"
    code, out, _ = run("--quick", "--models", "resnet50, unet3d", "--rate", "500mbit", "--trace", str(trace))
    assert code == 0
    for words in (
        "resnet24mb",
        "4x1",
        "630",
        "1.05",
        "1.50",
        "at most 1.05",
        "no time was left for",
        "20% of the cores",
    ):
        assert words in out
    assert asked[0] == GradientsPlan(4, (1, 2), "500mbit", ("resnet50", "unet3d"), 3, "block", True)
    assert json.loads(trace.read_text()) == {"traceEvents": [{"ph": "M"}]}
    assert json.loads(run("--json", "--rounds", "9", "--ranks-per-node", "2")[1])["step_over_bound"] == 0.42 / 0.4
    assert asked[1] == GradientsPlan(ranks_per_node=(2,), rounds=9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--models", "vgg"), "no model 'vgg'; the models are resnet24mb, unet3d, resnet18, resnet50"),
        (("--models", ","), "no model to measure"),
        (("--placement", "odd"), "'block' (0 0 1 1) or 'cyclic' (0 1 0 1), not 'odd'"),
        (("--rate", "fast"), "a number of kbit, mbit or gbit"),
        (("--nodes", "1"), "give two or more"),
        (("--ranks-per-node", "two"), "such as 1,2"),
        (("--ranks-per-node", "0"), "at least one"),
        (("--trace", "/nowhere/at/all.json"), "No such file"),
    ],
)
def test_bad_options_say_what_is_allowed(options: tuple[str, ...], words: str) -> None:
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert words in err


def test_without_root_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "missing", lambda: ["the rights of root: run it with sudo"])
    code, out, err = run("--json")
    assert (code, out) == (2, "")
    assert err.strip().splitlines()[-1] == (
        "halocline bench gradients: an emulated cluster needs the rights of root: run it with sudo"
    )


def test_help_teaches() -> None:
    code, out, _ = run("--help")
    assert code == 0
    for words in ("--quick", "--trace", "--placement", "Examples", "sudo halocline bench gradients"):
        assert words in out


def test_plans_are_checked_without_the_command() -> None:
    with pytest.raises(hc.HaloclineError, match="such as 1,2"):
        GradientsPlan(ranks_per_node=()).check()
    with pytest.raises(hc.HaloclineError, match=r"from 0\.1 to 1"):
        GradientsPlan(cores=0.01).check()
