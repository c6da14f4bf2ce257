"""Pipelines give loss, gradients and buffers of one rank with the same micro-batches."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelining import SEED, Case, one_rank
from torch import Tensor, nn

import halocline as hc
from halocline.testing import shared_pool
from halocline.world import run_local

EXACT = 1e-8
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
INSIDE = {
    "chain": [{}, {"data": 2}, {"model": 2}],
    "unet": [{}, {"data": 2}, {"depth": 2}, {"data": 2, "depth": 2}],
    "residual": [{}, {"data": 2}, {"depth": 2}],
    "tokens": [{}, {"data": 2}, {"model": 2}],
}
CASES = [
    (name, schedule, stages, inside)
    for name in INSIDE
    for schedule, stages, inside in itertools.product(SCHEDULES, (2, 3, 4), INSIDE[name])
    if stages * math.prod(inside.values()) <= 4 or (schedule == "1f1b" and stages == 2)
]


def _is_quick(place: int, name: str, schedule: str, stages: int, inside: dict[str, int]) -> bool:
    """One schedule in turn for each network, with two stages."""
    return stages == 2 and schedule == SCHEDULES[(place + list(INSIDE[name]).index(inside)) % len(SCHEDULES)]


EVERY = [
    pytest.param(*case, marks=() if _is_quick(list(INSIDE).index(case[0]), *case) else pytest.mark.long)
    for case in CASES
]


def step_errors(case: Case, sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, int, int]:
    """Of this rank: the error of a step, how many micro-batches it held, and how many it may hold."""
    mesh = hc.Mesh(**sizes)
    pipe = case.pipeline(mesh, **options)
    loss = pipe.step(*case.batch)
    assert pipe.lane is not None
    return case.error(pipe, loss), pipe.in_flight, pipe.schedule.in_flight[pipe.lane]


def check(found: list[tuple[float, int, int]]) -> None:
    assert max(error for error, _, _ in found) <= EXACT
    assert all(held <= promised for _, held, promised in found)


@pytest.mark.parametrize(("name", "schedule", "stages", "inside"), EVERY)
def test_one_step(name: str, schedule: str, stages: int, inside: dict[str, int]) -> None:
    case, sizes = Case.of(name, 4), {"stage": stages, **inside}
    check(run_local(math.prod(sizes.values()), lambda: step_errors(case, sizes, {"schedule": schedule})))


@pytest.mark.parametrize("name", ["chain", "residual", "unet"])
def test_interleaved(name: str) -> None:
    case, options = Case.of(name, 4), {"schedule": "interleaved", "rounds": 2}
    check(run_local(2, lambda: step_errors(case, {"stage": 2}, options)))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved"])
def test_processes(schedule: str) -> None:
    case = Case.of("residual", 4)
    case.subject = None  # type: ignore[assignment]  # functions are found by name on the ranks
    found = shared_pool(4).run(on_a_process, case, {"stage": 2, "data": 2}, {"schedule": schedule}, deadline=60)
    check(found)


def on_a_process(case: Case, sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, int, int]:
    from pipelining import SUBJECTS

    case.subject = SUBJECTS["residual"]
    return step_errors(case, sizes, options)


def test_stages_by_name_and_any_number_of_microbatches() -> None:
    for microbatches in (1, 2, 8):
        case = Case.of("residual", microbatches)
        options = {"stages": ["blocks.1", "head"]}
        check(run_local(3, lambda c=case, o=options: step_errors(c, {"stage": 3}, o)))  # type: ignore[misc]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_begins_with_a_write_in_place(schedule: str) -> None:
    """The received value is a leaf, which autograd lets nobody write to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    one = copy.deepcopy(model)
    expected = one_rank(one, F.mse_loss, (x, y), 2)

    def body() -> float:
        pipe = hc.pipeline(copy.deepcopy(model), hc.Mesh(stage=2), loss=F.mse_loss, example=(x, y), microbatches=2,
                           stages=["1"], schedule=schedule)  # fmt: skip
        worst, named = abs(float(pipe.step(x, y)) - float(expected)), dict(one.named_parameters())
        return max([worst, *(float((p.grad - named[n].grad).abs().max()) for n, p in pipe.named_parameters())])

    assert max(run_local(2, body)) <= EXACT


def test_one_stage_is_data_parallel() -> None:
    case = Case.of("residual", 2)
    check(run_local(2, lambda: step_errors(case, {"stage": 1, "data": 2}, {"schedule": "1f1b"})))


@pytest.mark.parametrize(
    ("strategy", "partitions", "replicas"), [("data", None, None), ("model", 4, None), ("hybrid", 2, 2)]
)
def test_a_strategy_makes_the_mesh(strategy: str, partitions: int | None, replicas: int | None) -> None:
    case = Case.of("residual", 2)

    def body() -> float:
        hc.random.seed(SEED)
        pipe = hc.pipeline(copy.deepcopy(case.model), loss=case.subject.loss, example=case.batch, microbatches=2,
                           strategy=strategy, partitions=partitions, replicas=replicas)  # fmt: skip
        return case.error(pipe, pipe.step(*case.batch))

    assert max(run_local(4, body)) <= EXACT


def test_gradients_accumulate_over_steps() -> None:
    """Of tied weights too, which are sums over stages."""
    case = Case.of("tokens", 2)

    def body() -> list[float]:
        pipe = case.pipeline(hc.Mesh(stage=2, data=2))
        pipe.step(*case.batch, average=False)
        errors = [case.error(pipe, pipe.step(*case.batch), times=2)]
        return [*errors, case.error(pipe, pipe.step(*case.batch), times=3)]

    assert max(max(errors) for errors in run_local(4, body)) <= EXACT


