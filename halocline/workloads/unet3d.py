"""3D U-Net for the segmentation of volumes (Cicek et al. 2016), padded so that the output has the input's size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .metrics import Confusion
from .volumes import volumes
from .workload import Batch, Workload, WorkloadSize

CLASSES = 3  # background, organ, lesion
DEPTH = 3  # levels above the bottom; each halves the volume
MULTIPLE = 2**DEPTH
SHAPES = ((1, 1, 32, 32, 32),)  # small enough to check on a laptop within seconds


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"width": 4, "channels_in": shapes[0][1]}


class UNet(nn.Module):
    """The way through both U-Nets of this package: down with skips, through the bottom, and up to the input's size."""

    down: nn.ModuleList
    pool: nn.Module
    bottom: nn.Module
    rise: nn.ModuleList
    up: nn.ModuleList
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, *space] to logits of the same size; sides must be multiples of 8."""
        if any(size % MULTIPLE for size in x.shape[2:]):
            raise ValueError(
                f"a sample of {list(x.shape[2:])} does not halve {DEPTH} times; use multiples of {MULTIPLE}"
            )
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            # Skips come back in the opposite order.
            x = block(torch.cat([skips.pop(), rise(x)], 1))
        logits: Tensor = self.head(x)
        return logits


class UNet3d(UNet):
    """Down (w, 2w) (2w, 4w) (4w, 8w), bottom (8w, 16w), up again with skips, and a 1x1x1 convolution to the classes.

    Width 32 with 3 input channels is the published network: 19,069,955 weights and biases, batch norms aside.
    """

    def __init__(self, width: int = 32, channels_in: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(DEPTH + 1)]
        sources = [channels_in, *(2 * w for w in widths)]
        self.down = nn.ModuleList(block(i, w, 2 * w) for i, w in zip(sources[:-2], widths[:-1], strict=True))
        self.pool = nn.MaxPool3d(2)
        self.bottom = block(sources[-2], widths[-1], 2 * widths[-1])
        self.rise = nn.ModuleList(nn.ConvTranspose3d(4 * w, 4 * w, 2, 2, bias=False) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(block(6 * w, 2 * w, 2 * w) for w in reversed(widths[:-1]))
        self.head = nn.Conv3d(2 * width, classes, 1)


def block(channels_in: int, middle: int, channels_out: int) -> nn.Sequential:
    """Two 3x3x3 convolutions, each followed by batch norm and ReLU."""
    return nn.Sequential(*_convolution(channels_in, middle), *_convolution(middle, channels_out))


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    """One convolution with its norm and ReLU."""
    # The bias does nothing under a batch norm; it is there because the published network has it.
    convolution = nn.Conv3d(channels_in, channels_out, 3, padding="same")
    return convolution, nn.BatchNorm3d(channels_out), nn.ReLU(inplace=True)


def loss(output: Tensor, batch: Batch) -> Tensor:
    """See :func:`class_loss`."""
    return class_loss(output, batch["y"])


def class_loss(output: Tensor, truth: Tensor) -> Tensor:
    """Cross-entropy, and one minus the soft dice of each class, in which a lesion counts as much as the background."""
    return F.cross_entropy(output, truth) + _dice_loss(output.softmax(1), truth)


def _dice_loss(shares: Tensor, truth: Tensor) -> Tensor:
    """From sums over the whole batch; the ones keep an absent class from dividing by zero."""
    total = torch.zeros((), dtype=shares.dtype, device=shares.device)
    for number in range(shares.shape[1]):
        share, there = shares[:, number], (truth == number).to(shares.dtype)
        overlap, both = (share * there).sum(), share.sum() + there.sum()
        total = total + 1 - (2 * overlap + 1) / (both + 1)
    return total / shares.shape[1]


WORKLOAD = Workload(
    factory=UNet3d,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=partial(Confusion, CLASSES),
    data=volumes,
    small=WorkloadSize(
        network={"width": 4},
        data={"size": 32},
        training={"batch": 2, "steps": 150, "lr": 5e-3, "optimizer": "adam", "cut": ("D", "H", "W")},
    ),
    full=WorkloadSize(
        network={},
        data={"size": 256},
        training={"batch": 1, "steps": 20_000, "lr": 1e-3, "optimizer": "adam", "cut": ("D", "H", "W")},
    ),
)
