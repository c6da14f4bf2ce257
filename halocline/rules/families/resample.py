"""Interpolation in every mode. A tile reads what the whole call would read at its place in the sample.

Which inputs an output reads, and with which weights, is asked of torch itself (``positions.py``). In nearest modes
torch's kernel runs on the tile where it would read the same there; else rows are selected. In blending modes cut dims
are summed tap by tap with torch's own weights, and the rest is torch's call. Some cases in which its answer depends
on the memory format of the whole are gathered or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Access
from ...geometry.access import Resample
from ...tensor import OwnFunction, ShardedTensor
from ..recipe import Link, Operand, Output, Read, Recipe, Work, follow
from ..table import composite, refuse, run_rule
from .pad import shape_from_torch
from .positions import LINEAR, Scales, Style, channels_last, picks_of, taps_of

Steps = list[tuple[Tensor, Tensor]]


@composite(F.interpolate)
def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """By the size of the output; ``area`` is an adaptive pool."""
    if mode == "area":
        return _area(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    # torch's positions depend on device and memory format, so that both are part of the plan's key.
    tile = input._tile if isinstance(input, ShardedTensor) else input
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    return run_rule(F.interpolate, describe, (input, *given, _device(tile), channels_last(tile)), {})


def _area(input: Tensor, *given: Any) -> Tensor:
    shape = shape_from_torch(F.interpolate, Operand(0, tuple(input.shape), input.dtype, frozenset()), *given)
    # As torch does it.
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(shape) - 3]
    return pool(input, shape[2:])


def _device(tile: Tensor) -> str:
    """Where to ask: a tensor without data stands for one that would round as the CPU does."""
    return "cpu" if tile.device.type == "meta" else tile.device.type


def describe(
    input: Operand,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    antialias: bool,
    device: str,
    last: bool,
) -> Recipe:
    """A recipe whose accesses are what torch reads, asked of torch itself."""
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    asked = "bilinear" if mode == "bicubic" else mode  # without data torch takes thirty times as long for the other
    shape = shape_from_torch(F.interpolate, input, size, scale_factor, asked, *given[3:])
    style = Style(mode, align_corners, antialias, _asked(input.dtype), device, input.ndim - 2)
    scales = _scales(scale_factor, style.spatial) if not recompute_scale_factor else None
    _check_width(input, shape, style)
    if _only_whole(input, shape, style, scales):
        return _gathered(input, shape, given)
    if style.nearest:
        # Then torch has a kernel of its own for channels last, which rounds differently.
        several = device == "cpu" and input.ndim > 3 and input.shape[1] > 3
        nearest = Nearest(input, shape, replace(style, last=last and several), scales, several)
        return _recipe(input, shape, nearest.accesses(), nearest.local)
    blend = Blend(input, shape, style, scales)
    return _recipe(input, shape, blend.accesses(), blend.local)


def _asked(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes positions of such tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scales(scale_factor: Any, spatial: int) -> Scales:
    """One factor for each spatial dim; None where sizes were given."""
    if scale_factor is None:
        return None
    given = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * spatial
    return tuple(float(factor) for factor in given)


def _recipe(input: Operand, shape: tuple[int, ...], accesses: Sequence[Access], local: Callable[..., Tensor]) -> Recipe:
    links = (Link(0), Link(1), *(Link(2 + i, access) for i, access in enumerate(accesses)))
    return Recipe(space=shape, reads=(Read(input, links),), local=local)


def _only_whole(input: Operand, shape: tuple[int, ...], style: Style, scales: Scales) -> bool:
    """Must torch see all of the sample? Integers are blended in fixed point and rounded between the dims. A dim that
    keeps its size under a factor other than 1 is copied or blended as the other dims change theirs, and may be copied
    one way and blended the other, so that its gradient is another map's.
    """
    if not (style.nearest or input.dtype.is_floating_point):
        return True
    uneven = style.antialias or style.mode == "bicubic" or style.device != "cpu"
    return uneven and _kept(input.shape[2:], shape[2:], scales)


def _kept(sizes: Sequence[int], outs: Sequence[int], scales: Scales) -> bool:
    return any(n == m and scale != 1 for n, m, scale in zip(sizes, outs, scales or (), strict=False))


def _check_width(input: Operand, shape: tuple[int, ...], style: Style) -> None:
    """Refuse the one case in which torch's answer depends on the memory format of the whole."""
    if style.antialias and shape[-1] == 1 and any(dim >= 2 for dim in input.cut_dims):
        raise refuse(
            F.interpolate,
            "with antialias and a result of width 1, which rows torch reads on the CPU depends on the memory format",
            "resize without antialias, or call it on hc.gather(x)",
        )


