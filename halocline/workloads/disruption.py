"""Disruptions of a tokamak plasma foretold from its signals (Svyatkovskiy et al. 2019): an LSTM over time.

At every moment the network gives the logit that a disruption is near. ``convolutions`` puts convolutions along the
radius before it, which see the temperature profile of each moment. Time stays whole, and batches are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Field, Generated
from ..geometry import Box
from .climate import drawn, grain
from .metrics import RocCurve
from .workload import Batch, Workload, WorkloadSize

Array = np.ndarray[Any, Any]

SCALARS = 6  # plasma current, density, radiated power, internal inductance, safety factor, locked mode
PROFILE = 16  # points of the temperature profile along the radius
CHANNELS = SCALARS + PROFILE
SHAPES = ((2, CHANNELS, 48),)
NOISE = 0.5  # of every signal, whose slow changes have amplitude 1
WARNING = 0.25  # share of a shot before its disruption in which the alarm is right
_KIND, _TIME, _SLOW, _STRENGTH = 20, 21, 22, 23  # streams of random numbers


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Arguments of a small network that takes inputs of these shapes."""
    return {"width": 8, "layers": 1, "scalars": min(SCALARS, shapes[0][1]), "profile": max(0, shapes[0][1] - SCALARS)}


class DisruptionNet(nn.Module):
    """[N, signals, time] to a logit for each moment. After the first ``scalars`` signals comes a profile."""

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        convolutions: bool = False,
        features: int = 8,
        scalars: int = SCALARS,
        profile: int = PROFILE,
    ) -> None:
        super().__init__()
        self.scalars = scalars
        self.radial: nn.Module | None = None
        entering = scalars + profile
        if convolutions:
            self.radial = nn.Sequential(*_radial(1, features), *_radial(features, features))
            entering = scalars + features * (profile // 4)
        self.recurrent = nn.LSTM(entering, width, layers, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits, [N, time]."""
        if self.radial is not None:
            profile = self.radial(x[:, None, self.scalars :]).flatten(1, 2)
            x = torch.cat([x[:, : self.scalars], profile], 1)
        states, _ = self.recurrent(x.transpose(1, 2))
        return self.head(states)[..., 0]


def _radial(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    """A convolution along the radius, the same at every moment, and a pool that halves the profile."""
    return nn.Conv2d(channels_in, channels_out, (5, 1), padding=(2, 0)), nn.ReLU(), nn.MaxPool2d((2, 1))


@dataclass(frozen=True)
class Shots:
    """Synthetic shots: slow changes and noise, and in half of the shots what comes before a disruption.

    The locked mode and the radiated power rise, and the profile turns hollow. In shots without a disruption they rise,
    too, at times, less and for a while.
    """

    seed: int
    length: int

    def disrupts(self, shot: int) -> bool:
        """Does the shot end in a disruption?"""
        return bool(drawn(self.seed, _KIND, shot, 1)[0] < 0.5)

    def precursor(self, shot: int) -> Array:
        """How far the precursor has grown, for each moment."""
        start, pace = drawn(self.seed, _TIME, shot, 2)
        strength = drawn(self.seed, _STRENGTH, shot, 1)[0]
        time = np.arange(self.length) / self.length
        if self.disrupts(shot):
            begins = 1 - WARNING * (0.6 + 0.8 * start)
            return (0.6 + 1.4 * strength) * np.clip((time - begins) / (1 - begins), 0, 1) ** (0.5 + pace)
        return 0.9 * strength * np.exp(-(((time - start) / (0.03 + 0.1 * pace)) ** 2))

    def signals(self, shot: int, box: Box) -> Array:
        """Any box by itself, with the same bits as in the whole."""
        slow = drawn(self.seed, _SLOW, shot, CHANNELS, 2)
        time = np.arange(self.length) / self.length
        shown = 0.5 * np.cos(2 * math.pi * (slow[:, :1] * 3 * time + slow[:, 1:]))
        shown[SCALARS:] = 0.5 * shown[SCALARS : SCALARS + 1]  # the profile changes as one
        growth = self.precursor(shot)
        shown[2] += 0.7 * growth
        shown[5] += growth
        radius = (np.arange(PROFILE) + 0.5) / PROFILE
        shown[SCALARS:] += 1 - radius[:, None] ** 2 - 0.8 * growth * np.exp(-((radius[:, None] / 0.4) ** 2))
        part = shown[slice(*box[0]), slice(*box[1])].astype(np.float32)
        return part + np.float32(NOISE) * grain(self.seed, shot, (CHANNELS, self.length), box)

    def alarm(self, shot: int, box: Box) -> Array:
        """One in the last moments before a disruption, else zero."""
        near = np.arange(self.length) >= self.length * (1 - WARNING)
        return (near & self.disrupts(shot))[slice(*box[0])].astype(np.float32)


def fields(samples: int, seed: int = 0, length: int = 128) -> dict[str, Field]:
    """``x``: all signals of a shot; ``y``: for each moment, whether a disruption is near."""
    shots = Shots(seed, length)
    return {
        "x": Field(Generated(shots.signals, samples, (CHANNELS, length), "CT")),
        "y": Field(Generated(shots.alarm, samples, (length,), "T")),
    }


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Binary cross entropy over all moments of the whole batch."""
    return F.binary_cross_entropy_with_logits(output, batch["y"].to(output.dtype))


class ShotRoc(RocCurve):
    """The ROC curve of shots: an alarm is raised where the largest logit of a shot is above the threshold."""

    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch; every rank calls it."""
        self.add(output.amax(1), batch["y"].amax(1))


WORKLOAD = Workload(
    factory=DisruptionNet,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=ShotRoc,
    data=fields,
    small=WorkloadSize(
        network={"width": 16, "layers": 1},
        data={"length": 64},
        training={
            "batch": 16,
            "steps": 200,
            "samples": 3_200,
            "validation": 512,
            "cut": ("N",),
            "lr": 5e-3,
            "optimizer": "adam",
            "clip": 1.0,
            "schedule": {"name": "exponential", "warmup": 20, "final": 0.1, "base": 16},
        },
    ),
    # 70 million weights and biases, as published.
    full=WorkloadSize(
        network={"width": 2_330, "layers": 2, "convolutions": True, "features": 128},
        data={"length": 2_000},
        training={
            "batch": 256,
            "steps": 20_000,
            "samples": 100_000,
            "validation": 5_000,
            "cut": ("N",),
            "lr": 4e-5,
            "optimizer": "adam",
            "clip": 10.0,
            "precision": "fp16",
            "gradients": {"wire": "fp16"},
            "schedule": {"name": "exponential", "warmup": 500, "final": 0.1, "base": 256},
        },
    ),
)
CONVOLUTIONAL = Workload(
    factory=partial(DisruptionNet, convolutions=True),
    shapes=SHAPES,
    fit=lambda shapes: {**fit(shapes), "features": 2},
    loss=loss,
    meter=ShotRoc,
    data=fields,
    small=WorkloadSize({**WORKLOAD.small.network, "features": 4}, WORKLOAD.small.data, WORKLOAD.small.training),
    full=WORKLOAD.full,
)
