"""What a rank of ``bench model-axes`` does: steps of one network, cut by DTensor and by layouts of this library."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import halocline as hc

TORCH, AUTO, IN_ONE_PIECE = "DTensor", "auto", "rows, columns, no tiles"
#: Every layout of the two weights of a block that cuts both; the first is Megatron's.
BY_HAND: dict[str, Mapping[str, Mapping[int, str]]] = {
    "rows, columns": {"blocks.*.rise.*": {0: "model"}, "blocks.*.fall.weight": {1: "model"}},
    "rows, rows": {"blocks.*.rise.*": {0: "model"}, "blocks.*.fall.*": {0: "model"}},
    "columns, columns": {"blocks.*.rise.weight": {1: "model"}, "blocks.*.fall.weight": {1: "model"}},
    "columns, rows": {"blocks.*.rise.weight": {1: "model"}, "blocks.*.fall.*": {0: "model"}},
}


@dataclass(frozen=True)
class Sizes:
    """Of the network and its batch."""

    width: int
    layers: int
    tokens: int


class Block(nn.Module):
    """A norm and a gated pair of products, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same."""
        return x + self.fall(F.gelu(self.rise(self.norm(x))))


class Blocks(nn.Module):
    """Blocks one after another."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def _network(sizes: Sizes, way: str, x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Blocks(sizes.width, sizes.layers)
    if way == TORCH:
        plan: dict[str, ParallelStyle] = {}
        for n in range(sizes.layers):
            plan |= {f"blocks.{n}.rise": ColwiseParallel(), f"blocks.{n}.fall": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    layout = AUTO if way == AUTO else BY_HAND[way.removesuffix(", no tiles")]
    choices = hc.Choices(product_tile=0) if way == IN_ONE_PIECE else hc.Choices()
    return hc.distribute(model, hc.Mesh(choices, model=dist.get_world_size()), layout=layout, inputs=[x])


def _stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(sizes: Sizes, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a step by way and round, and the first losses by way. In each round all ways have a turn."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.rand(sizes.tokens, sizes.width, generator=generator) for _ in range(2))
    ways = {way: _stepper(_network(sizes, way, x), x, y) for way in (TORCH, *BY_HAND, IN_ONE_PIECE, AUTO)}
    losses, names = {way: [step(), step()] for way, step in ways.items()}, list(ways)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        # In another order each round, the same on all ranks: what ran before a step leaves its mark on it.
        for way in random.Random(turn).sample(names, len(names)):
            step = ways[way]
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - begin)
    return seconds, losses
