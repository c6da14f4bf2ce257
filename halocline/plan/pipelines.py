"""Meshes of stages and data: the recorded calls of a network priced on a machine, cut into stages, and scheduled.

Each call of the model's forward and loss is run alone on meta tensors, and its operations are priced as those of any
plan. Dynamic programming cuts the chain (:mod:`halocline.parts.cutting`), and the schedule's own simulation says how
long a step takes, with what crosses the borders; sums of gradients and the optimizer come after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import HaloclineError, PlanError
from ..parts import StageCut, make_schedule
from ..parts.automatic import run_alone
from ..parts.cutting import CallCosts, best_cut, step_seconds
from ..parts.record import ModelRecord, meta_copy, record_model
from ..program import dry
from ..program.record import OperationWatch
from ..world import Computed, this_world
from .collectives import sum_seconds
from .cost import Prices
from .machine import Machine
from .recording import Subject

SCHEDULES = ("1f1b", "zero-bubble")
MICROBATCHES = (1, 2, 4, 8)  # times the number of stages, as far as they divide the batch
MOST_STAGES = 64

log = logging.getLogger("halocline.plan")


@dataclass(frozen=True)
class PipelineCandidate:
    """A mesh of stages and data, with what a step is predicted to take on the machine."""

    stages: int
    replicas: int
    schedule: str
    microbatches: int
    samples: int
    cut: StageCut
    seconds: float
    bubble: float  # seconds of these in which a lane waits, on average
    gradients: float  # seconds of their sums and of the optimizer, of the slowest stage
    memory: int  # bytes of the fullest device
    fits: bool

    @property
    def seconds_per_sample(self) -> float:
        """Of a step."""
        return self.seconds / self.samples

    def __str__(self) -> str:
        words = [f"stage={self.stages}"] + [f"data={self.replicas}"] * (self.replicas > 1)
        return " ".join([*words, self.schedule, f"{self.microbatches} micro-batches"])


class _PricedWork(OperationWatch):
    """Adds up what the operations that run inside would take on the machine."""

    def __init__(self, prices: Prices) -> None:
        super().__init__(this_world(), self._add)
        self._prices, self.seconds = prices, 0.0

    def _add(self, event: Computed, *_: object) -> None:
        self.seconds += self._prices.seconds(event)


def pipelines(
    subject: Subject, machine: Machine, devices: int, batch: int | None, prices: Prices
) -> list[PipelineCandidate]:
    """The best schedule and number of micro-batches of each mesh of stages and data: those that fit by time, then the
    others by memory.

    ``batch`` samples a step, which micro-batches divide. A network that cannot be recorded as a chain of calls raises.
    """
    if batch is None:
        raise PlanError("a pipeline divides the batch into micro-batches; give batch=")
    priced = prices.on(machine, devices)
    recorded: dict[int, tuple[ModelRecord, CallCosts]] = {}

    def of_size(samples: int) -> tuple[ModelRecord, CallCosts]:
        if samples not in recorded:
            recorded[samples] = _recorded(subject, samples, priced)
        return recorded[samples]

    update, found = _update_seconds(subject, priced), []
    for stages in (n for n in range(2, min(devices, MOST_STAGES) + 1) if devices % n == 0):
        tried = list(_of_stages(stages, devices, batch, machine, update, of_size))
        found += sorted(tried, key=_rank)[:1]
    return sorted(found, key=_rank)


def _rank(candidate: PipelineCandidate) -> tuple[bool, float]:
    """Those that fit first, by time for a sample; the others by memory."""
    return not candidate.fits, candidate.seconds_per_sample if candidate.fits else candidate.memory


def _of_stages(
    stages: int, devices: int, batch: int, machine: Machine, update: float,
    of_size: Callable[[int], tuple[ModelRecord, CallCosts]],
) -> Iterator[PipelineCandidate]:  # fmt: skip
    """Every schedule and number of micro-batches."""
    replicas = devices // stages
    if batch % replicas:
        return
    local = batch // replicas
    for count in sorted({stages * times for times in MICROBATCHES if local % (stages * times) == 0} or {local}):
        record, costs = of_size(local // count)
        for name in SCHEDULES:
            try:
                yield _candidate(stages, replicas, name, count, batch, record, costs, machine, update)
            except HaloclineError as error:  # too few places to cut
                log.info("no pipeline of %d stages: %s", stages, error)
                return


def _candidate(
    stages: int, replicas: int, name: str, count: int, batch: int, record: ModelRecord, costs: CallCosts,
    machine: Machine, update: float,
) -> PipelineCandidate:  # fmt: skip
    """Price one schedule on meshes of stages and replicas. Seconds are of a step, bytes of the rank with most of them.

    A cut that fits is taken before a faster one that does not.
    """
    link = machine.link_between(0, replicas)  # ranks of a stage are neighbours
    per_byte, latency = link.shared_by / (link.gb_per_s.value * 1e9), link.latency_us.value * 1e-6
    own = CallCosts(costs.seconds, per_byte, latency, costs.forward)
    schedule = make_schedule(name, stages, count)
    held = [schedule.in_flight[lane] for lane in schedule.lane_of]
    room = machine.device.memory_gb.value * 1e9
    try:
        cut, fits = best_cut(record, own, stages, held, room), True
    except HaloclineError:
        cut, fits = best_cut(record, own, stages, held), False
    running = step_seconds(schedule, cut, per_byte, latency)
    total = sum(stage.parameters for stage in cut.stages)
    after = max(
        sum_seconds(machine, stage.parameters, range(number * replicas, (number + 1) * replicas))
        + update * stage.parameters / max(1, total)
        for number, stage in enumerate(cut.stages)
    )
    busy = count * sum(stage.seconds for stage in cut.stages) / stages
    memory = int(max(stage.memory for stage in cut.stages))
    return PipelineCandidate(
        stages, replicas, name, count, batch, cut, running + after, running - busy, after, memory, fits
    )


def _recorded(subject: Subject, samples: int, prices: Prices) -> tuple[ModelRecord, CallCosts]:
    """Of a micro-batch of one replica, with the seconds of each call."""
    with dry(0, 1), torch.device("meta"):
        model = meta_copy(subject.make_model().to(subject.dtype))
        inputs = tuple(torch.empty((samples, *shape[1:]), dtype=subject.dtype) for shape in subject.shapes)
        targets = tuple(torch.empty((samples, *each.shape[1:]), dtype=each.dtype) for each in subject.targets)
        with subject.around():
            record = record_model(model, subject.loss, inputs, targets, torch.device("cpu"))
        return record, call_costs(record, prices)


def call_costs(record: ModelRecord, prices: Prices) -> CallCosts:
    """Predicted seconds of each call, on meta tensors. Inside :func:`halocline.program.dry`."""

    def tensor_of(number: int) -> torch.Tensor:
        value = record.values[number]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    forward, both = [], []
    for call in record.calls:
        with _PricedWork(prices) as work:
            _, of_forward, of_both = run_alone(record, call, tensor_of, lambda: work.seconds, on_meta=True)
        forward.append(of_forward)
        both.append(of_both)
    return CallCosts(tuple(both), forward=tuple(forward))


def _update_seconds(subject: Subject, prices: Prices) -> float:
    """Of the optimizer's step on all parameters."""
    if subject.optimizer is None:
        return 0.0
    with dry(0, 1), torch.device("meta"):
        parameters = [p for p in subject.make_model().to(subject.dtype).parameters() if p.requires_grad]
        optimizer = subject.optimizer(parameters)
        for _ in range(2):  # the first makes its state
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            with _PricedWork(prices) as work:
                optimizer.step()
    return work.seconds


def explain_pipelines(candidates: Sequence[PipelineCandidate], best: float, name: str) -> list[str]:
    """The fastest pipeline beside the cut that was chosen (``best`` seconds for a sample), and its stages."""
    if not candidates:
        return ["No pipeline: no mesh of stages divides the devices and the batch."]
    first = candidates[0]
    if not first.fits:
        return [f"No pipeline fits: the leanest, {first}, needs {first.memory / 1e9:.1f} GB a device."]
    ratio = first.seconds_per_sample / best
    return [
        f"The pipeline {first} is predicted to take {ratio:.2f} times as long a sample as {name}; lanes wait "
        f"{1e3 * first.bubble:.3g} ms of {1e3 * first.seconds:.3g}, gradients and the optimizer take "
        f"{1e3 * first.gradients:.3g} ms after it.",
        first.cut.explain(),
    ]


__all__ = ["PipelineCandidate", "call_costs", "explain_pipelines", "pipelines"]
