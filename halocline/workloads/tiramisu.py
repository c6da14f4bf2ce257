"""Tiramisu (Jegou et al. 2017) as Kurth et al. 2018 changed it to find storms and rivers of vapour: a U of blocks.

Fewer layers than the original, each with twice the features and with filters of 5x5: convolutions that keep a GPU busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from . import climate
from .metrics import Confusion
from .workload import Workload, WorkloadSize

LAYERS = (2, 2, 2, 4, 5)  # of the dense blocks on the way down, the last of which is the bottom
SHAPES = ((1, 16, 32, 48),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"growth": 4, "first": 8, "channels_in": shapes[0][1]}


class Tiramisu(nn.Module):
    """Dense blocks joined by 1x1 convolutions of stride 2 down, and transposed 3x3 ones of the new features up.

    By default it is the published network for 16 channels: 7.50 million weights. Its training drops one in five of
    the features (``dropout=0.2``).
    """

    def __init__(
        self,
        growth: int = 32,
        first: int = 64,
        layers: Sequence[int] = LAYERS,
        kernel: int = 5,
        channels_in: int = 16,
        classes: int = 3,
        dropout: float = 0.0,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        *above, bottom = layers
        self.multiple = 2 ** len(above)
        self.stem = _convolution(channels_in, first, kernel, 1, dropout, batch_norm)
        self.down, self.shrink, skips = nn.ModuleList(), nn.ModuleList(), []
        width = first
        for count in above:
            self.down.append(TiramisuBlock(width, growth, count, kernel, dropout, batch_norm))
            width += count * growth
            skips.append(width)
            self.shrink.append(_convolution(width, width, 1, 2, dropout, batch_norm))
        self.bottom = TiramisuBlock(width, growth, bottom, kernel, dropout, batch_norm)
        self.rise, self.up = nn.ModuleList(), nn.ModuleList()
        new = bottom * growth
        for skip, count in zip(reversed(skips), reversed(above), strict=True):
            self.rise.append(nn.ConvTranspose2d(new, new, 3, 2, 1, output_padding=1))
            self.up.append(TiramisuBlock(new + skip, growth, count, kernel, dropout, batch_norm))
            width, new = new + skip + count * growth, count * growth
        self.head = nn.Conv2d(width, classes, 1)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to logits of the same size."""
        if any(size % self.multiple for size in x.shape[2:]):
            raise ValueError(f"a map of {list(x.shape[2:])} does not halve evenly; use multiples of {self.multiple}")
        x, skips = self.stem(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = torch.cat([x, *block(x)], 1)
            skips.append(x)
            x = shrink(x)
        new = self.bottom(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = torch.cat([rise(torch.cat(new, 1)), skips.pop()], 1)
            new = block(x)
        return self.head(torch.cat([x, *new], 1))


class TiramisuBlock(nn.Module):
    """Each layer sees the input and what all layers before it made. Returned is what they made, the new features."""

    def __init__(self, channels: int, growth: int, count: int, kernel: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _convolution(channels + i * growth, growth, kernel, 1, dropout, batch_norm) for i in range(count)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """What each layer made."""
        new: list[Tensor] = []
        for layer in self.layers:
            new.append(layer(torch.cat([x, *new], 1)))
        return new


def _convolution(
    channels_in: int, channels_out: int, kernel: int, stride: int, dropout: float, batch_norm: bool
) -> nn.Sequential:
    """A convolution, and what follows it."""
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(channels_out))
    layers.append(nn.ReLU(inplace=True))
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def initialise(module: nn.Module) -> None:
    """As the paper's: uniform by He et al., biases zero."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


WORKLOAD = Workload(
    factory=Tiramisu,
    shapes=SHAPES,
    fit=fit,
    loss=climate.loss,
    meter=partial(Confusion, climate.CLASSES),
    data=climate.fields,
    small=WorkloadSize(
        network={"growth": 8, "first": 16, "dropout": 0.2},
        data=climate.SMALL,
        training={**climate.SMALL_TRAINING, "steps": 100, "samples": 200},
    ),
    full=WorkloadSize(network={"dropout": 0.2}, training=climate.FULL_TRAINING),
)
