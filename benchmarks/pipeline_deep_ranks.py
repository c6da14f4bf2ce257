"""What each rank of ``bench pipeline --deep`` runs: a ResNet of 1,001 layers, in stages or whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.parts import PipelineSchedule, StageCut, make_schedule
from halocline.parts.automatic import time_calls
from halocline.parts.cutting import CallCosts, best_cut
from halocline.parts.record import meta_copy, record_model
from halocline.parts.replay import StageProgram, StageRun

BLOCKS = 111  # of each of three groups: 9 x 111 + 2 layers
WIDTHS = (16, 64, 128, 256)
CLASSES = 10


@dataclass(frozen=True)
class DeepCase:
    """A step of a global batch; ``partitions`` and ``replicas`` of the hybrid."""

    blocks: int = BLOCKS
    image: int = 32
    batch: int = 32
    microbatches: int = 4
    partitions: int = 2
    replicas: int = 2

    @property
    def ranks(self) -> int:
        return self.partitions * self.replicas

    @property
    def layers(self) -> int:
        return 9 * self.blocks + 2


class Bottleneck(nn.Module):
    """Norm, ReLU and convolution, three times, beside the way past them (He et al. 2016, version 2)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        inner = out // 4
        self.norms = nn.ModuleList(_norm(width) for width in (channels, inner, inner))
        self.convolutions = nn.ModuleList((
            nn.Conv2d(channels, inner, 1, stride, bias=False), nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.Conv2d(inner, out, 1, bias=False),
        ))  # fmt: skip
        self.past = None if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.relu(norm(y)))
        return y + (x if self.past is None else self.past(x))


def _norm(width: int) -> nn.BatchNorm2d:
    """Of each replica by itself, and without running statistics, which replicas would share in every forward."""
    return nn.BatchNorm2d(width, track_running_stats=False)


class DeepResNet(nn.Module):
    """For small images: ResNet-1001 with 111 blocks in each group, of 10.3 million parameters."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False), nn.Sequential()
        for group, (channels, out) in enumerate(pairwise(WIDTHS)):
            for place in range(blocks):
                stride = 2 if group and not place else 1
                self.blocks.append(Bottleneck(out if place else channels, out, stride))
        self.norm, self.head = _norm(WIDTHS[-1]), nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


_steps: dict[tuple[DeepCase, str], Callable[[], object]] = {}


def prepare(case: DeepCase, way: str, cut: StageCut) -> float:
    """Make the model and its batch; seconds of that. ``way`` is "hybrid" or "data"."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DeepResNet(case.blocks)
    x, y = images(case, case.batch)
    if way == "hybrid":
        mesh = hc.Mesh(stage=case.partitions, data=case.replicas)
        pipe = hc.pipeline(model, mesh, loss=F.cross_entropy, example=(x, y), microbatches=case.microbatches,
                           cuts=[{0: "data"}] * 2, batch_statistics="replica", stages=cut)  # fmt: skip
        parameters = list(pipe.parameters())
        _steps[case, way] = lambda: pipe.step(x, y)
    else:
        rank, share = dist.get_rank(), case.batch // case.ranks
        mine = slice(rank * share, (rank + 1) * share)
        whole = hc.distribute(model, hc.Mesh(data=case.ranks), batch_statistics="replica")
        parameters = list(whole.parameters())
        _steps[case, way] = lambda: F.cross_entropy(whole(x[mine]), y[mine]).backward()
    plain = _steps[case, way]
    optimizer = torch.optim.SGD(parameters, 0.01)

    def step() -> None:
        optimizer.zero_grad()
        plain()
        optimizer.step()

    _steps[case, way] = step
    return time.perf_counter() - began


def images(case: DeepCase, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, case.image, case.image, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def timed_step(case: DeepCase, way: str) -> float:
    """Seconds of a step that all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    _steps[case, way]()
    return time.perf_counter() - began


def on_first(case: DeepCase, per_byte: float, latency: float) -> StageCut | None:
    """:func:`cut_of` on rank 0; the others rest."""
    return cut_of(case, per_byte, latency) if dist.get_rank() == 0 else None


def cut_of(case: DeepCase, per_byte: float, latency: float) -> StageCut:
    """By rank 0 alone: the cut by measured calls of a replica's micro-batch."""
    torch.set_num_threads(1)
    model = DeepResNet(case.blocks)
    batch = images(case, case.batch // case.replicas // case.microbatches)
    record = record_model(meta_copy(model), F.cross_entropy, batch[:1], batch[1:], torch.device("cpu"))
    times = time_calls(record, model, batch, sustained=True)
    costs = CallCosts(tuple(b for _, b in times), per_byte, latency, tuple(f for f, _ in times))
    schedule = schedule_of(case)
    held = [schedule.in_flight[lane] for lane in schedule.lane_of]
    return best_cut(record, costs, case.partitions, held)


def whole_seconds(case: DeepCase) -> tuple[float, float]:
    """Of forward, and of forward and backward, of a rank's share of the batch by the plain network."""
    torch.set_num_threads(1)
    model, batch = DeepResNet(case.blocks), images(case, case.batch // case.ranks)
    found = []
    for _ in range(3):
        began = time.perf_counter()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        forward = time.perf_counter() - began
        loss.backward()
        found.append((forward, time.perf_counter() - began))
    return fmean(f for f, _ in found[1:]), fmean(b for _, b in found[1:])


def stage_seconds(case: DeepCase) -> tuple[int, float, float]:
    """In a step of the hybrid: this rank's stage, and the seconds of its forward and of its backward of a micro-batch,
    without messages."""
    spent = dict.fromkeys(("run", "backward"), 0.0)

    def timed(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            result = own(*args)
            spent[name] += time.perf_counter() - began
            return result

        return call

    timed_step(case, "hybrid")  # kernels are found, and gradients get their buckets
    with (
        mock.patch.object(StageProgram, "run", timed("run", StageProgram.run)),
        mock.patch.object(StageRun, "backward", timed("backward", StageRun.backward)),
    ):
        timed_step(case, "hybrid")
    return dist.get_rank() // case.replicas, spent["run"] / case.microbatches, spent["backward"] / case.microbatches


def schedule_of(case: DeepCase) -> PipelineSchedule:
    return make_schedule("1f1b", case.partitions, case.microbatches)
