"""FC-DenseNet for the inversion of electron diffraction (Laanait et al. 2019): the potential behind many patterns.

The channels of a sample are the diffraction patterns of a scan; the answer is the projected potential of the specimen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .diffraction import scans
from .metrics import Regression
from .workload import Batch, Workload, WorkloadSize

SHAPES = ((1, 16, 32, 32),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"patterns": shapes[0][1], "growth": 4, "kernel": 3, "pools": 2}


class FCDenseNet(nn.Module):
    """Convolution, dense blocks each followed by a transition down, a bottleneck, and up again with skips.

    A dense block hands on what came in and all its layers made; what goes up is only what the last block made. Growth
    128, kernel 5, three pools and two layers a block is the paper's network of "25 TFLOPS".
    """

    def __init__(
        self,
        patterns: int = 1024,
        growth: int = 128,
        kernel: int = 5,
        pools: int = 3,
        layers: int | Sequence[int] = 2,
        dropout: float = 0.2,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        counts = [layers] * (2 * pools + 1) if isinstance(layers, int) else list(layers)
        self.first = nn.Conv2d(patterns, growth, kernel, padding=kernel // 2)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        channels, skips = growth, list[int]()
        for count in counts[:pools]:
            self.down.append(StemdlBlock(channels, growth, kernel, count, dropout))
            channels += count * growth
            skips.append(channels)
            self.shrink.append(_transition(channels))
        self.bottom = StemdlBlock(channels, growth, kernel, counts[pools], dropout)
        self.rise, self.up = nn.ModuleList(), nn.ModuleList()
        for before, count in zip(counts[pools:], counts[pools + 1 :], strict=False):
            # Only what the block below made goes up.
            made = before * growth
            self.rise.append(nn.ConvTranspose2d(made, made, 3, 2, 1, output_padding=1))
            channels = made + skips.pop()
            self.up.append(StemdlBlock(channels, growth, kernel, count, dropout))
            channels += count * growth
        self.last = nn.Conv2d(channels, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, patterns, H, W] to the potential, of the same size."""
        x, skips = self.first(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = torch.cat([x, block(x)], 1)
            skips.append(x)
            x = shrink(x)
        made = self.bottom(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = torch.cat([rise(made), skips.pop()], 1)
            made = block(x)
        return self.last(torch.cat([x, made], 1))


class StemdlBlock(nn.Module):
    """Layers that each see the input and what all before them made; it returns what they made."""

    def __init__(self, channels: int, growth: int, kernel: int, count: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(channels + i * growth, growth, kernel, dropout) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """What all layers made, side by side."""
        made: list[Tensor] = []
        for layer in self.layers:
            made.append(layer(torch.cat([x, *made], 1)))
        return torch.cat(made, 1)


def _layer(channels: int, growth: int, kernel: int, dropout: float) -> nn.Sequential:
    """The dropout is spatial: of whole maps."""
    convolution = nn.Conv2d(channels, growth, kernel, padding=kernel // 2)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), convolution, nn.Dropout2d(dropout))


def _transition(channels: int) -> nn.Sequential:
    """Halves the map between two blocks."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 1), nn.MaxPool2d(2))


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Huber's, one of those that the paper's code offers: squared where near, absolute where far."""
    return F.huber_loss(output, batch["y"])


WORKLOAD = Workload(
    factory=FCDenseNet,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=Regression,
    data=scans,
    small=WorkloadSize(
        network={"patterns": 16, "growth": 12, "kernel": 3, "pools": 2, "dropout": 0.0},
        data={"size": 32, "scan": 4},
        training={"batch": 8, "steps": 300, "lr": 3e-3, "optimizer": "adam", "cut": ("H", "W")},
    ),
    full=WorkloadSize(
        network={},
        data={"size": 512, "scan": 32, "spacing": 24.0, "atom": 4.0},
        training={"batch": 1, "steps": 10_000, "lr": 1e-3, "optimizer": "larc", "cut": ("H", "W")},
    ),
)
