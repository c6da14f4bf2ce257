"""One training step of a network as one rank of many would run it, recorded on meta tensors: nothing is computed."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..arrangement import AXIS_OF_LETTER, Arrangement
from ..distribute import distribute
from ..geometry import Partition
from ..program import Record, dry, record
from ..program.autocast import autocast_on_meta
from ..program.memory import peak_of
from ..program.record import computed, is_free
from ..tensor import unwrap
from ..tree import tensors_in
from ..world import World
from .replay import Replay

#: Letters of the dims of a network's input, by how many there are.
LETTERS = {2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}
STEADY = 2  # steps after which gradients have their buckets


@dataclass(frozen=True)
class TargetShape:
    """What the loss compares the outputs with: a shape with a batch of one, and a letter for each dim."""

    shape: tuple[int, ...]
    letters: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Subject:
    """What is to be planned: a network, one sample of each input, and how it is trained."""

    make_model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]  # of the outputs and the targets
    shapes: tuple[tuple[int, ...], ...]  # with a batch of one; the first is the volume
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    targets: tuple[TargetShape, ...] = ()
    #: Entered round forward and loss, such as an autocast.
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def meta_model(self) -> nn.Module:
        """The network without values."""
        with torch.device("meta"):
            return self.make_model()

    @property
    def letters(self) -> str:
        """Of the dims of the volume."""
        return LETTERS.get(len(self.shapes[0]), "N")

    @property
    def volume(self) -> dict[str, int]:
        """Spatial sizes by axis."""
        return volume_of(self.shapes[0])


def volume_of(shape: Sequence[int]) -> dict[str, int]:
    """Spatial sizes by axis of a sample of this shape."""
    named = zip(LETTERS.get(len(shape), "N"), shape, strict=False)
    return {AXIS_OF_LETTER[letter]: size for letter, size in named if letter not in "NC"}


@dataclass(frozen=True)
class RecordedStep:
    """A step of one rank, with the bytes it holds."""

    record: Record
    weights: int  # buffers and frozen parameters too
    gradients: int
    optimizer: int
    activations: int  # the peak of what the step makes, and this rank's part of the samples
    model: nn.Module = field(repr=False, compare=False)  # without values

    @property
    def memory(self) -> int:
        """Bytes at the peak of a step: what stays from step to step, and the most that lives beside it."""
        return self.weights + self.gradients + self.optimizer + self.activations


def busiest_rank(arrangement: Arrangement, volume: Mapping[str, int]) -> int:
    """The rank with the largest tile, and of those one with most neighbours: the others wait for it."""
    rank = 0
    for axis, size in arrangement.sizes.items():
        place = size // 2
        if axis in volume and size > 1:
            at = arrangement.points.get(axis) or Partition.even(volume[axis], size, arrangement.multiple).points
            pieces = [end - begin for begin, end in pairwise(at)]
            place = max(range(size), key=lambda n: (pieces[n], 0 < n < size - 1, -abs(n - size // 2)))
        rank = rank * size + place
    return rank


def record_step(
    subject: Subject,
    sizes: Mapping[str, int],
    batch: int,
    rank: int | None = None,
    warm: int = STEADY,
    beside: AbstractContextManager[object] | None = None,
    arrangement: Arrangement | None = None,
    pricing: Replay | None = None,
    options: Mapping[str, Any] | None = None,
    plain: bool = False,
) -> RecordedStep:
    """A step of ``rank`` on a mesh of these sizes; ``batch`` samples on each rank of the data axis.

    With fewer than ``STEADY`` steps before it (``warm``), gradients travel as in a first step: when backward has ended.

    The recorded step runs inside ``beside``, which may watch its operations too. ``arrangement`` says more than
    ``sizes``: cut points, choices, modules that gather or recompute. With ``pricing``, gradients are planned from the
    times that it predicts, and operations take the workspace that it knows of. ``options`` are further arguments of
    ``hc.distribute``. ``plain``: inputs are each rank's own samples as plain tensors, as with DistributedDataParallel.
    """
    arrangement = arrangement or Arrangement(sizes)
    rank = busiest_rank(arrangement, subject.volume) if rank is None else rank
    with dry(rank, math.prod(sizes.values())), torch.device("meta"), _without_hints():
        model = distribute(subject.make_model().to(subject.dtype), plan=arrangement, **(options or {}))
        mesh, samples = arrangement.mesh(), batch * sizes.get("data", 1)
        if plain:
            inputs = [torch.empty((batch, *shape[1:]), dtype=subject.dtype) for shape in subject.shapes]
            targets = [torch.empty((batch, *each.shape[1:]), dtype=each.dtype) for each in subject.targets]
        else:
            inputs = [_input(subject, shape, arrangement, samples) for shape in subject.shapes]
            targets = [_target(target, arrangement, samples) for target in subject.targets]
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = subject.optimizer(parameters) if subject.optimizer else None

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with subject.around(), autocast_on_meta():
                loss = subject.loss(model(*inputs), *targets)
            loss.backward()
            if optimizer is not None:
                optimizer.step()

        workspace = None
        if pricing is not None:
            mesh.world.events.clock = pricing.clock
            mesh.world.events.add(pricing.take)
            workspace = partial(_workspace, mesh.world, pricing) if pricing.knows_workspace else None
        for _ in range(warm):
            record(step, mesh)  # which names the module of an operation that needs values
        recorded: list[Record] = []
        with beside or nullcontext():
            peak = peak_of(lambda: recorded.append(record(step, mesh)), workspace)
        state = 0 if optimizer is None else _bytes(tensors_in(optimizer.state))
    held = _bytes([*model.parameters(), *model.buffers()])
    samples_held = _bytes([unwrap(each) for each in (*inputs, *targets)])
    return RecordedStep(recorded[0], held, _bytes(parameters), state, samples_held + peak, model)


@contextmanager
def _without_hints() -> Iterator[None]:
    """Inside, this thread logs no hints on how a run could be better: nothing runs."""
    log, thread = logging.getLogger("halocline"), threading.get_ident()

    def keep(entry: logging.LogRecord) -> bool:
        return entry.thread != thread or entry.levelno >= logging.ERROR

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _workspace(world: World, pricing: Replay, function: Any, args: Any, result: Any) -> int:
    """Bytes that cuDNN and others take while the operation runs; views and marks take none."""
    return 0 if is_free(function) else pricing.workspace(computed(world, function, args, result))


def _input(subject: Subject, shape: tuple[int, ...], arrangement: Arrangement, samples: int) -> Tensor:
    """Inputs of the volume's size are cut as it is; others over the data axis alone."""
    volume = subject.shapes[0]
    same = len(shape) == len(volume) and shape[2:] == volume[2:]
    letters = subject.letters if same else "N" + "." * (len(shape) - 1)
    return arrangement.shard(torch.empty((samples, *shape[1:]), dtype=subject.dtype), letters)


def _target(target: TargetShape, arrangement: Arrangement, samples: int) -> Tensor:
    """The part of a target that this rank holds, without values."""
    return arrangement.shard(torch.empty((samples, *target.shape[1:]), dtype=target.dtype), target.letters)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Of this rank: tiles of what is cut."""
    return sum(unwrap(tensor).numel() * tensor.element_size() for tensor in tensors)
