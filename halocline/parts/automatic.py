"""``stages="auto"``: the calls are timed on rank 0, and cut where the slowest stage is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MeshError
from ..program.streaming.operations import fill
from ..tree import tensors_in
from ..world import Label, World
from .cutting import CallCosts, StageCut, best_cut
from .record import ModelRecord, RecordedCall
from .replay import state_of

_REPEATS = 3


class AutomaticCut:
    """Divides a record where the slowest stage is fastest; remembers the division for records of the same calls."""

    def __init__(
        self, model: nn.Module, batch: Callable[[], Sequence[Tensor]], world: World, stages: int,
        in_flight: Sequence[int], memory: float | None, ranks: int,
    ) -> None:  # fmt: skip
        """``batch`` gives the inputs of one micro-batch, in the record's order; ``ranks`` are those of a stage."""
        self._model: nn.Module | None = model
        self._batch, self._world, self._stages = batch, world, stages
        self._in_flight, self._memory, self._ranks = in_flight, memory, ranks
        self._calls: list[str] = []
        self.cut: StageCut | None = None  #: what was chosen

    def __call__(self, record: ModelRecord) -> list[int]:
        """The stage of each call. By all ranks together, the first time."""
        calls = [str(call) for call in record.calls]
        if self.cut is None:
            assert self._model is not None
            costs = measured_costs(record, self._model, self._batch(), self._world, self._ranks)
            self.cut, self._calls = best_cut(record, costs, self._stages, self._in_flight, self._memory), calls
            self._model = None  # its parameters are about to be divided
        if calls != self._calls:
            raise MeshError("inputs of this shape, or this mode of the model, take other calls than were cut "
                            "automatically; make a pipeline of its own for them, or name the stages")  # fmt: skip
        return self.cut.of_calls(record)


class GivenCut:
    """Divides a record as was chosen before."""

    def __init__(self, cut: StageCut) -> None:
        self.cut = cut

    def __call__(self, record: ModelRecord) -> list[int]:
        """The stage of each call."""
        return self.cut.of_calls(record)


def measured_costs(
    record: ModelRecord, model: nn.Module, inputs: Sequence[Tensor], world: World, ranks: int = 1, root: int = 0,
    sustained: bool = False,
) -> CallCosts:  # fmt: skip
    """Each call's forward and backward, timed on rank ``root`` and told to all; ``ranks`` share the work of a stage.

    Inputs on the meta device are replaced by zeros.
    """
    seconds = torch.zeros(2, len(record.calls), dtype=torch.float64)
    if world.rank == root and world.capabilities.moves_data:
        given = [torch.zeros_like(t, device="cpu") if t.is_meta else t for t in inputs]
        with torch.random.fork_rng(devices=[]):
            seconds = torch.tensor(time_calls(record, model, given, sustained), dtype=torch.float64).T.contiguous()
    label = Label("seconds of each call", "hc.pipeline", "control")
    everyone = (root, *(rank for rank in range(world.size) if rank != root))
    told = world.broadcast(seconds, everyone, label) if world.size > 1 else seconds
    forward, both = (told / ranks).tolist()
    return CallCosts(tuple(both), forward=tuple(forward))


def time_calls(
    record: ModelRecord, model: nn.Module, inputs: Sequence[Tensor], sustained: bool = False
) -> list[tuple[float, float]]:
    """Seconds of each call's forward, and of forward and backward, on this device. Buffers keep their values.

    The shortest of three counts. ``sustained``: the mean of five after one more, for devices that are slowed down by
    turns, on which a short call may be fast by luck.
    """
    named = {**dict(model.named_parameters()), **{name: b.clone() for name, b in model.named_buffers()}}
    values: dict[int, Tensor] = dict(zip(record.inputs, inputs, strict=True))
    last = {value: call.number for call in record.calls for value in (*call.reads, *call.makes)}

    def tensor_of(number: int) -> Tensor:
        value = record.values[number]
        tensor = value.constant if value.kind == "constant" else named.get(value.name) if value.name in named else None
        return values[number] if tensor is None else tensor

    seconds = []
    for call in record.calls:
        took = []
        for _ in range(2 * _REPEATS if sustained else _REPEATS):
            made, forward, both = run_alone(record, call, tensor_of, time.perf_counter)
            took.append((forward, both))
        values |= made
        for value in [v for v, number in last.items() if number == call.number]:
            values.pop(value, None)
        seconds.append(_mean(took[1:]) if sustained else min(took, key=lambda each: each[1]))
    return seconds


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    forward, both = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    return forward, both


def run_alone(
    record: ModelRecord, call: RecordedCall, tensor_of: Callable[[int], Tensor], clock: Callable[[], float],
    on_meta: bool = False,
) -> tuple[dict[int, Tensor], float, float]:  # fmt: skip
    """Forward and backward of one call on leaves of its own; what it makes, without a graph, and the seconds by a clock
    of forward, and of both. ``tensor_of`` has the tensor of each value that it reads."""
    began = clock()  # what replays a call takes its time too
    known: dict[int, Tensor] = {}
    written = {old for old, _ in call.writes}
    for number in call.reads:
        leaf = tensor_of(number).detach().requires_grad_(record.values[number].requires_grad)
        known[number] = leaf.clone() if number in written else leaf
    args, kwargs = fill((call.args, call.kwargs), known)
    with torch.enable_grad(), state_of(call, 0, 0, on_meta=on_meta):
        result = call.function(*args, **kwargs)
        forward = clock() - began
    made: dict[int, Any] = dict(zip(call.makes, tensors_in(result), strict=True))
    for old, new in call.writes:
        made.setdefault(new, known[old])
    roots = [t for t in made.values() if t.requires_grad]
    wanted = [t for n, t in known.items() if t.requires_grad and n not in written]
    seeds = [torch.ones_like(t) for t in roots]
    began = clock()
    if roots and wanted:
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    both = forward + clock() - began
    return {number: tensor.detach() for number, tensor in made.items()}, forward, both
