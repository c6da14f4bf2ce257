"""Random Darcy flow: ``div(K grad u) = 0`` on the unit interval or square, where log K is a Gaussian field.

u is 1 where x = 0 and 0 where x = 1; nothing flows through the other sides. log K comes from its Karhunen-Loeve
expansion, u from finite volumes on a regular grid. It is the truth that a trained GAN is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import ConfigError

Array = np.ndarray[Any, Any]
_KEPT = 0.999  # share of the variance that the expansion keeps


@dataclass(frozen=True)
class FlowSettings:
    """The flow: ``lengths`` and ``deviations`` are the correlation lengths of log K and the deviation of each part."""

    dims: int = 1
    points: int = 65  # of the grid along each dim
    lengths: tuple[float, ...] = (0.3,)
    deviations: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if self.dims not in (1, 2):
            raise ConfigError(f"dims = {self.dims}: the flow is on an interval (1) or on a square (2)")
        if len(self.lengths) != len(self.deviations):
            raise ConfigError(f"lengths {self.lengths} and deviations {self.deviations}: give one deviation for each")


class DarcyFlow:
    """Realisations of the flow, numbered: ``fields(n)`` is always the same."""

    def __init__(self, settings: FlowSettings, seed: int = 0) -> None:
        self.settings, self._seed = settings, seed

    @cached_property
    def axis(self) -> Array:
        """The coordinates of the grid along each dim."""
        return np.linspace(0.0, 1.0, self.settings.points)

    @property
    def grid(self) -> Array:
        """All points, [points ** dims, dims]."""
        axes = np.meshgrid(*[self.axis] * self.settings.dims, indexing="ij")
        return np.stack([axis.reshape(-1) for axis in axes], 1)

    @cached_property
    def _modes(self) -> list[tuple[Array, Array]]:
        """For each correlation length, the roots of eigenvalues and the eigenvectors of the covariance of one dim."""
        found = []
        for length in self.settings.lengths:
            apart = self.axis[:, None] - self.axis
            values, vectors = np.linalg.eigh(np.exp(-(apart**2) / (2 * length**2)))
            values, vectors = values[::-1].clip(0), vectors[:, ::-1]
            kept = int(np.searchsorted(np.cumsum(values) / values.sum(), _KEPT)) + 1
            found.append((np.sqrt(values[:kept]), vectors[:, :kept]))
        return found

    def fields(self, number: int) -> tuple[Array, Array]:
        """log K and u of a realisation, each [points] or [points, points]."""
        log_k = self.log_conductivity(np.random.default_rng([self._seed, number]))
        return log_k, self.solve(np.exp(log_k))

    def log_conductivity(self, numbers: np.random.Generator) -> Array:
        """One draw of log K."""
        total = np.zeros((self.settings.points,) * self.settings.dims)
        for (roots, vectors), deviation in zip(self._modes, self.settings.deviations, strict=True):
            basis = vectors * roots
            if self.settings.dims == 1:
                total += deviation * basis @ numbers.standard_normal(len(roots))
            else:
                total += deviation * basis @ numbers.standard_normal((len(roots),) * 2) @ basis.T
        return total

    def solve(self, conductivity: Array) -> Array:
        """u, by balances of the flow at every point; K between two points is their harmonic mean."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.linalg import spsolve

        shape = conductivity.shape
        numbers = np.arange(conductivity.size).reshape(shape)
        rows, columns, values = [], [], []
        for dim in range(len(shape)):
            low = [slice(None)] * len(shape)
            high = list(low)
            low[dim], high[dim] = slice(None, -1), slice(1, None)
            a, b = conductivity[tuple(low)], conductivity[tuple(high)]
            between = (2 * a * b / (a + b)).reshape(-1)
            if dim == 0 and len(shape) == 2:  # along the sides without flow a point has half a cell
                between = (between.reshape(-1, shape[1]) * self._widths).reshape(-1)
            i, j = numbers[tuple(low)].reshape(-1), numbers[tuple(high)].reshape(-1)
            rows += [i, j, i, j]
            columns += [j, i, i, j]
            values += [between, between, -between, -between]
        matrix = coo_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))).tocsr()
        u = np.zeros(conductivity.size)
        u[numbers[0].reshape(-1)] = 1.0
        inside = numbers[1:-1].reshape(-1)
        u[inside] = spsolve(matrix[inside][:, inside].tocsc(), -(matrix @ u)[inside])
        return u.reshape(shape)

    @property
    def _widths(self) -> Array:
        """The widths of cells across the flow, in cells."""
        widths = np.ones(self.settings.points)
        widths[[0, -1]] = 0.5
        return widths

    def moments(self, count: int, first: int = 10_000) -> dict[str, Array]:
        """Monte Carlo: mean and deviation of both fields, and realisations of log K, over ``count`` numbers."""
        drawn = [self.fields(first + number) for number in range(count)]
        log_k, u = (np.stack(part).reshape(count, -1) for part in zip(*drawn, strict=True))
        return {"k_mean": log_k.mean(0), "k_std": log_k.std(0), "u_mean": u.mean(0), "u_std": u.std(0), "log_k": log_k}

    def at(self, field: Array, points: Array) -> Array:
        """Values of a field at points of the domain, by linear interpolation."""
        place = points * (self.settings.points - 1)
        low = np.minimum(place.astype(int), self.settings.points - 2)
        part = place - low
        if self.settings.dims == 1:
            i, s = low[:, 0], part[:, 0]
            return field[i] * (1 - s) + field[i + 1] * s
        i, j, s, t = low[:, 0], low[:, 1], part[:, 0], part[:, 1]
        upper = field[i, j] * (1 - t) + field[i, j + 1] * t
        return upper * (1 - s) + (field[i + 1, j] * (1 - t) + field[i + 1, j + 1] * t) * s
