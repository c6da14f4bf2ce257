"""CosmoFlow of MLPerf HPC: five convolutions, each with a max pool, and three dense layers, on cubes of 128."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from . import cosmoflow
from .metrics import Regression
from .universes import universes
from .workload import Workload, WorkloadSize

LAYERS = 5
SLOPE = 0.3  # of LeakyReLU below zero
RANGE = 1.2  # of the answers, to either side of zero


class MLPerfCosmoFlow(nn.Module):
    """Convolutions of 3x3x3 that double the channels while the pools halve the cube.

    Width 32 at 128 cubed is the benchmark's network: 8.908 million parameters. Its training drops half of the dense
    layers' inputs (``dropout=0.5``).
    """

    def __init__(
        self,
        width: int = 32,
        size: int | Sequence[int] = 128,
        channels_in: int = 4,
        parameters: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [size] * 3 if isinstance(size, int) else list(size)
        channels = [channels_in, *(width * 2**number for number in range(LAYERS))]
        stages: list[nn.Module] = []
        for before, after in pairwise(channels):
            stages += [nn.Conv3d(before, after, 3, padding=1), nn.LeakyReLU(SLOPE), nn.MaxPool3d(2)]
        self.features = nn.Sequential(*stages)
        flat = channels[-1] * math.prod(each // 2**LAYERS for each in sizes)
        dense: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in ((flat, 128), (128, 64)):
            dense += [nn.Linear(inputs, outputs), nn.LeakyReLU(SLOPE), nn.Dropout(dropout)]
        self.head = nn.Sequential(*dense, nn.Linear(64, parameters))

    def forward(self, x: Tensor) -> Tensor:
        """[N, redshifts, D, H, W] to [N, parameters]."""
        return RANGE * self.head(self.features(x)).tanh()


WORKLOAD = Workload(
    factory=MLPerfCosmoFlow,
    shapes=cosmoflow.SHAPES,
    fit=cosmoflow.fit,
    loss=cosmoflow.loss,
    meter=Regression,
    data=universes,
    small=WorkloadSize(
        network={"width": 8, "size": 64},
        data={"size": 64},
        training=cosmoflow.WORKLOAD.small.training,
    ),
    full=WorkloadSize(
        network={"dropout": 0.5},
        data={"size": 128},
        training={"batch": 64, "steps": 12_500, "lr": 1e-3, "optimizer": "adam", "cut": ("D", "H", "W")},
    ),
)
