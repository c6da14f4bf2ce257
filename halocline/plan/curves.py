"""Operations between the shapes at which they were measured: what an efficiency curve is, for each kind of kernel.

For each kind of operation (same function, same dtype, and for a convolution the same kernels of torch) its time is
first a sum of terms that are known from the shapes: a call, bytes, multiplications, bytes of an unfolded volume, with
factors that are fitted to what was measured and never negative. What the terms leave over is interpolated between the
nearest measured shapes, by the logarithms of their sizes. Where nothing of a kind was measured, there is no curve.

Blocks of 32 MiB or more are mapped anew by the C library at each call, and touching them first takes longer than
writing them. That time is taken off what was measured, and added to what is predicted, by the size of the block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch

from .._torch_private import convolution_backend
from ..world.events import Computed

NEAREST = 8  # neighbours that count
RIDGE = 0.3  # how much the slope between neighbours is held to zero
LEAST_WIDTH = 0.25  # of the neighbourhood, in factors of two
FEWEST = 3  # measured operations that make a curve
BACKEND = 3  # part of a convolution's kind: which of torch's kernels
COARSE = 3  # parts of a kind that must agree: function, dtype, number of dims
ALIAS = 1024  # elements: 4 KiB in float32, after which addresses share the lines of a first-level cache
MAPPED = 32 << 20  # bytes of a block from which on the C library maps it anew, and returns it at once
SLACK = 0.2  # how far an interpolated logarithm may lie beyond its neighbours'

Kind = tuple[object, ...]
#: Bytes or multiplications a second, roughly: they only bring the terms to one scale.
_BYTES, _FLOPS = 1e10, 5e10


@dataclass(frozen=True)
class Placed:
    """An operation among its kind: where it stands (logarithms of sizes), and the terms of its time.

    ``touched`` is its bytes, with those of an unfolded volume where torch's kernel makes one; ``mapped`` is those of
    such volumes that are mapped anew.
    """

    kind: Kind
    place: tuple[float, ...]
    terms: tuple[float, ...]
    touched: float
    mapped: float = 0.0


class Curves:
    """Seconds and workspace of operations, from ``(operation, seconds, bytes of workspace)`` that were measured.

    ``fresh`` is bytes a second of memory that is mapped anew; None where that costs nothing.
    """

    def __init__(self, measured: Iterable[tuple[Computed, float, int]], fresh: float | None = None) -> None:
        measured = list(measured)
        # No longer than most of any measured call that maps memory: a busy machine makes the rate look far too low.
        bounds = [0.8 * seconds / mapped for event, seconds, _ in measured if (mapped := placed(event).mapped)]
        self._fresh_s = 0.0 if fresh is None else min([1.0 / fresh, *bounds])
        rows: dict[Kind, list[tuple[Placed, float, float]]] = defaultdict(list)
        for event, seconds, workspace in measured:
            where = placed(event)
            seconds -= where.mapped * self._fresh_s
            for kind in dict.fromkeys((where.kind, where.kind[:COARSE])):
                rows[kind].append((where, seconds, workspace / max(1, where.touched)))
        self._curves = {kind: _Curve(found) for kind, found in rows.items() if len(found) >= FEWEST}

    def seconds(self, event: Computed) -> float | None:
        """Of an operation; None where nothing like it was measured."""
        where = placed(event)
        curve = self._curve(where)
        return None if curve is None else curve.seconds(where) + where.mapped * self._fresh_s

    def workspace(self, event: Computed) -> int:
        """Bytes that the operation takes while it runs, beside its operands and results."""
        where = placed(event)
        curve = self._curve(where)
        return 0 if curve is None else int(curve.workspace_share(where) * where.touched)

    def _curve(self, where: Placed) -> _Curve | None:
        """The curve of the operation's kind, else of all kinds that differ only in finer traits."""
        return self._curves.get(where.kind) or self._curves.get(where.kind[:COARSE])


