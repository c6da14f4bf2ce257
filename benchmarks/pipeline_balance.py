"""How even stages are that were cut automatically: predicted when they are cut, and measured when they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.parts.replay import StageProgram, StageRun
from halocline.testing.pool import RankPool
from halocline.workloads import WORKLOADS

DEADLINE = 120.0
STAGES = (2, 3, 4)
MICROBATCHES = 4


@dataclass(frozen=True)
class BalanceCase:
    """A built-in network with the shape of one micro-batch."""

    network: str
    arguments: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    classes: int

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return WORKLOADS[self.network].factory(**dict(self.arguments))

    def batch(self) -> tuple[Tensor, Tensor]:
        shape = (MICROBATCHES * self.shape[0], *self.shape[1:])
        if self.network == "transformer":
            return torch.randint(self.classes, shape), torch.randint(self.classes, shape)
        targets = shape[:1] if self.network == "resnet50" else (shape[0], *shape[2:])
        return torch.randn(shape), torch.randint(self.classes, targets)


CASES = (
    BalanceCase("unet3d", (("width", 8),), (1, 1, 32, 32, 32), 3),
    BalanceCase("resnet50", (("width", 32), ("classes", 10)), (4, 3, 64, 64), 10),
    BalanceCase("transformer", (("vocabulary", 512), ("length", 128), ("width", 128), ("heads", 4), ("layers", 6)),
                (4, 128), 512),
)  # fmt: skip


@dataclass(frozen=True)
class StageSeconds:
    """Of one rank's stage, for a micro-batch: as predicted, and processor time as measured."""

    predicted: float
    measured: float


def stage_seconds(case: BalanceCase, stages: int, repeat: int) -> StageSeconds:
    """On a rank: cut the network automatically, and time its stage's forward and backward."""
    torch.set_num_threads(1)
    batch, spent = case.batch(), 0.0

    def timed(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            result = own(*args)
            spent += time.thread_time() - began
            return result

        return call

    pipe = hc.pipeline(case.make(), hc.Mesh(stage=stages), loss=F.cross_entropy, example=batch,
                       microbatches=MICROBATCHES, stages="auto")  # fmt: skip
    took = []
    with (
        mock.patch.object(StageProgram, "run", timed(StageProgram.run)),
        mock.patch.object(StageRun, "backward", timed(StageRun.backward)),
    ):
        for turn in range(repeat + 1):
            spent = 0.0
            pipe.step(*batch)
            took += [spent / MICROBATCHES] if turn else []
    assert pipe.cut is not None
    assert pipe.lane is not None
    return StageSeconds(pipe.cut.stages[pipe.lane].seconds, median(took))


def measure_balance(repeat: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The slowest stage over the mean of all, predicted and measured, for each network and number of stages."""
    found = []
    for stages in STAGES:
        with RankPool(stages, collective_timeout=DEADLINE) as pool:
            for case in CASES:
                by_rank = pool.run(stage_seconds, case, stages, repeat, deadline=DEADLINE)
                found.append(told := balance_case(case.network, by_rank))
                tell(f"{case.network}, {stages} stages: the slowest {told['measured']:.3f} of the mean, "
                     f"predicted {told['predicted']:.3f}")  # fmt: skip
    return found


def balance_case(network: str, by_rank: list[StageSeconds]) -> dict[str, Any]:
    """Both imbalances, and how far they are apart."""
    predicted, measured = (_imbalance([getattr(each, name) for each in by_rank]) for name in ("predicted", "measured"))
    return {"kind": "balance", "network": network, "ranks": len(by_rank), "predicted": predicted, "measured": measured,
            "off": abs(predicted / measured - 1), "predicted_s": [each.predicted for each in by_rank],
            "measured_s": [each.measured for each in by_rank]}  # fmt: skip


def _imbalance(seconds: list[float]) -> float:
    return max(seconds) * len(seconds) / sum(seconds)
