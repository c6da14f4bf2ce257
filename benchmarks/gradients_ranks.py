"""On the ranks of ``bench gradients``: the same training step with gradients averaged in several ways, or not at all.

A way is named ``compute`` (nobody averages), ``halocline``, or as a :class:`DdpSetting` writes itself. Each has a model
of its own, kept from one call to the next.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halocline.distribute import distribute
from halocline.reduction import Lag, engine_of
from halocline.world import Averaged, Event, Mesh

from .gradients_models import SUBJECTS, Layer, emulated, layers_of, sleep_until

COMPUTE, OURS = "compute", "halocline"
AHEAD, AHEAD_BF16, LAGGED = "halocline next-forward", "halocline next-forward bf16", "halocline lag"
#: Those whose sums go on after a step: only steps in a row tell what one costs.
IN_A_ROW: dict[str, dict[str, Any]] = {
    AHEAD: {"overlap": "next-forward"},
    AHEAD_BF16: {"overlap": "next-forward", "wire": "bf16"},
    LAGGED: {"lag": 1},
}
ROW = 3  # steps that count, after one that does not
RATE = 1e-3  # of learning
PIECE = 25 << 20  # bytes of a bucket by DDP's default
HEADSTART = 0.03  # seconds from the agreement on a start to the start: longer than any rank takes to hear of it
WireWay = Literal["flat", "pieces"]


# ---- ways ----


@dataclass(frozen=True)
class DdpSetting:
    """How DistributedDataParallel is asked to work; without a cap, as it is when nothing is asked."""

    cap: float | None = None  # of a bucket, in MB as DDP counts them
    view: bool = False  # gradient_as_bucket_view
    static: bool = False  # static_graph

    def __str__(self) -> str:
        words = ["ddp", f"{self.cap:g} MB" if self.cap else "", "view" if self.view else ""]
        return ", ".join(word for word in [*words, "static" if self.static else ""] if word)

    def wrap(self, model: nn.Module) -> nn.Module:
        # Every rank has built the same weights: there is nothing to send around first.
        options = {"gradient_as_bucket_view": self.view, "static_graph": self.static, "init_sync": False}
        return DistributedDataParallel(model, bucket_cap_mb=self.cap, **options)  # type: ignore[arg-type]


def wrapped(way: str | DdpSetting, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    if isinstance(way, DdpSetting):
        return way.wrap(model)
    if way in IN_A_ROW:
        handed_in: dict[str, Any] = {"optimizer": optimizer} if "overlap" in IN_A_ROW[way] else {}
        return distribute(model, Mesh(data=-1), **IN_A_ROW[way], **handed_in)
    return distribute(model, Mesh(data=-1)) if way == OURS else model


# ---- a model in training ----


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one rank's step; of compute alone, when within it each parameter was needed, and its gradient came."""

    forward: float
    backward: float
    optimizer: float
    ready: dict[int, float] = field(default_factory=dict)
    begun: float = 0.0  # on this rank's clock
    needed: dict[int, float] = field(default_factory=dict)
    cpu: float = 0.0  # seconds of processors, by all threads of the rank

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


class AveragedTraining:
    """One model under one way of averaging, with plain SGD."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor], way: str | DdpSetting) -> None:
        self.bare, self.loss = model, loss
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.model = wrapped(way, model, self.optimizer)
        self.row = ROW if way in IN_A_ROW else 0
        self.ready: dict[int, float] = {}
        self.needed: dict[int, float] = {}
        if way == COMPUTE:
            self._watch()

    def _watch(self) -> None:
        for index, parameter in enumerate(self.bare.parameters()):

            def came(_: Tensor, index: int = index) -> None:
                self.ready[index] = time.perf_counter()

            parameter.register_post_accumulate_grad_hook(came)
        numbers = {parameter: index for index, parameter in enumerate(self.bare.parameters())}
        for module in self.bare.modules():
            lists = [child for child in module.children() if isinstance(child, nn.ParameterList)]
            own = [numbers[p] for part in (module, *lists) for p in part.parameters(recurse=False)]

            def needed(_: nn.Module, __: Any, own: list[int] = own) -> None:
                self.needed.update(dict.fromkeys(own, time.perf_counter()))

            if own:
                module.register_forward_pre_hook(needed)

    def step(self) -> StepTimes:
        """One; or the mean of several in a row, from the end of a first one on."""
        begun, cpu = start_together(), time.process_time()
        if not self.row:
            return replace(self._step(begun), cpu=time.process_time() - cpu)
        self._step(begun)
        taken = [self._step(time.perf_counter()) for _ in range(self.row)]
        self._come_to_rest()
        forward, backward, optimizer = (
            sum(getattr(one, part) for one in taken) / self.row for part in ("forward", "backward", "optimizer")
        )
        cpu = (time.process_time() - cpu) / (1 + self.row)
        return StepTimes(forward, backward, optimizer, begun=begun, cpu=cpu)

    def _come_to_rest(self) -> None:
        """What is measured next is to have the wire for itself."""
        overlap = getattr(engine_of(self.model), "overlap", None)
        if isinstance(overlap, Lag):
            overlap.state()
        elif overlap is not None:
            overlap.finish()

    def _step(self, begun: float) -> StepTimes:
        """From before the gradients are dropped to after the weights have moved."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        done = time.perf_counter()
        ready = {index: moment - begun for index, moment in self.ready.items()}
        needed = {index: moment - begun for index, moment in self.needed.items()}
        return StepTimes(forward - begun, backward - forward, done - backward, ready, begun, needed)


