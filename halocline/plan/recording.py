"""One training step of a network as one rank of many would run it, recorded on meta tensors: nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distribute import distribute
from ..program import Record, dry, record
from ..program.memory import peak_of
from ..rules import shard
from ..world import Mesh

#: Axes that a plan may cut along, and the dims of the volume that they cut; spatial ones count from the end.
AXES = {"data": 0, "depth": -3, "height": -2, "width": -1}
STEADY = 2  # steps after which gradients have their buckets


@dataclass(frozen=True)
class Subject:
    """What is to be planned: a network, one sample of each input, and how it is trained."""

    make_model: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    shapes: tuple[tuple[int, ...], ...]  # with a batch of one; the first is the volume
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    @property
    def volume(self) -> dict[str, int]:
        """Spatial sizes by axis."""
        shape = self.shapes[0]
        return {axis: shape[dim] for axis, dim in AXES.items() if axis != "data" and len(shape) + dim >= 2}


@dataclass(frozen=True)
class RecordedStep:
    """A step of one rank, with the bytes it holds."""

    record: Record
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def middle_rank(sizes: Mapping[str, int]) -> int:
    """The rank with most neighbours: it does the most, so the step waits for it."""
    rank = 0
    for size in sizes.values():
        rank = rank * size + size // 2
    return rank


def record_step(
    subject: Subject,
    sizes: Mapping[str, int],
    batch: int,
    rank: int | None = None,
    warm: int = STEADY,
    beside: AbstractContextManager[object] | None = None,
) -> RecordedStep:
    """A step of ``rank`` on a mesh of these sizes; ``batch`` samples on each rank of the data axis.

    With fewer than ``STEADY`` steps before it (``warm``), gradients travel as in a first step: when backward has ended.

    The recorded step runs inside ``beside``, which may watch its operations too.
    """
    rank = middle_rank(sizes) if rank is None else rank
    with dry(rank, math.prod(sizes.values())), torch.device("meta"):
        mesh = Mesh(**sizes)
        model = distribute(subject.make_model().to(subject.dtype), mesh)
        inputs = [_input(subject, index, mesh, batch * sizes.get("data", 1)) for index in range(len(subject.shapes))]
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = subject.optimizer(parameters) if subject.optimizer else None

        def step() -> None:
            subject.loss(model(*inputs)).backward()
            if optimizer is not None:
                optimizer.step()

        for _ in range(warm):
            record(step, mesh)  # which names the module of an operation that needs values
        recorded: list[Record] = []
        with beside or nullcontext():
            peak = peak_of(lambda: recorded.append(record(step, mesh)))
        state = 0 if optimizer is None else _bytes(_state_tensors(optimizer))
    weights = _bytes(parameters)
    return RecordedStep(recorded[0], weights, weights, state, peak)


def _input(subject: Subject, index: int, mesh: Mesh, batch: int) -> Tensor:
    shape = (batch, *subject.shapes[index][1:])
    volume = subject.shapes[0]
    same = len(shape) == len(volume) and shape[2:] == volume[2:]
    dims = {AXES[axis] % len(shape): axis for axis in mesh.names if mesh.sizes[axis] > 1 and (same or axis == "data")}
    return shard(torch.empty(shape, dtype=subject.dtype), mesh, dims)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
