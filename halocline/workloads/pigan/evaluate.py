"""Generated fields beside Monte Carlo: means, deviations, covariance over distance, and the equation's residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .game import Game, Generators
from .networks import induced_source
from .truth import DarcyFlow

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FieldMoments:
    """Of many realisations on the grid: mean and deviation of u and of log K, and the covariance of log K over lags."""

    u_mean: Array
    u_std: Array
    k_mean: Array
    k_std: Array
    lags: Array
    covariance: Array


def moments_of(log_k: Array, u: Array, flow: DarcyFlow) -> FieldMoments:
    """The moments of realisations, [count, points ** dims] each. Lags are along the first dim."""
    shape = (len(log_k), *(flow.settings.points,) * flow.settings.dims)
    centred = (log_k - log_k.mean(0)).reshape(shape)
    steps = range(flow.settings.points // 2)
    products = [(centred[:, lag:] * centred[:, : shape[1] - lag]).mean() for lag in steps]
    lags = flow.axis[: len(products)]
    return FieldMoments(u.mean(0), u.std(0), log_k.mean(0), log_k.std(0), lags, np.array(products))


def true_moments(game: Game, count: int = 2000) -> FieldMoments:
    """Monte Carlo, over realisations that no sensor has seen."""
    flow = DarcyFlow(game.settings.flow, game.settings.seed)
    drawn = [flow.fields(1_000_000 + number) for number in range(count)]
    log_k, u = (np.stack(part).reshape(count, -1) for part in zip(*drawn, strict=True))
    return moments_of(log_k, u, flow)


@torch.no_grad()
def generated(game: Game, generators: Generators, count: int = 2000) -> tuple[Array, Array]:
    """log K and u of generated realisations on the grid, [count, points ** dims] each."""
    flow = DarcyFlow(game.settings.flow, game.settings.seed)
    grid = torch.tensor(flow.grid, dtype=game.dtype)
    numbers = torch.Generator().manual_seed(game.settings.seed + 99)
    parts: list[tuple[Array, Array]] = []
    for first in range(0, count, 100):
        noise = torch.randn(min(100, count - first), game.settings.noise, generator=numbers, dtype=game.dtype)
        points = grid[None].expand(len(noise), -1, -1)
        parts.append((generators.log_k(points, noise).numpy(), generators.u(points, noise).numpy()))
    return np.concatenate([k for k, _ in parts]), np.concatenate([u for _, u in parts])


def residual_rms(game: Game, generators: Generators, count: int = 50) -> float:
    """The root mean square of ``div(K grad u)`` inside the domain, which the flow has as 0."""
    numbers = torch.Generator().manual_seed(game.settings.seed + 98)
    noise = torch.randn(count, game.settings.noise, generator=numbers, dtype=game.dtype)
    points = 0.05 + 0.9 * torch.rand(count, 64, game.settings.flow.dims, generator=numbers, dtype=game.dtype)
    source = induced_source(lambda x: generators.log_k(x, noise), lambda x: generators.u(x, noise), points)
    return source.detach().square().mean().sqrt().item()


def compared(game: Game, generators: Generators, truth: FieldMoments, count: int = 2000) -> dict[str, float]:
    """Relative errors over the grid, in the 2-norm, and of the covariance at lags below a tenth of the domain."""
    flow = DarcyFlow(game.settings.flow, game.settings.seed)
    found = moments_of(*generated(game, generators, count), flow)
    short = (truth.lags > 0) & (truth.lags <= 0.1)

    def off(mine: Array, true: Array) -> float:
        return float(np.linalg.norm(mine - true) / np.linalg.norm(true))

    return {
        "u_mean": off(found.u_mean, truth.u_mean),
        "u_std": off(found.u_std, truth.u_std),
        "k_std": off(found.k_std, truth.k_std),
        "covariance_short": off(found.covariance[short], truth.covariance[short]),
        "residual": residual_rms(game, generators),
    }
