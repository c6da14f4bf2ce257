"""Runs a network once to measure memory, once to compare, then to train: the same lines on one rank and on many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..distribute import distribute, no_sync
from ..errors import HaloclineError
from ..layout import Layout
from ..random import reproducible
from ..rules import from_tile, gather, shard
from ..tensor import ShardedTensor, unwrap
from ..world import AVERAGED, Label, Mesh, Traffic
from .memory import peak_bytes
from .noise import LastPlaces, is_real, nudge
from .task import BadUsage, NetworkTask, make_inputs, make_keywords, make_model

RATE, MOMENTUM = 0.01, 0.9  # of the SGD that loss curves come from

Tensors = dict[str, dict[str, Tensor]]  # by kind (outputs, gradients, buffers, losses) and name


class Side:
    """One side of the comparison. This one is one rank: plain tensors, and nothing of the library in between."""

    traffic = Traffic()

    def __init__(self, task: NetworkTask) -> None:
        self.task, self.model, self.keywords = task, make_model(task), make_keywords(task)
        self.leaves = make_inputs(task)

    def __call__(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """The outputs, by name."""
        return dict(named(self.model(*map(self.place, range(len(leaves)), leaves), **self.keywords)))

    def place(self, index: int, leaf: Tensor) -> Tensor:
        """An input as this side computes with it."""
        return leaf

    def paused(self) -> AbstractContextManager[None]:
        """A context in which memory is not counted."""
        return nullcontext()

    def whole(self, output: Tensor) -> Tensor:
        """An output as a whole tensor."""
        return output

    def whole_gradient(self, index: int, gradient: Tensor) -> Tensor:
        """An input's gradient as a whole tensor."""
        return gradient


class CutSide(Side):
    """One rank of many. Each input's tile is a leaf, so that its gradient can be compared."""

    def __init__(self, task: NetworkTask, mesh: Mesh) -> None:
        super().__init__(task)
        cut = [shard(x, mesh, task.dims(index)) for index, x in enumerate(self.leaves)]
        self.layout: Layout = task.layout if not isinstance(task.layout, str) else {}
        if isinstance(task.layout, str):
            from ..plan.auto_layout import choose_for  # which needs pydantic

            self.layout = choose_for(self.model, mesh, task.layout, cut, self.keywords).layout
        self.mesh, self.traffic = mesh, mesh.world.traffic
        self.model = distribute(self.model, mesh, layout=self.layout)
        self.leaves = [(unwrap(x) if isinstance(x, ShardedTensor) else x).detach() for x in cut]

    def place(self, index: int, leaf: Tensor) -> Tensor:
        """The tile as a sharded tensor, or a whole input whose gradient the check itself averages."""
        if not self.task.dims(index):
            setattr(leaf, AVERAGED, True)  # by whole_gradient
        return from_tile(leaf, self.mesh, self.task.dims(index), shape=self.task.shapes[index])

    def paused(self) -> AbstractContextManager[None]:
        """Gradients are not averaged inside: their buckets are no activations."""
        return nullcontext() if _is_fixed(self.model) else no_sync(self.model)

    def whole(self, output: Tensor) -> Tensor:
        """Gathered to every rank."""
        return gather(output)

    def whole_gradient(self, index: int, gradient: Tensor) -> Tensor:
        """Exact on its owner where the input is cut, the mean over the ranks where it is whole."""
        everyone, label = tuple(range(self.mesh.size)), Label("mean of input gradients", "check")
        return self.mesh.world.sum(gather(self.place(index, gradient)), everyone, label) / self.mesh.size


@dataclass
class Observation:
    """What a network gave, in whole tensors, and what one forward and backward took in memory and traffic."""

    tensors: Tensors
    peak: int
    traffic: Traffic


@reproducible(0)
def observe(side: Side, steps: int) -> Observation:
    """One step to measure, one to compare, and ``steps`` to train.

    Gradients are allocated before and are not averaged while measuring: neither they nor the buckets they travel in are
    activations. Inputs need none, as in training.
    """
    for parameter in side.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    step = partial(_step, side, _leaves(side, _is_fixed(side.model)))
    with side.paused():
        side.traffic.clear()
        peak = peak_bytes(step).peak
        traffic = replace(side.traffic, gathers=side.traffic.gathers.copy())
    side.model.zero_grad(set_to_none=False)
    side.leaves = _leaves(side, True)
    outputs = _step(side, side.leaves)
    tensors = {
        "outputs": {name: side.whole(output).detach() for name, output in outputs.items()},
        "gradients": dict(_gradients(side)),
        "buffers": {name: buffer.detach().clone() for name, buffer in side.model.named_buffers()},
        "losses": {"curve": torch.tensor(list(_train(side, steps)), dtype=torch.float64)},
    }
    return Observation(tensors, peak, traffic)


def _is_fixed(model: nn.Module) -> bool:
    """Nothing in it to train: then only its inputs have gradients."""
    return not any(parameter.requires_grad for parameter in model.parameters())


def _leaves(side: Side, differentiable: bool) -> list[Tensor]:
    """Whole numbers have no gradient."""
    return [leaf.detach().requires_grad_(differentiable and is_real(leaf)) for leaf in side.leaves]


def _step(side: Side, leaves: list[Tensor]) -> dict[str, Tensor]:
    outputs = side(leaves)
    loss_of(outputs).backward()
    return outputs


def named(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, however they are packed."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named(item, f"{name}[{key}]")


def loss_of(outputs: Mapping[str, Tensor]) -> Tensor:
    """A loss for any network: the mean over each output of sqrt(1 + (o + 1)^2), added up.

    Normalised outputs do not make it constant, nothing of the whole size is allocated for it, and since its slope is at
    most one it runs away in no training.
    """
    shifted = [(o.abs() if o.is_complex() else o) + 1 for o in outputs.values() if o.requires_grad]
    if not shifted:
        raise BadUsage("the network returns no tensor that has a gradient, so there is nothing to compare")
    return torch.stack([(o * o + 1).sqrt().mean() for o in shifted]).sum()


def _gradients(side: Side) -> Iterator[tuple[str, Tensor]]:
    """The gradients of parameters and inputs, whole, by name."""
    for name, parameter in side.model.named_parameters():
        if parameter.grad is not None:
            yield name, side.whole(parameter.grad.detach()).clone()
    for index, leaf in enumerate(side.leaves):
        if leaf.requires_grad:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            yield f"input {index}", side.whole_gradient(index, gradient)


def _train(side: Side, steps: int) -> Iterator[float]:
    """The losses of some steps of SGD with momentum."""
    if not steps or _is_fixed(side.model):
        return
    optimizer = torch.optim.SGD(side.model.parameters(), RATE, MOMENTUM)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(side(_leaves(side, False)))
        loss.backward()
        optimizer.step()
        yield loss.item()


def one_rank(task: NetworkTask, *, nudged: bool = False) -> Observation:
    """The untouched network on plain tensors; ``nudged``: with every weight and input off by about a rounding.

    So are all results of less precision than float64, if the task is in float64.
    """
    try:
        side = Side(task)
        if not nudged:
            return observe(side, task.steps)
        generator = torch.Generator().manual_seed(0)
        for tensor in filter(is_real, [*side.model.parameters(), *side.leaves]):
            nudge(tensor, generator)
        with LastPlaces() if task.dtype == "float64" else nullcontext():
            return observe(side, task.steps)
    except HaloclineError:
        raise
    except Exception as error:
        raise BadUsage(f"{task.target} fails on one rank, before any cut: {type(error).__name__}: {error}") from error
