"""What each rank of ``bench pipeline`` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import halocline as hc
from halocline.parts.replay import StageProgram, StageRun

BLOCKS = 8  # divisible among 2, 3 or 4 stages with those that are left over on the last


@dataclass(frozen=True)
class StepCase:
    """A step of a network of equal blocks."""

    schedule: str
    microbatches: int
    width: int
    rows: int = 64  # of a micro-batch


@dataclass(frozen=True)
class SleepCase:
    """A step whose stages sleep: ``sleep`` seconds in a rank's forward of a micro-batch, twice as long in backward."""

    schedule: str
    microbatches: int
    rounds: int
    sleep: float


@dataclass
class RankSteps:
    """Seconds of steps on one rank."""

    ours: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    difference: float = 0.0  # of gradients, over their largest


@dataclass
class RankSleeps:
    """Seconds of sleeping steps on one rank, and the micro-batches that it held."""

    seconds: list[float]
    in_flight: int
    promised: int


def _network(width: int, blocks: int = BLOCKS) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)))


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def steps_beside_torch(case: StepCase, repeat: int) -> RankSteps:
    """In turn a step of ours and one of torch's, on the same weights and samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, theirs = _network(case.width), _network(case.width)
    theirs.load_state_dict(model.state_dict())
    x, y = torch.randn(2, case.rows * case.microbatches, case.width)
    share = BLOCKS // ranks
    own = theirs[rank * share : (rank + 1) * share]
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[case.schedule]
    schedule = kind(stage, case.microbatches, loss_fn=F.mse_loss)
    pipe = hc.pipeline(model, hc.Mesh(stage=ranks), loss=F.mse_loss, example=(x, y), microbatches=case.microbatches,
                       schedule=case.schedule, stages=[str(share * n) for n in range(1, ranks)])  # fmt: skip

    def step_of_torch() -> None:
        losses: list[Tensor] = []
        given = (x,) if rank == 0 else ()
        told = {"target": y, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*given, **told)

    found = RankSteps()
    for turn in range(repeat + 2):
        for parameter in (*own.parameters(), *pipe.parameters()):
            parameter.grad = None
        ours, torchs = _timed(lambda: pipe.step(x, y)), _timed(step_of_torch)
        if turn >= 2:
            found.ours.append(ours)
            found.torch.append(torchs)
    mine = dict(pipe.named_parameters())
    for name, parameter in theirs.named_parameters():
        gradient = mine[name].grad if name in mine else None
        if parameter.grad is not None and gradient is not None:
            gap = (gradient - parameter.grad).abs().max() / parameter.grad.abs().max()
            found.difference = max(found.difference, float(gap))
    return found


def sleeping_steps(case: SleepCase, repeat: int) -> RankSleeps:
    """Steps of a small network, each of whose stages sleeps for the time of its work."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(2 * case.microbatches, 4)
    pipe = hc.pipeline(_network(4, ranks * case.rounds), hc.Mesh(stage=ranks), loss=F.mse_loss, example=(x, x),
                       microbatches=case.microbatches, schedule=case.schedule, rounds=case.rounds)  # fmt: skip
    pause = case.sleep / case.rounds

    def asleep(times: float, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            end = time.perf_counter() + times * pause
            result = own(*args)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return call

    with (
        mock.patch.object(StageProgram, "run", asleep(1, StageProgram.run)),
        mock.patch.object(StageRun, "backward", asleep(2, StageRun.backward)),
        mock.patch.object(StageRun, "backward_inputs", asleep(1, StageRun.backward_inputs)),
        mock.patch.object(StageRun, "backward_weights", asleep(1, StageRun.backward_weights)),
    ):
        pipe.step(x, x)
        seconds = [_timed(lambda: pipe.step(x, x)) for _ in range(repeat)]
    assert pipe.lane is not None
    return RankSleeps(seconds, pipe.in_flight, pipe.schedule.in_flight[pipe.lane])
