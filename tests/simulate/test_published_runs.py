"""Networks of the published runs have their published size, and the simulator is held to the runs."""

from __future__ import annotations

import pytest
import torch

from halocline.errors import PlanError
from halocline.plan.cost import MULTIPLY
from halocline.plan.machine import load_machine
from halocline.plan.recording import record_step
from halocline.simulate.published import ALWAYS, FULL_SHAPES, RUNS, full_subject
from halocline.simulate.validate import scenario_of, trivial, validate
from halocline.workloads import WORKLOADS


@pytest.mark.parametrize(
    ("network", "parameters", "forward", "training"),
    [
        ("deepcam", 56.455e6, 655e9, 1_966e9),
        ("mlperf_cosmoflow", 8.908e6, 68.86e9, 192.1e9),
        ("tiramisu", 7.50e6, 4.188e12 / 3, 4.188e12),
        ("deeplab", 43.7e6, 13.02e12 / 3, 13.02e12),
    ],
)
def test_networks_have_their_published_size_and_work(
    network: str, parameters: float, forward: float, training: float
) -> None:
    subject = full_subject(network, None, {}, mixed=False)
    count = sum(each.numel() for each in subject.meta_model().parameters())
    assert count == pytest.approx(parameters, rel=2e-3 if network in ("tiramisu", "deeplab") else 1e-5 * 6)
    work = [each for each in record_step(subject, {"data": 1}, 1, warm=0).record.operations if each.name in MULTIPLY]
    assert sum(each.flops for each in work if each.phase == "forward") == pytest.approx(forward, rel=2e-3)
    # Three times forward, where the first layer needs no gradient of its input.
    assert 0.98 * training < sum(each.flops for each in work) < 1.001 * training


@pytest.mark.parametrize("network", ["deepcam", "mlperf_cosmoflow"])
def test_the_small_network_runs(network: str) -> None:
    workload = WORKLOADS[network]
    model = workload.factory(**workload.fit(workload.shapes))
    out = model(torch.zeros(workload.shapes[0]))
    expected = (1, 3, 32, 48) if network == "deepcam" else (1, 4)
    assert tuple(out.shape) == expected and torch.isfinite(out).all()


def test_deepcam_says_which_sizes_it_takes() -> None:
    workload = WORKLOADS["deepcam"]
    with pytest.raises(ValueError, match="multiples of 16"):
        workload.factory(**workload.fit(workload.shapes))(torch.zeros(1, 16, 40, 48))


def test_every_built_in_network_has_a_full_size_or_is_refused() -> None:
    assert set(WORKLOADS) - set(FULL_SHAPES) == {"ctr"}
    with pytest.raises(PlanError, match="ctr cannot be simulated: which rows"):
        full_subject("ctr", None, {}, mixed=False)


def test_published_runs_stand_on_one_set_of_constants() -> None:
    """Runs of a machine share its file, and a fit is at a smaller scale than the run that it serves."""
    for run in RUNS:
        assert scenario_of(run).machine == load_machine(run.machine)
        assert run.fit is None or run.fit.devices < run.devices


def test_the_trivial_predictor_is_judged_by_the_same_rows() -> None:
    cases = [
        {"kind": "efficiency", "published": 0.79, "simulated": 0.78, "tolerance": 0.05},
        {"kind": "efficiency", "published": 0.93, "simulated": 0.95, "tolerance": 0.03},
        {"kind": "rate", "published": 20.0, "simulated": 10.0, "tolerance": 0.1},
    ]
    found = trivial(cases)
    assert (found["answer"], found["rows"], found["rows_within"]) == (ALWAYS, 2, 1)
    assert found["worst_error"] == pytest.approx(0.14) and found["simulator_worst_error"] == pytest.approx(0.02)


@pytest.mark.long
def test_the_simulator_is_within_the_tolerance_of_published_runs() -> None:
    result = validate()
    assert set(result) >= {"rows", "rows_within", "worst", "cases"}
    missed = [case["case"] for case in result["cases"] if not case["within"]]
    assert not missed and result["rows_within"] == result["rows"] == 12
    assert all(each["loss"] > 0 for each in result["ablations"])
    assert result["trivial"]["simulator_mean_error"] < result["trivial"]["mean_error"]
