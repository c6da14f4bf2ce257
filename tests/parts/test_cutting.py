"""The automatic cut is the best of all cuts, and is explained."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from pipelining import SUBJECTS, Case
from torch import nn

import halocline as hc
from halocline.errors import MeshError
from halocline.parts.cutting import CallCosts, CutTables, best_cut
from halocline.parts.record import ModelRecord, meta_copy, record_model
from halocline.world import run_local


def recorded(name: str) -> ModelRecord:
    subject = SUBJECTS[name]
    model = meta_copy(subject.make().double())
    return record_model(model, subject.loss, (subject.inputs(),), (subject.targets(),), torch.device("cpu"))


def cost_by_hand(record: ModelRecord, costs: CallCosts, begin: int, end: int) -> float:
    """Of one stage: its calls, and what it receives, forward and as gradients back."""
    read = {value for call in record.calls[begin:end] for value in call.reads}
    received = [record.values[value] for value in read if 0 <= record.values[value].made < begin]
    moved = 2 * costs.per_byte * sum(value.bytes for value in received)
    return sum(costs.seconds[begin:end]) + moved + (costs.latency if received else 0.0)


def best_by_force(
    record: ModelRecord, costs: CallCosts, stages: int, in_flight: list[int], memory: float | None
) -> float | None:
    tables, count, found = CutTables(record, costs), len(record.calls), []
    for begins in itertools.combinations(range(1, count), stages - 1):
        ends = [0, *begins, count]
        pairs = list(itertools.pairwise(ends))
        split = any(len({sum(c >= b for b in begins) for c in together}) > 1 for together in record.together)
        forecasts = [tables.forecast(*pair, held) for pair, held in zip(pairs, in_flight, strict=True)]
        if not split and (memory is None or all(each.memory <= memory for each in forecasts)):
            found.append(max(cost_by_hand(record, costs, *pair) for pair in pairs))
    return min(found, default=None)


@pytest.mark.parametrize("name", ["chain", "unet", "residual"])
def test_as_good_as_the_best_of_all_cuts(name: str) -> None:
    record, draw, refused = recorded(name), random.Random(name), 0
    for _ in range(4):
        seconds = tuple(draw.random() for _ in record.calls)
        costs = CallCosts(seconds, per_byte=draw.choice([0, 1e-4, 1e-3]), latency=draw.choice([0, 0.3]))
        for stages in (1, 2, 3, 4):
            held, memory = [stages - n for n in range(stages)], draw.choice([None, None, 2e4])
            expected = best_by_force(record, costs, stages, held, memory)
            if expected is None:
                refused += 1
                with pytest.raises(MeshError, match="no cut into"):
                    best_cut(record, costs, stages, held, memory)
            else:
                assert best_cut(record, costs, stages, held, memory).cost == pytest.approx(expected, rel=1e-12)
    assert refused < 10  # most were compared


def test_memory_is_shared_out_too() -> None:
    """Equal times, and parameters that do not fit beside each other."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), *(nn.ReLU() for _ in range(9)))
    x = torch.zeros(1, 64)
    record = record_model(meta_copy(model), F.mse_loss, (x,), (x,), torch.device("cpu"))
    costs = CallCosts((1.0,) * len(record.calls))
    fast = best_cut(record, costs, 2, [2, 1])
    small = best_cut(record, costs, 2, [2, 1], memory=4 * 2.1 * 64 * 65 * 4)
    assert [stage.calls for stage in fast.stages] in ([6, 7], [7, 6])
    assert small.stages[0].calls == 2
    assert max(stage.memory for stage in small.stages) < max(stage.memory for stage in fast.stages)
    with pytest.raises(MeshError, match="more stages"):
        best_cut(record, costs, 2, [2, 1], memory=1000.0)


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_an_automatic_pipeline_is_exact_and_explains_itself(name: str) -> None:
    case = Case.of(name, 2)

    def body() -> tuple[float, str]:
        before = torch.get_rng_state()
        pipe = case.pipeline(hc.Mesh(stage=2), stages="auto", memory="1GiB")
        assert pipe.cut is not None
        assert torch.equal(before, torch.get_rng_state()) or name == "chain"  # dropout draws; threads share a generator
        return case.error(pipe, pipe.step(*case.batch)), pipe.cut.explain()

    (first, told), (second, same) = run_local(2, body)
    assert max(first, second) <= 1e-8
    assert told == same
    assert told.splitlines()[0].startswith("2 stages; the slowest takes 1.")
    assert "ms" in told.splitlines()[2]


def test_options_of_the_automatic_cut_are_checked() -> None:
    told = {"loss": F.mse_loss, "example": (torch.zeros(2, 4), torch.zeros(2, 4))}
    with pytest.raises(MeshError, match="give it with stages='auto'"):
        hc.pipeline(nn.Linear(4, 4), hc.Mesh(stage=1), memory="1GiB", **told)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="a list of module names"):
        hc.pipeline(nn.Linear(4, 4), hc.Mesh(stage=1), stages="head", **told)  # type: ignore[arg-type]