def _gathered(input: Operand, shape: tuple[int, ...], given: tuple[Any, ...]) -> Recipe:
    dims = (0, 1, *[None] * (input.ndim - 2))
    local = lambda work, tile, *_: F.interpolate(tile, *given)  # noqa: E731
    return Recipe(space=shape[:2], reads=(follow(input, *dims),), outputs=(Output(shape, dims),), local=local)


# ---- nearest modes ----


class Nearest:
    """The call on a tile is torch's own where it reads what the whole call would; else one selection for each dim.

    With ``several`` memory formats torch has several answers, and the fetched box may be laid out differently.
    """

    def __init__(self, input: Operand, shape: tuple[int, ...], style: Style, scales: Scales, several: bool) -> None:
        self.input, self.shape, self.style, self.scales, self.several = input, shape, style, scales, several
        self.picks = picks_of(style, input.shape[2:], shape[2:], scales)
        self.plan = cache(self._plan)

    def accesses(self) -> list[Access]:
        """Room for what any memory format reads, for the ranks must agree."""
        # A rank cannot know how another rank's tile lies.
        styles = [replace(self.style, last=last) for last in ((False, True) if self.several else (False,))]
        answers = [picks_of(style, self.input.shape[2:], self.shape[2:], self.scales) for style in styles]
        accesses: list[Access] = []
        for size, *dim in zip(self.input.shape[2:], *answers, strict=True):
            read = list(zip(*(side for picks in dim for side in (picks.value, picks.gradient)), strict=True))
            accesses.append(Resample(size, tuple(map(min, read)), tuple(map(max, read))))
        return accesses

    def local(self, work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        """Copies of rows that are at hand."""
        parts = self.plan(work, tile.device, self.several and channels_last(tile))
        if parts is None:
            target = {"scale_factor": self.scales} if self.scales else {"size": [b.size for b in work.box[2:]]}
            return F.interpolate(tile, mode=self.style.mode, **target)
        for dim, value, gradient in parts:
            tile = Take.apply(tile, dim, value, gradient)
        return tile

    def _plan(self, work: Work, device: torch.device, last: bool) -> list[tuple[int, Tensor, Tensor]] | None:
        """Rows to select in each dim; None where torch's own call on the tile reads the same rows."""
        needs = [slot.needs[0] for slot in work.slots[self.input.index][2:]]
        wanted = [p.part(box, need.lo) for p, box, need in zip(self.picks, work.box[2:], needs, strict=True)]
        sizes, outs = [need.size for need in needs], [box.size for box in work.box[2:]]
        style = replace(self.style, last=last)
        if self._possible(sizes, outs) and picks_of(style, sizes, outs, self.scales) == wanted:
            return None
        with torch.inference_mode(False):  # they outlive this call
            return [
                (dim, torch.tensor(p.value, device=device), torch.tensor(p.gradient, device=device))
                for dim, p in enumerate(wanted, 2)
            ]

    def _possible(self, sizes: Sequence[int], outs: Sequence[int]) -> bool:
        """Does the same call make such a tile, each dim by itself?"""
        scaled = [int(size * scale) for size, scale in zip(sizes, self.scales or (), strict=False)]
        return scaled in ([], outs) and not _kept(sizes, outs, self.scales)


class Take(OwnFunction):
    """``index_select`` whose gradient goes to other places than its values came from, as torch's may."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, dim: int, value: Tensor, gradient: Tensor):  # type: ignore[no-untyped-def]
        """Rows of ``value``."""
        ctx.dim, ctx.size, ctx.value, ctx.gradient = dim, tile.shape[dim], value, gradient
        return tile.index_select(dim, value)

    @staticmethod
    def backward(ctx: Any, slope: Tensor):  # type: ignore[no-untyped-def]
        """The gradient of row i goes to row ``gradient[i]``."""
        return Give.apply(slope, ctx.dim, ctx.size, ctx.value, ctx.gradient), None, None, None


class Give(OwnFunction):
    """The way back of :class:`Take`, and it of this."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, dim: int, size: int, value: Tensor, gradient: Tensor):  # type: ignore[no-untyped-def]
        """Rows added up at the places ``gradient``."""
        ctx.dim, ctx.value, ctx.gradient = dim, value, gradient
        shape = [size if d == dim else n for d, n in enumerate(slope.shape)]
        return slope.new_zeros(shape).index_add_(dim, gradient, slope)

    @staticmethod
    def backward(ctx: Any, slope: Tensor):  # type: ignore[no-untyped-def]
        """The adjoint of the adjoint, for double backward."""
        return Take.apply(slope, ctx.dim, ctx.value, ctx.gradient), None, None, None, None


# ---- blending modes ----


class Blend:
    """Cut dims are blended here with the sample's own weights, one after the other; the rest is torch's own call."""

    def __init__(self, input: Operand, shape: tuple[int, ...], style: Style, scales: Scales) -> None:
        self.input, self.shape, self.style, self.scales = input, shape, style, scales
        self.taps = taps_of(style, input.shape[2:], shape[2:], scales)
        self.plan = cache(self._plan)

    def accesses(self) -> list[Access]:
        """Of each resized dim, what its outputs read."""
        sizes = zip(self.input.shape[2:], self.taps, strict=True)
        return [Resample(size, taps.first, taps.last) for size, taps in sizes]

    def local(self, work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        """One dim after another, with torch's own weights."""
        # Plans hold index tensors: made once for each share of the work and device.
        native, steps = self._native(work), self.plan(work, tile.device)
        if not steps and not any(native):
            return tile.clone()  # all sizes stay, and still the result is no view
        for dim, taps in steps:  # weighted sums of rows; of narrow floats in float32, as the weights are
            blended = reduce(torch.add, (tile.index_select(dim, rows) * weights for rows, weights in taps))
            tile = blended.to(tile.dtype)
        return self._rest(tile, native) if any(native) else tile

    def _native(self, work: Work) -> list[bool]:
        """Against aliasing, all dims or none: a tile may be of width 1, where torch is not to be asked."""
        native = [work.native(self.input, 2 + i) for i in range(self.style.spatial)]
        return native if all(native) or not self.style.antialias else [False] * len(native)

    def _plan(self, work: Work, device: torch.device) -> list[tuple[int, Steps]]:
        """For each cut dim: which rows to take, and their weights, as often as there are taps."""
        with torch.inference_mode(False):  # they outlive this call
            return [
                (dim, self._steps(dim, work, device))
                for dim, native in enumerate(self._native(work), 2)
                if not (native or self._copies(dim))
            ]

    def _copies(self, dim: int) -> bool:
        return self.taps[dim - 2].copies and self.shape[dim] == self.input.shape[dim]

    def _steps(self, dim: int, work: Work, device: torch.device) -> Steps:
        """For each tap: which row of the fetched tile each output reads, and with which weight."""
        taps, box = self.taps[dim - 2], work.box[dim]
        (need,) = work.slots[self.input.index][dim].needs
        first, last = (torch.tensor(side[box.lo : box.hi]) - need.lo for side in (taps.first, taps.last))
        weights = taps.weights[box.lo : box.hi].to(device, self.style.dtype)
        rows = [torch.minimum(first + t, last).to(device) for t in range(taps.width)]
        shape = [-1 if d == dim else 1 for d in range(self.input.ndim)]
        return [(row, weights[:, t].reshape(shape)) for t, row in enumerate(rows)]

    def _rest(self, tile: Tensor, native: list[bool]) -> Tensor:
        """torch's own call for the dims that are not cut. Those blended already are channels to it: torch would read
        their neighbours with weights of zero, and what is not finite would spread.
        """
        done = [2 + i for i, whole in enumerate(native) if not whole]
        left = [2 + i for i, whole in enumerate(native) if whole]
        first = list(range(2, 2 + len(done)))
        moved = tile.movedim(done, first)
        flat = moved.flatten(1, 1 + len(done))
        sizes, scales = [self.shape[dim] for dim in left], [self.scales[dim - 2] for dim in left] if self.scales else []
        mode = self.style.mode
        if mode in LINEAR:
            mode = LINEAR[len(left) - 1]
        elif len(left) < self.style.spatial:  # there is no bicubic mode of one dim
            flat, sizes, scales = flat.unsqueeze(2), [1, *sizes], [1.0, *scales] if scales else []
        target: dict[str, Any] = {"scale_factor": scales} if scales else {"size": sizes}
        made = F.interpolate(
            flat, mode=mode, align_corners=self.style.align_corners, antialias=self.style.antialias, **target
        )
        made = made.reshape(*moved.shape[: 2 + len(done)], *made.shape[made.ndim - len(left) :])
        return made if done == first else made.movedim(first, done).contiguous()
