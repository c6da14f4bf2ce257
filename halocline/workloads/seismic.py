"""Arrivals of seismic events found in sections of many receivers (Birnie et al. 2021): a U-Net of seven blocks.

A section shows what each receiver hears over time. Sections are generated as they are read, so a data set may be larger
than any memory or disk. The network has group norms in place of batch norms: a batch can be split without a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Field, Generated
from ..geometry import Box
from .climate import drawn, grain
from .metrics import Confusion
from .unet3d import DEPTH, UNet, fit
from .workload import Batch, Workload, WorkloadSize

Array = np.ndarray[Any, Any]

CLASSES = 2  # noise, arrival
SHAPES = ((1, 1, 32, 32),)
EVENTS = 4  # of a section
NOISE = 0.5  # standard deviation, where a wavelet has height 1
WAVELET = 2.5  # half the width of a wavelet, in samples of time
_EVENTS = 30  # stream of random numbers


class SeismicUNet(UNet):
    """Blocks of width w, 2w, 4w, 8w and back again with skips. Width 64 has 7.7 million weights and biases."""

    def __init__(self, width: int = 64, channels_in: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(DEPTH + 1)]
        self.down = nn.ModuleList(_block(i, o) for i, o in zip([channels_in, *widths[:-2]], widths[:-1], strict=True))
        self.pool = nn.MaxPool2d(2)
        self.bottom = _block(widths[-2], widths[-1])
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_block(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3x3 convolutions, each followed by a group norm and ReLU."""
    return nn.Sequential(*_convolution(channels_in, channels_out), *_convolution(channels_out, channels_out))


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    groups = max(1, channels_out // 16)
    return nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(groups, channels_out), nn.ReLU(inplace=True)


@dataclass(frozen=True)
class Sections:
    """Sections of ``size`` samples of time by ``size`` receivers: noise, and events that arrive along hyperbolas."""

    seed: int
    size: int

    def arrivals(self, sample: int) -> tuple[Array, Array]:
        """For each event, its time of arrival at every receiver, in samples, and its strength."""
        depth, place, speed, strength = drawn(self.seed, _EVENTS, sample, 4, EVENTS)
        receivers = np.arange(self.size) / self.size
        away = (receivers - place[:, None]) / (0.5 + speed[:, None])
        return self.size * np.sqrt((0.1 + 0.7 * depth[:, None]) ** 2 + away**2), 0.6 + strength

    def _delays(self, sample: int, rows: Any, columns: Any) -> tuple[Array, Array]:
        """Time since each arrival in widths of a wavelet, [events, time, receivers], and the events' strengths."""
        times, strength = self.arrivals(sample)
        moments = np.arange(self.size)[rows, None]
        return (moments - times[:, None, columns]) / WAVELET, strength

    def section(self, sample: int, box: Box) -> Array:
        """What the receivers hear in a box, with the same bits as in the whole."""
        delays, strength = self._delays(sample, slice(*box[1]), slice(*box[2]))
        square = (np.pi / 2 * delays) ** 2
        wavelets = (strength[:, None, None] * (1 - 2 * square) * np.exp(-square)).sum(0)
        noise = grain(self.seed, sample, (1, self.size, self.size), box)
        return wavelets.astype(np.float32)[None] + np.float32(NOISE) * noise

    def labels(self, sample: int, box: Box) -> Array:
        """One where a wavelet is, else zero."""
        delays, _ = self._delays(sample, slice(*box[0]), slice(*box[1]))
        return np.asarray((np.abs(delays) < 1).any(0))


def fields(samples: int, seed: int = 0, size: int = 64) -> dict[str, Field]:
    """``x``: a section; ``y``: the class of each of its points."""
    sections = Sections(seed, size)
    return {
        "x": Field(Generated(sections.section, samples, (1, size, size), "CHW")),
        "y": Field(Generated(sections.labels, samples, (size, size), "HW", "int64")),
    }


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross entropy over all points of the batch: the mean over samples, so that batches can be split."""
    return F.cross_entropy(output, batch["y"])


WORKLOAD = Workload(
    factory=SeismicUNet,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=partial(Confusion, CLASSES),
    data=fields,
    small=WorkloadSize(
        network={"width": 4},
        data={"size": 64},
        training={"batch": 8, "steps": 150, "samples": 1_200, "lr": 5e-3, "optimizer": "adam", "cut": ("H", "W")},
    ),
    full=WorkloadSize(
        data={"size": 4_096},
        training={
            "batch": 8,
            "split": 0,
            "steps": 20_000,
            "samples": 11_000,
            "validation": 100,
            "lr": 1e-3,
            "optimizer": "adam",
            "cut": ("H", "W"),
        },
    ),
)
