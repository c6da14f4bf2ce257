"""ResNet (He et al. 2016) with 50 and 101 layers, strided in its 3x3 convolutions, as all-reduces are measured with it.

Cho et al. 2017 trained both on 256 GPUs: the smaller on the 1000 classes of ImageNet, the larger on all of its 22 K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Field, Generated
from ..geometry import Box
from .climate import drawn, grain, wave
from .metrics import Accuracy
from .workload import Batch, Workload, WorkloadSize

Array = np.ndarray[Any, Any]

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
EXPANSION = 4  # of a block's inner features to its output
SHAPES = ((2, 3, 32, 32),)
GRAIN = 0.5  # noise of single pixels, a stripe's height being 1
_CLASS, _PHASE, _COLOURS = 10, 11, 12  # streams of random numbers


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"width": 4, "blocks": (1, 1, 1, 1), "classes": 10, "channels_in": shapes[0][1]}


class ResNet(nn.Module):
    """Four groups of blocks, the mean of the map, and a dense layer. ``width``: of the first features."""

    def __init__(
        self, blocks: Sequence[int] = BLOCKS[50], width: int = 64, classes: int = 1000, channels_in: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(channels_in, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.groups, channels = nn.Sequential(), width
        for number, count in enumerate(blocks):
            inner = width * 2**number
            for place in range(count):
                self.groups.append(ResNetBottleneck(channels, inner, 2 if number and not place else 1))
                channels = EXPANSION * inner
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        self.apply(_initialise)
        for block in self.groups.modules():
            if isinstance(block, ResNetBottleneck):
                # At first it passes on what it gets (Goyal et al. 2017).
                nn.init.zeros_(block.way[-1].get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to logits of the classes."""
        return self.head(self.groups(self.stem(x)))


class ResNetBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a way on which features pass as they are, or projected to the new shape."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            *_convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, EXPANSION * inner, 1),
        )
        same = stride == 1 and channels == EXPANSION * inner
        self.past = nn.Identity() if same else nn.Sequential(*_convolution(channels, EXPANSION * inner, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return F.relu(self.way(x) + self.past(x))


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution without bias, and its norm."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels_out)


def _initialise(module: nn.Module) -> None:
    """He's initialisation by the number of outputs."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@dataclass(frozen=True)
class Stripes:
    """Images of stripes: their slope and their width say the class; where they lie and their colour are random."""

    seed: int
    size: int
    classes: int

    def label(self, sample: int) -> int:
        """The class of a sample."""
        return int(drawn(self.seed, _CLASS, sample, 1)[0] * self.classes)

    def label_row(self, sample: int, box: Box) -> int:
        """The class of a sample, for a store whose samples are rows of one number."""
        return self.label(sample)

    def image(self, sample: int, box: Box) -> Array:
        """Any box by itself, with the same bits as in the whole."""
        # Classes in a square: as many slopes as widths.
        slopes = math.isqrt(self.classes - 1) + 1
        width, slope = divmod(self.label(sample), slopes)
        cycles, angle = self.size / 16 * 4 ** (width / max(1, slopes - 1)), math.pi * slope / slopes
        phase, colours = drawn(self.seed, _PHASE, sample, 1)[0], drawn(self.seed, _COLOURS, sample, 3)
        stripes = wave(cycles * math.sin(angle), cycles * math.cos(angle), phase, (self.size,) * 2, (box[1], box[2]))
        shown = grain(self.seed, sample, (3, self.size, self.size), box) * np.float32(GRAIN)
        return shown + stripes * (0.5 + 0.5 * colours).astype(np.float32)[slice(*box[0]), None, None]


def fields(samples: int, seed: int = 0, size: int = 224, classes: int = 1000) -> dict[str, Field]:
    """``x``: an image of three colours; ``y``: its class, as a row of one number, since a sample has dims."""
    stripes = Stripes(seed, size, classes)
    return {
        "x": Field(Generated(stripes.image, samples, (3, size, size), "CHW")),
        "y": Field(Generated(stripes.label_row, samples, (1,), "C", "int64")),
    }


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross entropy over the samples of the whole batch."""
    return F.cross_entropy(output, batch["y"][:, 0])


class RowAccuracy(Accuracy):
    """Of classes that stand in rows of one."""

    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch whose labels are rows of one number."""
        super().update(output, {"y": batch["y"][:, 0]})


SMALL = WorkloadSize(
    network={"width": 8, "classes": 10},
    data={"size": 48, "classes": 10},
    training={
        "batch": 16,
        "steps": 300,
        "samples": 4_800,
        "validation": 256,
        "cut": ("H", "W"),
        "lr": 2e-3,
        "optimizer": "adam",
        "schedule": {"name": "cosine", "warmup": 50},
    },
)
#: 90 epochs of ImageNet, 32 images a GPU.
_FULL50 = WorkloadSize(
    training={
        "batch": 8_192,
        "steps": 14_075,
        "samples": 1_281_167,
        "validation": 50_000,
        "cut": ("N",),
        "lr": 3.2,
        "optimizer": "sgd",
        "weight_decay": 1e-4,
        "schedule": {"name": "cosine", "warmup": 782},
    }
)
#: Ten epochs of half the images of ImageNet-22K, 20 images a GPU.
_FULL101 = WorkloadSize(
    network={"classes": 21_841},
    data={"classes": 21_841},
    training={
        "batch": 5_120,
        "steps": 14_649,
        "samples": 7_500_000,
        "validation": 50_000,
        "cut": ("N",),
        "lr": 2.0,
        "optimizer": "sgd",
        "weight_decay": 1e-4,
        "schedule": {"name": "cosine", "warmup": 1_465},
    },
)


def _workload(layers: int, full: WorkloadSize) -> Workload:
    factory = partial(ResNet, blocks=BLOCKS[layers])
    return Workload(factory, SHAPES, fit, loss, RowAccuracy, fields, SMALL, full)


RESNET50 = _workload(50, _FULL50)
RESNET101 = _workload(101, _FULL101)
