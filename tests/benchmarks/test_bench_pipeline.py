"""What ``bench pipeline`` measures: the same gradients as torch's pipeline, and bubbles from steps of known length."""

import pytest
import torch

from benchmarks.pipeline import bubble_case, zero_over_plain
from benchmarks.pipeline_balance import StageSeconds, balance_case
from benchmarks.pipeline_deep import predict, ring_seconds
from benchmarks.pipeline_deep_ranks import DeepCase, DeepResNet
from benchmarks.pipeline_ranks import SleepCase, StepCase, sleeping_steps, steps_beside_torch
from halocline.parts import StageCut
from halocline.parts.cutting import StageForecast
from halocline.testing.pool import shared_pool


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_both_pipelines_have_the_same_gradients(schedule: str) -> None:
    for rank in shared_pool(2).run(steps_beside_torch, StepCase(schedule, 4, 8, 2), 1, deadline=60):
        assert rank.difference < 1e-5
        assert min(rank.ours + rank.torch) > 0


def test_bubbles_of_steps_of_known_length() -> None:
    plain = bubble_case(SleepCase("1f1b", 4, 1, 0.1), 2, 1.5)  # five turns of 0.3 s, of which four are work
    assert plain["bubble"] == pytest.approx(0.2)
    assert plain["bubble_over_theory"] == pytest.approx(1)
    turns = bubble_case(SleepCase("interleaved", 4, 2, 0.1), 2, 1.35)
    assert turns["bubble"] == pytest.approx(1 / 8)
    assert turns["bubble_over_theory"] == pytest.approx(1)
    halves = bubble_case(SleepCase("zero-bubble", 4, 1, 0.1), 2, 1.3)
    assert halves["bubble_over_theory"] is None
    assert zero_over_plain([plain, halves]) == pytest.approx([0.1 / 1.3 / 0.2])


def test_sleeping_stages_take_at_least_their_time() -> None:
    for rank in shared_pool(2).run(sleeping_steps, SleepCase("zero-bubble", 2, 1, 0.01), 1, deadline=60):
        assert rank.seconds[0] >= 2 * 3 * 0.01
        assert rank.in_flight <= rank.promised


def test_an_imbalance_of_known_stages() -> None:
    told = balance_case("net", [StageSeconds(1.0, 2.0), StageSeconds(1.0, 1.0)])
    assert told["predicted"] == 1
    assert told["measured"] == pytest.approx(4 / 3)
    assert told["off"] == pytest.approx(0.25)


def test_the_deep_network_and_its_prediction() -> None:
    """1,001 layers; steps of known stages, with sums beside backward in data parallel and after it in the pipeline."""
    with torch.device("meta"):
        model = DeepResNet()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) - 3 == DeepCase().layers == 1001  # three projections are not counted
    stage = StageForecast("a", "b", 1, 3.0, 0, 1000, 0, 1.0)
    case, cut = DeepCase(microbatches=4), StageCut((1,), 3.0, (stage, stage))
    told = predict(case, cut, forward=1.0, both=3.0, link=100.0)
    assert ring_seconds(2000, 4, 100.0) == pytest.approx(30)
    assert told["data"] == pytest.approx(1 + 30)
    assert told["hybrid"] == pytest.approx(5 * 3.0 + 10, rel=1e-3)  # milliseconds of latency