class _Curve:
    """One kind of operation."""

    def __init__(self, rows: Sequence[tuple[Placed, float, float]]) -> None:
        seconds = np.array([row[1] for row in rows])
        terms = np.array([row[0].terms for row in rows])
        self._places = np.array([row[0].place for row in rows])
        self._factors = _fitted(terms, seconds)
        self._left = np.log(seconds / self._sum(terms))
        self._shares = np.array([row[2] for row in rows])

    def _sum(self, terms: np.ndarray) -> np.ndarray:
        """Seconds by the fitted terms alone, before neighbours correct them."""
        return np.maximum(terms @ self._factors, 1e-7)

    def seconds(self, where: Placed) -> float:
        """The fitted sum, corrected by how far near measured operations are off theirs."""
        away, distance, near = self._neighbours(where)
        left = _local_line(away[near], distance[near], self._left[near])
        return float(self._sum(np.array(where.terms))) * math.exp(left)

    def workspace_share(self, where: Placed) -> float:
        """Of the bytes that the operation touches."""
        _, distance, near = self._neighbours(where)
        weights = _weights(distance[near])
        return float(weights @ self._shares[near] / weights.sum())

    def _neighbours(self, where: Placed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Differences of logarithms of sizes, distances, and the nearest measured operations."""
        away = self._places - np.array(where.place)
        distance = np.sqrt((away**2).sum(1))
        return away, distance, np.argsort(distance, kind="stable")[:NEAREST]


def _fitted(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Factors of the terms by least squares of relative errors; terms that would be negative are left out."""
    used = list(range(terms.shape[1]))
    relative = terms / seconds[:, None]
    while True:
        rows = np.vstack([relative[:, used], 1e-6 * np.eye(len(used))])
        wanted = np.concatenate([np.ones(len(seconds)), np.zeros(len(used))])
        factors, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
        if factors.min() >= 0 or len(used) == 1:
            break
        used.pop(int(np.argmin(factors)))
    found = np.zeros(terms.shape[1])
    found[used] = np.maximum(factors, 0.0)
    return found


def _weights(distance: np.ndarray) -> np.ndarray:
    """Weights that fall with distance; as wide as the third neighbour is far."""
    width = max(LEAST_WIDTH, float(distance[min(2, len(distance) - 1)]))
    return np.exp(-0.5 * (distance / width) ** 2) + 1e-9


def _local_line(away: np.ndarray, distance: np.ndarray, values: np.ndarray) -> float:
    """Weighted least squares around the point asked for; ridge pulls the slopes to zero, not the level."""
    weights = _weights(distance)
    mean = weights @ values / weights.sum()
    centre = weights @ away / weights.sum()
    spread = away - centre
    normal = (weights[:, None] * spread).T @ spread + RIDGE * weights.sum() * np.eye(spread.shape[1])
    slope = np.linalg.solve(normal, (weights[:, None] * spread).T @ (values - mean))
    return float(np.clip(mean - centre @ slope, values.min() - SLACK, values.max() + SLACK))


def placed(event: Computed) -> Placed:
    """The kind of an operation, where it stands among its kind, and the terms of its time."""
    return _placed(event.name, event.dtype, event.shapes, event.options, event.flops, event.bytes)


@lru_cache(maxsize=1 << 16)
def _placed(
    name: str,
    dtype: torch.dtype | None,
    shapes: tuple[tuple[int, ...], ...],
    options: tuple[object, ...],
    flops: float,
    moved: int,
) -> Placed:
    """Where an operation lies among measured ones: its kind, the logarithms of its sizes, and the terms of its time."""
    terms = (1e-6, moved / _BYTES, flops / _FLOPS)
    if name == "convolution":
        return _convolution((name, dtype), shapes[0], shapes[1], options[-6:], (True, True), terms, moved)
    if name == "convolution_backward":
        wanted = cast(tuple[bool, ...], options[-1])
        return _convolution((name, dtype), shapes[1], shapes[2], options[-7:-1], wanted, terms, moved)
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = shapes[-2:]
        batch = left[0] if len(left) == 3 else 1
        return Placed((name, dtype), _logs(batch, left[-2], left[-1], right[-1]), terms, moved)
    return Placed((name, dtype), _logs(moved, flops), terms, moved)


def _convolution(
    function: tuple[str, torch.dtype | None],
    volume: tuple[int, ...],
    weight: tuple[int, ...],
    options: tuple[object, ...],
    wanted: tuple[bool, ...],
    terms: tuple[float, ...],
    moved: int,
) -> Placed:
    """The same of a convolution, whose time also depends on the backend's algorithm and on how memory is laid out."""
    stride, _, dilation, transposed, _, groups = cast(tuple[Any, ...], options)
    backend = convolution_backend((volume, weight), function[1] or torch.float32, options)
    kernel, voxels = math.prod(weight[2:]), math.prod(volume[2:])
    kind = (*function, len(volume), backend, transposed, groups == 1, *wanted[:2])
    sizes = _logs(weight[1], weight[0] / groups, voxels, volume[0], volume[-1], kernel, groups)
    aliased = voxels % ALIAS == 0  # channels lie on the same lines of a cache
    place = (
        *sizes,
        2 * math.log2(math.prod(stride)),
        math.log2(math.prod(dilation)),
        2.0 * (kernel == 1),
        2.0 * aliased,
    )
    positions = volume[0] * voxels / (1 if transposed else math.prod(stride))
    unfolded = 4 * positions * weight[1] * groups * kernel
    more = (unfolded / _BYTES, positions * weight[0] / 1e9, volume[0] * 1e-5, 4 * math.prod(weight) / _BYTES)
    if not unfolds(kind):
        return Placed(kind, place, (*terms, *more), moved)
    # Forward unfolds the volume; backward does so for each of the two gradients that it is asked for.
    blocks = 1 if function[0] == "convolution" else sum(wanted[:2])
    return Placed(kind, place, (*terms, *more), moved + unfolded, blocks * unfolded if unfolded >= MAPPED else 0.0)


def unfolds(kind: Kind) -> bool:
    """Does torch write the windows of such a convolution to memory before it multiplies?"""
    return len(kind) > BACKEND and str(kind[BACKEND]).startswith("Slow")


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(1.0, size)) for size in sizes)
