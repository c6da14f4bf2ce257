"""DeepCAM of MLPerf HPC: DeepLabv3+ with an Xception encoder (Chollet 2017, aligned as by Chen et al. 2018).

The task and the data are those of Kurth et al. 2018; separable convolutions replace most of the dense ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from . import climate
from .metrics import Confusion
from .workload import Workload, WorkloadSize

MULTIPLE = 16
MIDDLE = 16  # blocks between entry and exit
RATES = (6, 12, 18)
SHAPES = ((1, 16, 32, 48),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"width": 4, "middle": 2, "rates": (1, 2, 3), "channels_in": shapes[0][1]}


class DeepCAM(nn.Module):
    """Xception encoder at a sixteenth of the size, pyramid of dilated convolutions, decoder by transposed ones.

    By default it is the benchmark's network for 16 channels: 56.455 million parameters. Widths follow from ``width``,
    that of the first convolution.
    """

    def __init__(
        self,
        width: int = 32,
        middle: int = MIDDLE,
        rates: Sequence[int] = RATES,
        channels_in: int = 16,
        classes: int = 3,
    ) -> None:
        super().__init__()
        deep, low = 8 * width, 3 * width // 2
        self.encoder = XceptionEncoder(channels_in, width, middle)
        near = _normed(nn.Conv2d(64 * width, deep, 1, bias=False))
        far = (_normed(nn.Conv2d(64 * width, deep, 3, 1, rate, rate, bias=False)) for rate in rates)
        self.branches = nn.ModuleList([near, *far])
        # The benchmark has a batch norm here, which leaves nothing of a single sample with one value a channel.
        mean = [nn.Conv2d(64 * width, deep, 1, bias=False), nn.GroupNorm(1, deep), nn.ReLU(inplace=True)]
        self.pooled = nn.Sequential(*mean)
        self.join = _normed(nn.Conv2d((len(rates) + 2) * deep, deep, 1, bias=False))
        self.low = _normed(nn.Conv2d(4 * width, low, 1, bias=False))
        self.rise = nn.Sequential(_doubled(deep), _doubled(deep))
        self.merge = nn.Sequential(
            _normed(nn.Conv2d(deep + low, deep, 3, padding=1, bias=False)),
            _normed(nn.Conv2d(deep, deep, 3, padding=1, bias=False)),
            nn.Conv2d(deep, deep, 1),
        )
        self.rise_to_half = _doubled(deep)
        self.head = nn.ConvTranspose2d(deep, classes, 3, 2, 1, output_padding=1, bias=False)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to logits of the same size."""
        if any(size % MULTIPLE for size in x.shape[2:]):
            raise ValueError(f"a map of {list(x.shape[2:])} does not halve evenly; use multiples of {MULTIPLE}")
        x, low = self.encoder(x)
        mean = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        x = self.join(torch.cat([*(branch(x) for branch in self.branches), mean], 1))
        x = self.merge(torch.cat([self.rise(x), self.low(low)], 1))
        return self.head(self.rise_to_half(x))


class XceptionEncoder(nn.Module):
    """Entry, middle and exit flow. Returns the last features, and those at a quarter of the size for the skip."""

    def __init__(self, channels_in: int, width: int, middle: int) -> None:
        super().__init__()
        inner = 91 * width // 4
        self.stem = nn.Sequential(
            _normed(nn.Conv2d(channels_in, width, 3, 2, 1, bias=False)),
            _normed(nn.Conv2d(width, 2 * width, 3, 1, 1, bias=False)),
        )
        self.first = XceptionBlock([2 * width, 4 * width, 4 * width], stride=2)
        self.entry = nn.Sequential(
            XceptionBlock([4 * width, 8 * width, 8 * width], stride=2),
            XceptionBlock([8 * width, inner, inner], stride=2),
        )
        self.middle = nn.Sequential(*(XceptionBlock([inner] * 4) for _ in range(middle)))
        self.exit = XceptionBlock([inner, inner, 32 * width], extra=True)
        self.last = nn.Sequential(
            _normed(_separable(32 * width, 48 * width, dilation=2)),
            _normed(_separable(48 * width, 48 * width, dilation=2)),
            _normed(_separable(48 * width, 64 * width, dilation=2)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Deep features at a sixteenth of the size, and low ones at a quarter."""
        low = self.first(self.stem(x))
        x = self.middle(self.entry(low.relu()).relu())
        return self.last(self.exit(x)), low


class XceptionBlock(nn.Module):
    """Separable convolutions from one of ``channels`` to the next, one more if strided or ``extra``, and a skip."""

    def __init__(self, channels: Sequence[int], stride: int = 1, extra: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [_separable(before, after), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        layers.pop()
        first, last = channels[0], channels[-1]
        if stride > 1 or extra:
            layers.append(_separable(last, last, stride))
        self.layers = nn.Sequential(*layers)
        same = first == last and stride == 1
        skip = nn.Sequential(nn.Conv2d(first, last, 1, stride, bias=False), nn.BatchNorm2d(last))
        self.skip: nn.Module = nn.Identity() if same else skip

    def forward(self, x: Tensor) -> Tensor:
        """The layers' features added to the old ones."""
        return self.layers(x) + self.skip(x)


def _separable(channels_in: int, channels_out: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A 3x3 convolution of each channel by itself, then one of 1x1 over all."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_in, 3, stride, dilation, dilation, groups=channels_in, bias=False),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
    )


def _normed(layer: nn.Module) -> nn.Sequential:
    """A layer, and its norm after it."""
    channels = (layer[-1] if isinstance(layer, nn.Sequential) else layer).out_channels
    return nn.Sequential(layer, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))  # type: ignore[arg-type]


def _doubled(channels: int) -> nn.Sequential:
    """A transposed convolution that doubles the size."""
    return _normed(nn.ConvTranspose2d(channels, channels, 3, 2, 1, output_padding=1, bias=False))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight)


WORKLOAD = Workload(
    factory=DeepCAM,
    shapes=SHAPES,
    fit=fit,
    loss=climate.loss,
    meter=partial(Confusion, climate.CLASSES),
    data=climate.fields,
    small=WorkloadSize(
        network={"width": 8, "middle": 4, "rates": (1, 2, 3)},
        data=climate.SMALL,
        training=climate.SMALL_TRAINING,
    ),
    full=WorkloadSize(training=climate.FULL_TRAINING),
)
