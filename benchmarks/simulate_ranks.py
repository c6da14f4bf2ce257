"""On the ranks of ``bench simulate``: a network that sleeps where it would compute, and averages its gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halocline.distribute import distribute
from halocline.world import Label, Mesh

WARM = 8  # steps until gradients have their buckets
TAG = 17  # size of the smallest tensor that marks a layer


@dataclass(frozen=True)
class SleepingLayer:
    """One layer of a network: how long it computes, and the shapes of its parameters."""

    forward_s: float
    backward_s: float
    shapes: tuple[tuple[int, ...], ...]


class _Sleep(torch.autograd.Function):
    """Sleeps forward and backward; one operation on a tensor of a size of its own marks it in a record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tag: Tensor, times: tuple[float, float], *weights: Tensor) -> Tensor:
        ctx.times, ctx.tag, ctx.weights = times, tag, weights
        _pass(tag, times[0])
        tag.add(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _pass(ctx.tag, ctx.times[1])
        ctx.tag.sub(1.0)
        return gradient, None, None, *(torch.zeros_like(weight) for weight in ctx.weights)


def _pass(tag: Tensor, seconds: float) -> None:
    if not tag.is_meta:
        time.sleep(seconds)


class SleepingNetwork(nn.Module):
    """Layers one after another, the first of which is marked as number ``first``."""

    def __init__(self, layers: tuple[SleepingLayer, ...], first: int = 0) -> None:
        super().__init__()
        self.layers = layers
        self.weights = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in layer.shapes) for layer in layers
        )
        for number in range(len(layers)):
            self.register_buffer(f"tag{number}", torch.zeros(TAG + first + number), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input, after all layers' time."""
        for number, (layer, weights) in enumerate(zip(self.layers, self.weights, strict=True)):
            held = list(weights.parameters())
            tag = getattr(self, f"tag{number}")
            x = _Sleep.apply(x, tag, (layer.forward_s, layer.backward_s), *held)
        return x


_steps: dict[str, Callable[[], None]] = {}


def prepare(name: str, layers: tuple[SleepingLayer, ...]) -> None:
    """Build the network on this rank and run it warm."""
    torch.set_num_threads(1)
    model = distribute(SleepingNetwork(layers), Mesh(data=-1))
    x = torch.zeros(1, 1, 1, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    _steps[name] = step
    for _ in range(WARM):
        step()


def timed_steps(name: str, count: int) -> float:
    """The median of ``count`` steps, in seconds."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        _steps[name]()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def forget(name: str) -> None:
    """Release the network."""
    _steps.pop(name, None)


def sums_on_ranks(sizes: tuple[int, ...], repeat: int) -> list[float]:
    """Seconds of a sum of so many bytes over all ranks, the median of several."""
    world = Mesh(data=-1).world
    everyone, label, found = tuple(range(world.size)), Label("what a sum costs", "benchmark", "probes"), []
    for size in sizes:
        value, times = torch.zeros(max(1, size // 4)), []
        for _ in range(repeat):
            began = time.perf_counter()
            world.begin_sum(value, everyone, label).wait()
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
    return found
