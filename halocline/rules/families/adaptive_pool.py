"""Adaptive pools: average and maximum over windows that follow from the size of the output.

Where every size divides evenly an adaptive pool is an ordinary one (``pool.py``). Else windows differ in width, and the
pool works a dim at a time. A dim that shrinks to size one is reduced within each tile before anything moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Adaptive, Interval, Same, Window
from ...geometry.access import Pieces
from ..recipe import Operand, Recipe, Work
from ..table import composite, run_rule
from .pad import shape_from_torch
from .pool import NARROW, Pool, average_windows, is_cut, max_windows, pool_recipe
from .scan import cut_points


def out_sizes(input: Tensor, spatial: int, output_size: Any) -> tuple[int, ...]:
    """None keeps a dim as it is."""
    given = list(output_size) if isinstance(output_size, Sequence) else [output_size] * spatial
    return tuple(n if m is None else m for n, m in zip(input.shape[-len(given) :], given, strict=False))


def _adaptive_windows(input: Operand, sizes: tuple[int, ...]) -> list[Window] | None:
    """Where every size divides evenly, an adaptive pool is an ordinary one."""
    pairs = list(zip(input.shape[-len(sizes) :], sizes, strict=True))
    return [Window(n // m, n // m) for n, m in pairs] if all(m and n % m == 0 for n, m in pairs) else None


def _ragged(
    function: Pool, input: Operand, shape: tuple[int, ...], sizes: tuple[int, ...], along: Callable[..., Tensor]
) -> Recipe:
    """Windows of several widths. Average and maximum both work a dim at a time, the innermost first as torch scans."""
    first = input.ndim - len(sizes)
    accesses = [Adaptive(n, m) for n, m in zip(input.shape[first:], sizes, strict=True)]

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        """One dim after another, the innermost first as torch scans, so that ties are decided alike."""
        if all(work.native(input, first + i) for i in range(len(sizes))):
            return function(tile, sizes)
        for dim in reversed(range(first, input.ndim)):
            access, box = accesses[dim - first], work.box[dim]
            (need,) = access.need(box)
            if access.in_size != access.out_size:
                tile = along(tile, dim, [access.window(i).shift(-need.lo) for i in range(box.lo, box.hi)])
        return tile

    return pool_recipe(input, shape, accesses, local)


def side_by_side(tile: Tensor, dim: int, windows: list[Interval]) -> tuple[Tensor, int]:
    """Windows of one width one after the other, in a view of three dims; short ones repeat their last element."""
    width = max(window.size for window in windows)
    # Repeating the last element changes no maximum; the mean masks it out.
    places = [min(window.lo + t, window.hi - 1) for window in windows for t in range(width)]
    if places != list(range(tile.shape[dim])):
        tile = tile.index_select(dim, torch.tensor(places, device=tile.device))
    return tile.reshape(math.prod(tile.shape[:dim]), len(places), math.prod(tile.shape[dim + 1 :])), width


def _max_along(tile: Tensor, dim: int, windows: list[Interval]) -> Tensor:
    """The maximum of each window along one dim."""
    flat, width = side_by_side(tile, dim, windows)
    return F.max_pool2d(flat, (width, 1)).reshape(*tile.shape[:dim], len(windows), *tile.shape[dim + 1 :])


def _mean_along(tile: Tensor, dim: int, windows: list[Interval]) -> Tensor:
    """The mean of each window along one dim; in half precision computed in float32."""
    if tile.dtype in NARROW:
        return _mean_along(tile.float(), dim, windows).to(tile.dtype)
    flat, width = side_by_side(tile, dim, windows)
    counts = torch.tensor([window.size for window in windows], device=tile.device)
    if any(window.size < width for window in windows):
        repeated = torch.arange(width, device=tile.device) >= counts.unsqueeze(-1)
        flat = flat.masked_fill(repeated.reshape(-1, 1), 0)
    mean = F.avg_pool2d(flat, (width, 1), divisor_override=1) / counts.unsqueeze(-1)
    return mean.reshape(*tile.shape[:dim], len(windows), *tile.shape[dim + 1 :])


def _adaptive_avg_pool(spatial: int, function: Any) -> Pool:
    """The composite and rule of ``adaptive_avg_pool*d``."""

    def describe(input: Operand, sizes: tuple[int, ...]) -> Recipe:
        shape = shape_from_torch(function, input, sizes)
        windows = _adaptive_windows(input, sizes)
        if windows and input.dtype not in NARROW:  # torch averages those in 3-D only where the pool is adaptive
            return average_windows(input, shape, windows)
        return _ragged(function, input, shape, sizes, _mean_along)

    def run(input: Tensor, output_size: Any) -> Tensor:
        input = _as_autocast_would(function, input)
        sizes = out_sizes(input, spatial, output_size)
        dims = range(input.ndim - len(sizes), input.ndim)
        # Dims of which only the mean is left.
        ones = [d for d, m in zip(dims, sizes, strict=True) if m == 1 and input.shape[d] > 1]
        if any(is_cut(input, d) for d in ones):  # a sum over ranks, not a journey of the sample to one of them
            return function(input.mean(ones, keepdim=True), sizes)
        return run_rule(function, describe, (input, sizes), {})

    return run


def _as_autocast_would(function: Any, input: Tensor) -> Tensor:
    """Autocast may compute this pool in another dtype; what stands in for it does so too."""
    kind = input.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return input
    one = torch.zeros((1,) * input.ndim, dtype=input.dtype, device=input.device)
    return input.to(function(one, 1).dtype)


def _adaptive_max_pool(spatial: int, pool: Pool, function: Any) -> Pool:
    """The composite and rule of ``adaptive_max_pool*d`` without indices."""

    def describe(input: Operand, sizes: tuple[int, ...]) -> Recipe:
        shape = shape_from_torch(function, input, sizes)
        windows = _adaptive_windows(input, sizes)
        if windows:
            recipe = max_windows(pool, input, shape, windows)
        else:
            recipe = _ragged(function, input, shape, sizes, _max_along)
        return replace(recipe, uncut=frozenset(d for d, m in enumerate(shape) if m == 1 and input.shape[d] > 1))

    def run(input: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
        """Where a cut dim shrinks to size one, each tile takes its own maximum before anything moves."""
        sizes = out_sizes(input, spatial, output_size)
        dims = range(input.ndim - len(sizes), input.ndim)
        if all(points_to_reduce(input, d, m) is None for d, m in zip(dims, sizes, strict=True)):
            return run_rule(function, describe, (input, sizes), {})
        x = input
        for d, m in reversed(list(zip(dims, sizes, strict=True))):
            if (points := points_to_reduce(x, d, m)) is not None:
                x = run_rule(function, _tile_maximum, (x, d, points), {})
            if x.shape[d] != m:
                x = function(x, [m if other == d else x.shape[other] for other in dims])
        return x

    return run


def points_to_reduce(input: Tensor, dim: int, size: int) -> tuple[int, ...] | None:
    """The cut points of a dim that becomes ``size`` 1, if tiles have several elements there; else None.

    A maximum within each tile then comes before any movement.
    """
    points = cut_points(input, dim) if size == 1 else None
    return points if points is not None and len(points) <= input.shape[dim] else None


def _tile_maximum(input: Operand, dim: int, points: tuple[int, ...]) -> Recipe:
    """One maximum for each tile along ``dim``: nothing moves."""

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        box = work.box[dim]
        pieces = [Interval(points[i], points[i + 1]) for i in range(box.lo, box.hi)]
        return _max_along(tile, dim, [piece.shift(-points[box.lo]) for piece in pieces])

    shape = (*input.shape[:dim], len(points) - 1, *input.shape[dim + 1 :])
    accesses = [Pieces(points) if d == dim else Same() for d in range(input.ndim)]
    return pool_recipe(input, shape, accesses, local)


for _spatial in (1, 2, 3):
    _avg, _max = getattr(F, f"adaptive_avg_pool{_spatial}d"), getattr(F, f"adaptive_max_pool{_spatial}d")
    composite(_avg, family="pool")(_adaptive_avg_pool(_spatial, _avg))
    composite(_max, family="pool")(_adaptive_max_pool(_spatial, getattr(torch, f"max_pool{_spatial}d"), _max))
