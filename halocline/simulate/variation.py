"""Stragglers: the slowest of N ranks, sampled without sampling N ranks.

The delay of one rank is normal (its device is slower or faster than others) plus two exponential ones (its host, and
the network and file system that it shares). The slowest of N independent ranks is the quantile u^(1/N) of that
distribution for a uniform u, so the cost does not depend on N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..plan.machine import Machine, Quantity, Variation

Array = npt.NDArray[np.float64]
CELLS = 6_000  # of the grid on which distributions are convolved
REACH = 45.0  # means of an exponential, or standard deviations, that the grid covers: a tail of 1e-16 and less
#: For GPUs whose machine file says nothing; none for CPU ranks, which measure their own spread by running.
USUAL = Variation(
    device_spread=Quantity(value=0.015, source="assumed", low=0.008, high=0.025),
    host_us=Quantity(value=500, source="assumed", low=100, high=1500),
)
BAND = (5.0, 95.0)  # per cent of the steps


@dataclass(frozen=True)
class Delays:
    """Delays of the slowest rank in sampled steps, in seconds."""

    samples: Array

    @property
    def mean(self) -> float:
        """Seconds by which the slowest rank makes a step longer, on average."""
        return float(self.samples.mean())

    @property
    def band(self) -> tuple[float, float]:
        """Nine steps of ten lie in it."""
        low, high = np.percentile(self.samples, BAND)
        return float(low), float(high)


def slowest(machine: Machine, compute: float, ranks: int, seed: int = 0, steps: int = 400) -> Delays:
    """Delays of a step that computes for so long, on the slowest of ``ranks`` ranks."""
    variation = machine.variation or (USUAL if machine.device.kind == "gpu" else None)
    if variation is None:
        return Delays(np.zeros(steps))
    spread = variation.device_spread.value * compute
    means = [variation.host_us.value * 1e-6]
    if variation.shared is not None:
        means.append(variation.shared.value * compute)
    uniform = (np.random.default_rng(seed).random(steps) + np.arange(steps)) / steps  # stratified
    return Delays(_quantiles(spread, means, _root(uniform, ranks)))


def _root(uniform: Array, ranks: int) -> Array:
    """Tails 1 - u^(1/N), precise where u^(1/N) is nearly one."""
    return -np.expm1(np.log(uniform) / ranks)


def _quantiles(spread: float, means: list[float], tails: Array) -> Array:
    """Values that a rank's delay exceeds with these probabilities."""
    width = 9.0 * spread + REACH * max([spread, *means]) * 1.05
    step = width / CELLS
    grid = np.arange(CELLS) * step - 9.0 * spread
    density = np.zeros(CELLS)
    if spread > step / 4:
        density = np.exp(-0.5 * (grid / spread) ** 2)
    else:
        density[round(9.0 * spread / step)] = 1.0
    density /= density.sum()
    for mean in means:
        ages = (np.arange(CELLS) + 0.5) * step
        tail = np.exp(-(ages - 0.5 * step) / mean)
        weight = tail * -math.expm1(-step / mean)
        density = np.convolve(density, weight)[:CELLS]
    survival = np.cumsum(density[::-1])[::-1]
    return np.interp(np.log(tails), np.log(np.maximum(survival, 1e-300))[::-1], grid[::-1])
