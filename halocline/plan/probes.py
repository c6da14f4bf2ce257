"""Small networks of random sizes, whose operations `halocline calibrate` times.

They are recorded as a rank of a mesh would run them, so that the thin slabs along cut edges are among the shapes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .recording import Subject

CHANNELS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
INPUTS = (1, 3, 4, 16)
MESHES = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1))
MOST_FLOPS = 4e9  # of one convolution
MOST_ELEMENTS = 1 << 24  # of one tensor: more than caches hold
LEAST_SIDE = 8  # a multiple of 4, so that pools and rises fit


class Probe(nn.Module):
    """Convolutions with norms and activations, a pool, a rise with a skip, and a head of 1x1 convolution."""

    def __init__(self, draw: random.Random, dims: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        convolution: Any = (nn.Conv2d, nn.Conv3d)[dims - 2]
        rise: Any = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        norm: Any = draw.choice([(nn.BatchNorm2d, nn.BatchNorm3d), (nn.InstanceNorm2d, nn.InstanceNorm3d)])[dims - 2]
        pool: Any = draw.choice([(nn.MaxPool2d, nn.MaxPool3d), (nn.AvgPool2d, nn.AvgPool3d)])[dims - 2]
        first, second, third, fourth = channels
        kernel = draw.choice((3, 3, 3, 5))
        bias = draw.random() < 0.5
        self.into = convolution(first, second, kernel, padding=kernel // 2, bias=bias)
        self.on = convolution(second, third, 3, padding=1, bias=bias)
        self.down = convolution(third, third, 3, 2, padding=1)
        self.wide = convolution(third, third, 3, padding="same", dilation=draw.choice((2, 3, 4)), bias=bias)
        self.apart = convolution(third, third, 3, padding=1, groups=third, bias=bias)
        self.deep = convolution(third, fourth, draw.choice((1, 3)), padding="same", bias=bias)
        self.rise = rise(fourth, third, 2, 2)
        self.join = convolution(2 * third, second, 3, padding=1)
        self.head = convolution(second, 3, 1)
        self.pool, self.norms = pool(2), nn.ModuleList(norm(size) for size in (second, third, fourth, second))
        self.dense = nn.Linear(second, fourth)
        self.activate = draw.choice([nn.ReLU(inplace=True), nn.ReLU(), nn.LeakyReLU(), nn.GELU(), nn.SiLU()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.activate(self.norms[0](self.into(x)))
        x = self.activate(self.norms[1](self.on(x)))
        low = self.pool(x) + self.down(x)
        low = self.activate(self.norms[2](self.deep(low + self.wide(low) + self.apart(low))))
        joined = torch.cat([x, self.rise(low)], 1)
        last = self.activate(self.norms[3](self.join(joined)))
        dense = self.dense(last.flatten(2).mean(2))
        return self.head(last).flatten(1).mean(1) + dense.mean(1)


def probes(count: int, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[Subject, dict[str, int], int]]:
    """So many networks, each with the mesh that it is cut over and a batch. The same for the same seed."""
    draw = random.Random(seed)
    for number in range(count):
        dims = 2 + number % 2
        channels = (draw.choice(INPUTS), *(draw.choice(CHANNELS) for _ in range(3)))
        batch = draw.choice((1, 1, 2, 4))
        side = _side(draw, dims, channels, batch)
        mesh = dict(zip(("depth", "height", "width")[3 - dims :], draw.choice(MESHES), strict=False))
        seed_of_network = draw.random()  # a network is built several times, and is the same each time

        def make(seed: float = seed_of_network, dims: int = dims, channels: tuple[int, ...] = channels) -> nn.Module:
            return Probe(random.Random(seed), dims, channels)

        shape = (1, channels[0], *[side] * dims)
        yield Subject(make, _mean_square, (shape,), dtype, torch.optim.Adam), {"data": 1, **mesh}, batch


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def _side(draw: random.Random, dims: int, channels: tuple[int, ...], batch: int) -> int:
    """Of the volume: anything from small to as large as the most expensive convolution allows."""
    first, second, third, _ = channels
    product = max(first * second * 5**dims, 2 * third * second * 3**dims, third * third * 3**dims)
    voxels = min(MOST_FLOPS / (2 * product), MOST_ELEMENTS / max(2 * third, second)) / batch
    most = max(LEAST_SIDE, voxels ** (1 / dims))
    # Half of them are large: a step spends its time in large operations, and large is where estimates must not drift.
    least = LEAST_SIDE if draw.random() < 0.5 else max(LEAST_SIDE, 0.6 * most)
    side = math.exp(draw.uniform(math.log(least), math.log(most)))
    # Half of them are powers of two, as most samples are: their rows and planes compete for the same lines of a cache.
    if draw.random() < 0.5:
        return max(LEAST_SIDE, 2 ** math.floor(math.log2(side)))
    return max(LEAST_SIDE, int(side) // 4 * 4)