def start_together() -> float:
    """All ranks of one machine leave at the same moment, which is returned: a barrier lets some go sooner."""
    moment = torch.tensor([time.perf_counter() + HEADSTART], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    sleep_until(moment.item())
    return time.perf_counter()


# ---- what is trained ----


@dataclass(frozen=True)
class ModelOnRanks:
    """A subject by name. An emulated one has layers, and computes for so many ``seconds`` a step."""

    name: str
    layers: tuple[Layer, ...] = ()
    seconds: float = 0.0
    dtype: torch.dtype = torch.float32


def task_of(name: str, seconds: float, dtype: torch.dtype = torch.float32) -> ModelOnRanks:
    """Made once and sent to the ranks: to read layers off, torch imports what takes each of them seconds."""
    return (
        ModelOnRanks(name, layers_of(name), seconds, dtype)
        if SUBJECTS[name].emulated
        else ModelOnRanks(name, dtype=dtype)
    )


def make_trainer(task: ModelOnRanks, way: str | DdpSetting) -> AveragedTraining:
    """Weights are the same on every rank, data is not."""
    torch.manual_seed(0)
    if task.layers:
        model: nn.Module = emulated(task.layers, task.seconds).to(task.dtype)
        sample = torch.full((1,), 1.0 + dist.get_rank(), dtype=task.dtype)
        return AveragedTraining(model, lambda network: (network(sample) * sample).sum(), way)
    subject = SUBJECTS[task.name]
    model = subject.build().to(task.dtype)
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(subject.shape, generator=generator).to(task.dtype)
    labels = torch.randint(subject.classes, subject.shape[:1], generator=generator)
    return AveragedTraining(model, lambda network: F.cross_entropy(network(images), labels), way)


# ---- what the parent calls ----

_trainers: dict[str, AveragedTraining] = {}


def build(task: ModelOnRanks, way: str | DdpSetting, warm_up: int) -> StepTimes:
    """Buckets are arranged, plans are made and memory is had in the first steps. The last of them."""
    trainer = _trainers[str(way)] = make_trainer(task, way)
    return [trainer.step() for _ in range(max(1, warm_up))][-1]


def step(way: str | DdpSetting) -> StepTimes:
    return _trainers[str(way)].step()


def drop(ways: Sequence[str | DdpSetting] | None = None) -> None:
    """These ways, or all, with their memory."""
    for way in [*_trainers] if ways is None else ways:
        _trainers.pop(str(way), None)
    gc.collect()


def parameters_of(way: str | DdpSetting) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in _trainers[str(way)].bare.parameters()]


def wire(size: int, way: WireWay, repeat: int = 1, dtype: torch.dtype = torch.float32) -> list[float]:
    """Seconds of each of some sums of so many bytes over all ranks, and of nothing else."""
    # Memory that was never touched would be had while we measure.
    flat = torch.empty(math.ceil(size / dtype.itemsize), dtype=dtype).zero_()
    pieces = [flat] if way == "flat" else list(flat.split(PIECE // dtype.itemsize))
    seconds = []
    for _ in range(repeat):
        begun = start_together()
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()
        seconds.append(time.perf_counter() - begun)
    return seconds


# ---- what the engine tells ----


@dataclass(frozen=True)
class StepRecord:
    """One step of ``halocline``, its groups and messages as the engine writes them down; None where it does not."""

    step: StepTimes
    groups: list[Averaged] | None
    messages: int | None
    control_messages: int | None


def tell() -> StepRecord:
    trainer = _trainers[OURS]
    engine = engine_of(trainer.model)
    if engine is None:
        return StepRecord(trainer.step(), None, None, None)
    events, control = list[Event](), engine.control_messages
    with engine.world.events.listening(events.append):
        taken = trainer.step()
    groups = [event for event in events if isinstance(event, Averaged)]
    return StepRecord(taken, groups, len(groups), engine.control_messages - control)
