"""DeepLabv3+ (Chen et al. 2018) as Kurth et al. 2018 changed it: its decoder goes on to the full resolution.

The encoder is a ResNet-50 with norms before convolutions (He et al. 2016). Its first group of blocks ends at an eighth
of the size; those after it are dilated instead of strided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from . import climate
from .metrics import Confusion
from .tiramisu import initialise
from .workload import Workload, WorkloadSize

MULTIPLE = 8
BLOCKS = (3, 4, 6, 3)
DILATIONS = (1, 1, 2, 4)
EXPANSION = 4  # of a block's inner features to its output
RATES = (12, 24, 36)
SHAPES = ((1, 16, 32, 48),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"width": 4, "blocks": (1, 1, 1, 1), "rates": (1, 2, 3), "channels_in": shapes[0][1]}


class DeepLab(nn.Module):
    """ResNet encoder, pyramid of dilated convolutions, decoder by transposed convolutions with two skips.

    By default it is the published network for 16 channels: 43.6 million weights in convolutions. Widths follow from
    ``width``, a quarter of the decoder's. Without ``batch_norm`` features are halved where a norm would stand, which
    keeps them in the range of half precision. The published code has no ReLU between the last convolutions.
    """

    def __init__(
        self,
        width: int = 64,
        blocks: Sequence[int] = BLOCKS,
        rates: Sequence[int] = RATES,
        channels_in: int = 16,
        classes: int = 3,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        make = ConvolutionMaker(batch_norm)
        deep, low = 4 * width, 3 * width // 4
        self.encoder = Encoder(make, channels_in, width, blocks)
        self.pyramid = Pyramid(make, 8 * EXPANSION * width, deep, rates)
        self.rise = _doubled(deep)
        self.low = make.after(width, low, 1)
        self.merge = nn.Sequential(make.after(deep + low, deep), make.after(deep, deep))
        self.rise_to_full = nn.Sequential(_doubled(deep), _doubled(deep))
        self.skip = nn.Sequential(_plain(channels_in, width), _plain(width, 2 * width))
        self.refine = nn.Sequential(_plain(deep + 2 * width, deep), _plain(deep, deep))
        self.head = nn.Conv2d(deep, classes, 1)
        self.apply(initialise)
        for block in self.encoder.modules():
            if isinstance(block, DeepLabBottleneck):
                nn.init.zeros_(block.expand.weight)  # at first it passes on what it gets (Goyal et al. 2017)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to logits of the same size; sides must be multiples of 8."""
        if any(size % MULTIPLE for size in x.shape[2:]):
            raise ValueError(f"a map of {list(x.shape[2:])} does not halve three times; use multiples of {MULTIPLE}")
        deep, low = self.encoder(x)
        features = self.rise(self.pyramid(deep))
        features = self.merge(torch.cat([features, self.low(low)], 1))
        features = self.rise_to_full(features)
        return self.head(self.refine(torch.cat([features, self.skip(x)], 1)))


@dataclass(frozen=True)
class ConvolutionMaker:
    """Makes convolutions with their norms, or with halving in place of norms."""

    batch_norm: bool

    def norm(self, channels: int) -> nn.Sequential:
        """A norm, or what stands for it, and ReLU."""
        return nn.Sequential(nn.BatchNorm2d(channels) if self.batch_norm else Halve(), nn.ReLU(inplace=True))

    def after(
        self, channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1, dilation: int = 1
    ) -> nn.Sequential:
        """A convolution, and its norm after it."""
        reach = dilation * (kernel // 2)
        convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, reach, dilation, bias=False)
        return nn.Sequential(convolution, *self.norm(channels_out))


class Halve(nn.Module):
    """Stands where a norm would: keeps sums of two features in the range of one."""

    def forward(self, x: Tensor) -> Tensor:
        """Half of the input."""
        return x * 0.5


class Encoder(nn.Module):
    """The ResNet.

    Returns the last features, and the inner features of the last block in the first group, for the skip.
    """

    def __init__(self, make: ConvolutionMaker, channels_in: int, width: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels_in, width, 7, 2, 3), nn.MaxPool2d(3, 2, 1))
        self.blocks, self._first, channels = nn.ModuleList(), blocks[0], width
        for number, (count, dilation) in enumerate(zip(blocks, DILATIONS, strict=True)):
            inner = width * 2**number
            for place in range(count):
                # The last block of the first group halves; later groups look further instead.
                stride = 2 if number == 0 and place == count - 1 else 1
                self.blocks.append(DeepLabBottleneck(make, channels, inner, stride, dilation))
                channels = EXPANSION * inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Deep features at an eighth of the size, and low ones at a quarter."""
        x, lows = self.stem(x), []
        for block in self.blocks:
            x, low = block(x)
            lows.append(low)
        return x, lows[self._first - 1]


class DeepLabBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each after its norm; strided is the second. Returns its first features too."""

    def __init__(self, make: ConvolutionMaker, channels: int, inner: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.norm = make.norm(channels)
        self.reduce = make.after(channels, inner, 1)
        self.look = make.after(inner, inner, 3, stride, dilation)
        self.expand = nn.Conv2d(inner, EXPANSION * inner, 1)
        # Where the width stays, the old features are added as they are, every second one of them if strided.
        same = channels == EXPANSION * inner
        self.project = None if same else nn.Conv2d(channels, EXPANSION * inner, 1, stride)
        self.subsample = nn.MaxPool2d(1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output, and its inner features."""
        ready = self.norm(x)
        inner = self.reduce(ready)
        old = self.subsample(x) if self.project is None else self.project(ready)
        return old + self.expand(self.look(inner)), inner


class Pyramid(nn.Module):
    """Convolutions that look near and far, and the mean of the whole map, side by side."""

    def __init__(self, make: ConvolutionMaker, channels_in: int, channels_out: int, rates: Sequence[int]) -> None:
        super().__init__()
        far = (make.after(channels_in, channels_out, 3, 1, rate) for rate in rates)
        self.branches = nn.ModuleList([make.after(channels_in, channels_out, 1), *far])
        # No norm: of a single sample there is one value a channel, of which a batch norm would leave nothing.
        self.pooled = nn.Sequential(nn.Conv2d(channels_in, channels_out, 1), nn.ReLU(inplace=True))
        self.join = make.after((len(rates) + 2) * channels_out, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """All branches side by side, joined to the width of one."""
        mean = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.join(torch.cat([*(branch(x) for branch in self.branches), mean], 1))


def _doubled(channels: int) -> nn.Sequential:
    """A transposed convolution that doubles the size."""
    return nn.Sequential(nn.ConvTranspose2d(channels, channels, 3, 2, 1, output_padding=1), nn.ReLU(inplace=True))


def _plain(channels_in: int, channels_out: int) -> nn.Sequential:
    """A convolution without a norm."""
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(inplace=True))


WORKLOAD = Workload(
    factory=DeepLab,
    shapes=SHAPES,
    fit=fit,
    loss=climate.loss,
    meter=partial(Confusion, climate.CLASSES),
    data=climate.fields,
    small=WorkloadSize(
        network={"width": 8, "rates": (1, 2, 3)},
        data=climate.SMALL,
        training=climate.SMALL_TRAINING,
    ),
    full=WorkloadSize(training=climate.FULL_TRAINING),
)
