"""Who plays: one discriminator for each level and subdomain, with the sensors that it sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ConfigError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Player:
    """A discriminator: of level 1 (the whole domain) or 2 (a tile), from ``low`` to ``high`` in each dim."""

    level: int
    subdomain: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    def sees(self, points: Array) -> Array:
        """Which points lie in its subdomain, its edges included."""
        inside = (points >= np.array(self.low) - 1e-12) & (points <= np.array(self.high) + 1e-12)
        return np.asarray(inside.all(1))


def make_players(subdomains: int, dims: int, two_levels: bool = False) -> list[Player]:
    """The players: tiles of the domain, and with two levels the whole domain before them. One tile is the domain.

    >>> [(p.level, p.low, p.high) for p in make_players(2, 1, two_levels=True)]
    [(1, (0.0,), (1.0,)), (2, (0.0,), (0.5,)), (2, (0.5,), (1.0,))]
    """
    tiles = _tiles(subdomains, dims)
    level = 2 if two_levels or subdomains > 1 else 1
    found = [Player(level, number, low, high) for number, (low, high) in enumerate(tiles)]
    return [Player(1, 0, (0.0,) * dims, (1.0,) * dims), *found] if two_levels else found


def _tiles(count: int, dims: int) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """As square as can be."""
    if count < 1:
        raise ConfigError(f"subdomains = {count}: give at least 1")
    across = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0) if dims == 2 else 1
    along = count // across
    tiles = []
    for i in range(along):
        for j in range(across):
            ends = [(i / along, (i + 1) / along), (j / across, (j + 1) / across)][:dims]
            tiles.append((tuple(low for low, _ in ends), tuple(high for _, high in ends)))
    return tiles


def sensors(player: Player, per_dim: int, dims: int) -> Array:
    """The sensors that a player sees: ``per_dim`` along each dim of its own subdomain, its edges included.

    Each player has as many, so that none waits for another: those of the whole domain lie further apart.
    """
    axes = [np.linspace(low, high, per_dim) for low, high in zip(player.low, player.high, strict=True)]
    grid = np.meshgrid(*axes, indexing="ij")
    return np.stack([axis.reshape(-1) for axis in grid], 1).reshape(-1, dims)
