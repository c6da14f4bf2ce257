"""CosmoFlow (Mathuriya et al. 2018; layers as in Oyama et al. 2020): cosmological parameters from a cube of matter.

The channels of a cube are redshifts. The larger the cube, the more convolutions are followed by a pool, so that the
dense layers see a map of about 2x2x2 whatever the size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .metrics import Regression
from .universes import universes
from .workload import Batch, Workload, WorkloadSize

CHANNELS = (1, 2, 4, 8, 16, 16, 16)  # of the seven convolutions, in units of the width
SLOPE = 0.01  # of LeakyReLU below zero
START = 0.3  # of the last layer's weights, as a share of what LeakyReLU would ask for
STRIDED = 3  # the fourth convolution halves the cube by itself
SHAPES = ((1, 4, 32, 32, 32),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"width": 4, "channels_in": shapes[0][1], "size": list(shapes[0][2:])}


class CosmoFlow(nn.Module):
    """Seven 3x3x3 convolutions with LeakyReLU and average pools, then three dense layers.

    Width 16 at 128, 256 or 512 cubed is the published network: 9.44 million parameters. Its training drops one in
    five of the dense layers' inputs (``dropout=0.2``).
    """

    def __init__(
        self,
        width: int = 16,
        size: int | Sequence[int] = 128,
        channels_in: int = 4,
        parameters: int = 4,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [size] * 3 if isinstance(size, int) else list(size)
        pools = pool_count(sizes)
        channels = [channels_in, *(width * c for c in CHANNELS)]
        self.features = nn.Sequential(
            *(_stage(channels[i], channels[i + 1], i == STRIDED, i < pools, batch_norm) for i in range(len(CHANNELS)))
        )
        # What is left of the cube when the dense layers see it.
        flat = channels[-1] * math.prod(_halved(s, pools + 1) for s in sizes)
        last = nn.Linear(16 * width, parameters)
        self.head = nn.Sequential(
            nn.Flatten(), *_dense(flat, 128 * width, dropout), *_dense(128 * width, 16 * width, dropout), last
        )
        self.apply(_initialise)
        with torch.no_grad():
            last.weight.mul_(START)  # so that the first answers are about as large as the targets

    def forward(self, x: Tensor) -> Tensor:
        """[N, redshifts, D, H, W] to [N, parameters]."""
        return self.head(self.features(x))


def pool_count(sizes: Sequence[int]) -> int:
    """5, 6 and 7 pools for 128, 256 and 512; fewer for less. The strided convolution halves once more."""
    halvings = round(math.log2(min(sizes) / 2))
    return min(max(halvings - 1, 0), len(CHANNELS))


def _halved(size: int, times: int) -> int:
    """Windows of three with stride two and padding one round up."""
    return -(-size // 2**times)


def _stage(channels_in: int, channels_out: int, strided: bool, pooled: bool, batch_norm: bool) -> nn.Sequential:
    """A convolution, and what follows it."""
    layers: list[nn.Module] = [nn.Conv3d(channels_in, channels_out, 3, 2 if strided else 1, 1, bias=False)]
    if batch_norm:
        layers.append(nn.BatchNorm3d(channels_out))
    layers.append(nn.LeakyReLU(SLOPE))
    if pooled:
        layers.append(nn.AvgPool3d(3, 2, 1))
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    """For LeakyReLU. With torch's own start and no batch norm, nothing of the cube would reach the dense layers."""
    if isinstance(module, nn.Conv3d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, SLOPE)


def _dense(inputs: int, outputs: int, dropout: float) -> list[nn.Module]:
    """A dense layer, and what follows it."""
    return [nn.Linear(inputs, outputs), nn.LeakyReLU(SLOPE), *([nn.Dropout(dropout)] if dropout else [])]


def loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean squared error over all parameters."""
    return F.mse_loss(output, batch["y"])


WORKLOAD = Workload(
    factory=CosmoFlow,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=Regression,
    data=universes,
    small=WorkloadSize(
        network={"width": 8, "size": 64, "batch_norm": True},
        data={"size": 64},
        training={
            "batch": 4,
            "steps": 300,
            "lr": 1e-3,
            "optimizer": "adam",
            "schedule": {"name": "cosine", "warmup": 20},
            "cut": ("D", "H", "W"),
        },
    ),
    full=WorkloadSize(
        network={"size": 512, "batch_norm": True, "dropout": 0.2},
        data={"size": 512},
        training={"batch": 64, "steps": 12_500, "lr": 1e-3, "optimizer": "adam", "cut": ("D", "H", "W")},
    ),
)