def trained(case: Case, sizes: dict[str, int], steps: int, options: dict[str, Any], saved: Any = None) -> Any:
    """State dict and state of AdamW after some clipped steps, and the norms."""
    pipe = case.pipeline(hc.Mesh(**sizes), **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    if saved is not None:
        pipe.load_state_dict(saved[0])
        pipe.load_optimizer_state_dict(optimizer, saved[1])
        hc.random.set_state(saved[2])
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(*case.batch)
        norms.append(float(pipe.clip_grad_norm_(0.05)))
        optimizer.step()
    return pipe.state_dict(), pipe.optimizer_state_dict(optimizer), hc.random.get_state(), norms


def train_alone(case: Case, steps: int) -> tuple[nn.Module, list[float]]:
    model, norms = copy.deepcopy(case.model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hc.random.seed(SEED)
    with hc.random.reproducible():
        for _ in range(steps):
            optimizer.zero_grad()
            for x, y in zip(*(tensor.chunk(case.microbatches) for tensor in case.batch), strict=True):
                (case.subject.loss(model(x), y) / case.microbatches).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
    return model, norms


@pytest.mark.parametrize(("name", "inside"), [("tokens", {"model": 2}), ("chain", {"data": 2}), ("unet", {"depth": 2})])
def test_training_with_clipping_and_a_restart_elsewhere(name: str, inside: dict[str, int]) -> None:
    """Two steps, a checkpoint, two more steps in other stages: one device's four."""
    case = Case.of(name, 2)
    model, norms = train_alone(case, 4)
    first = run_local(4, lambda: trained(case, {"stage": 2, **inside}, 2, {}))
    saved = first[0]
    assert all(torch.equal(saved[0][key], other[0][key]) for other in first for key in saved[0])
    for state, _, _, later in run_local(3, lambda: trained(case, {"stage": 3}, 2, {"schedule": "zero-bubble"}, saved)):
        assert saved[3] + later == pytest.approx(norms, rel=1e-9)
        wanted = model.state_dict()
        assert list(state) == list(wanted)
        assert max(float((state[key].double() - wanted[key].double()).abs().max()) for key in wanted) <= EXACT


def test_autocast_is_that_of_one_rank() -> None:
    case = Case.of("residual", 2)
    model, batch = copy.deepcopy(case.model).float(), (case.batch[0].float(), case.batch[1])
    with torch.autocast("cpu", torch.bfloat16):
        expected = one_rank(model, case.subject.loss, batch, 2)

    def body() -> tuple[float, float]:
        mine = copy.deepcopy(case.model).float()
        with torch.autocast("cpu", torch.bfloat16):
            pipe = hc.pipeline(mine, hc.Mesh(stage=2), loss=case.subject.loss, example=batch, microbatches=2)
            loss = pipe.step(*batch)
        named = dict(model.named_parameters())
        worst = max(float((p.grad - named[name].grad).abs().max()) for name, p in pipe.named_parameters())
        return abs(float(loss) - float(expected)), worst

    # The same operations in the same precision: equal to float32's rounding, where bfloat16's would be 1e-3.
    assert max(max(errors) for errors in run_local(2, body)) <= 1e-6


def test_evaluation_mode_is_recorded_anew() -> None:
    case = Case.of("unet", 2)

    def body() -> float:
        pipe = case.pipeline(hc.Mesh(stage=2))
        pipe.model.eval()
        loss = pipe.step(*case.batch)
        alone = copy.deepcopy(case.model).eval()
        return abs(float(loss) - float(one_rank(alone, case.subject.loss, case.batch, 2)))

    assert max(run_local(2, body)) <= EXACT


class Scaled(nn.Module):
    """A number that the training loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rate = nn.Linear(3, 3), nn.Linear(3, 2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.rate)


def test_a_changed_attribute_is_recorded_anew() -> None:
    torch.manual_seed(0)
    model, x, y = Scaled().double(), *(torch.randn(4, n, dtype=torch.float64) for n in (3, 2))
    expected = []
    for rate in (1.0, 0.5, 1.0):
        model.rate = rate
        expected.append(float(F.mse_loss(model(x), y).detach()))

    def body() -> list[float]:
        pipe = hc.pipeline(copy.deepcopy(model), hc.Mesh(stage=2), loss=F.mse_loss, example=(x, y))
        losses = []
        for rate in (1.0, 0.5, 1.0):
            pipe.model.rate = rate  # type: ignore[assignment]
            losses.append(float(pipe.step(x, y)))
        return losses

    assert run_local(2, body) == [pytest.approx(expected, rel=1e-12)] * 2


def test_a_rank_needs_no_values_of_inputs_that_it_does_not_read() -> None:
    case = Case.of("residual", 2)

    def body() -> float:
        pipe = case.pipeline(hc.Mesh(stage=2))
        x, y = case.batch
        return case.error(pipe, pipe.step(*((x, y.to("meta")) if pipe.lane == 0 else (x.to("meta"), y))))

    assert max(run_local(2, body)) <= EXACT


def test_parameters_of_other_stages_take_no_memory() -> None:
    case = Case.of("residual", 2)

    def body() -> tuple[set[str], set[str]]:
        pipe = case.pipeline(hc.Mesh(stage=2))
        real = {name for name, p in pipe.model.named_parameters() if not p.is_meta}
        return real, {name for name, _ in pipe.named_parameters()}

    (shown, own), (others, theirs) = run_local(2, body)
    assert shown == own
    assert others == theirs
    assert not own & theirs
