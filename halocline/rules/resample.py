"""Interpolation in every mode. Which inputs an output reads, and with what weights, is what torch itself answers.

Torch rounds positions by dtype, device, mode, number of dims and even output size, and its nearest modes do not always
send a gradient back where the value came from. So nothing is computed twice here: one short line for each dim goes
through torch's own kernel, and what comes out tells the positions. A tile then reads them at its place in the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Access, Interval
from ..geometry.access import Resample
from ..tensor import ShardedTensor
from .executor import _planned, run_rule
from .pad import shape_from_torch
from .recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work
from .table import composite, refuse

Scales = tuple[float, ...] | None
Local = Callable[..., Tensor]

_CAP = 128  # in 2-D, outputs of at most so many rows and columns together go through another kernel on the CPU
_LINEAR = ("linear", "bilinear", "trilinear")  # of one, two and three dims
_TAPS = {**dict.fromkeys(_LINEAR, 2), "bicubic": 4, "lanczos": 6}


@dataclass(frozen=True)
class Style:
    """What decides torch's arithmetic, besides sizes. ``last``: channels lie innermost, and there are more than 3."""

    mode: str
    align_corners: bool | None
    antialias: bool
    dtype: torch.dtype
    device: str
    spatial: int
    last: bool = False

    @property
    def nearest(self) -> bool:
        return self.mode.startswith("nearest")


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
    if mode == "area":
        return _area(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    tile = input._tile if isinstance(input, ShardedTensor) else input
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    return run_rule(F.interpolate, describe, (input, *given, _device(tile), _channels_last(tile)), {})


def _area(input: Tensor, *given: Any) -> Tensor:
    shape = shape_from_torch(F.interpolate, Operand(0, tuple(input.shape), input.dtype, frozenset()), *given)
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(shape) - 3]
    return pool(input, shape[2:])  # type: ignore[arg-type]


def _device(tile: Tensor) -> str:
    """Where to ask: a tensor without data stands for one that would round as the CPU does."""
    return "cpu" if tile.device.type == "meta" else tile.device.type


def _channels_last(tile: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tile.is_contiguous() or tile.ndim not in formats:
        return False
    return tile.is_contiguous(memory_format=formats[tile.ndim])


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
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    shape = shape_from_torch(F.interpolate, input, *given)
    style = Style(mode, align_corners, antialias, _asked(input.dtype), device, input.ndim - 2)
    scales = _scales(scale_factor, style.spatial) if not recompute_scale_factor else None
    if _only_whole(input, shape, style, scales):
        return _gathered(input, shape, given)
    if style.nearest:
        several = device == "cpu" and input.ndim > 3 and input.shape[1] > 3
        nearest = Nearest(input, shape, replace(style, last=last and several), scales, several)
        return _recipe(input, shape, nearest.accesses(), nearest.local)
    blend = Blend(input, shape, style, scales)
    return _recipe(input, shape, blend.accesses(), blend.local, sum(taps.width for taps in blend.taps))


def _asked(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes positions of such tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scales(scale_factor: Any, spatial: int) -> Scales:
    if scale_factor is None:
        return None
    given = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * spatial
    return tuple(float(factor) for factor in given)


def _recipe(
    input: Operand, shape: tuple[int, ...], accesses: Sequence[Access], local: Local, work: float = 0.0
) -> Recipe:
    return Recipe(
        space=shape,
        reads=(Read(input, (Link(0), Link(1), *(Link(2 + i, access) for i, access in enumerate(accesses)))),),
        outputs=(Output(shape, tuple(range(input.ndim)), dtype=input.dtype),),
        local=local,
        flops=2.0 * work * math.prod(shape),
    )


def _only_whole(input: Operand, shape: tuple[int, ...], style: Style, scales: Scales) -> bool:
    """Must torch see all of the sample? Integers are blended in fixed point and rounded between the dims. A dim that
    keeps its size under a factor other than 1 is copied one way and blended the other: its gradient is another map's.
    """
    if style.antialias and shape[-1] == 1 and any(d >= 2 for d in input.cut_dims):
        raise refuse(
            F.interpolate,
            "with antialias and a result of width 1, torch's own rows on the CPU depend on how the sample lies in memory",
            "resize without antialias, or call it on hc.gather(x)",
        )
    if style.nearest:
        return False
    kept = zip(input.shape[2:], shape[2:], scales or (), strict=False)
    blends = style.antialias or style.mode == "bicubic"
    return not input.dtype.is_floating_point or (blends and any(n == m and s != 1 for n, m, s in kept))


def _gathered(input: Operand, shape: tuple[int, ...], given: tuple[Any, ...]) -> Recipe:
    spatial = input.ndim - 2
    return Recipe(
        space=shape[:2],
        reads=(Read(input, (Link(0), Link(1), *[WHOLE] * spatial)),),
        outputs=(Output(shape, (0, 1, *[None] * spatial), dtype=input.dtype),),
        local=lambda work, tile, *_: F.interpolate(tile, *given),
    )


# ---- asking torch ----


@contextmanager
def _plainly(device: str) -> Iterator[None]:
    """Whatever mode the caller runs in, the question is an ordinary differentiable call, and no part of the program."""
    with _planned(), torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        yield


def _through(style: Style, lines: Tensor, out: int, scale: float | None, beside: tuple[int, ...]) -> Tensor:
    """Each line of (lines, size) as the last dim of a channel; the other spatial dims go from 1 to ``beside``."""
    x = lines.reshape(1, len(lines), *[1] * len(beside), -1)
    if style.last:
        format = torch.channels_last if style.spatial == 2 else torch.channels_last_3d
        x = x.repeat(1, 4, *[1] * style.spatial).contiguous(memory_format=format)
    target = {"size": (*beside, out)} if scale is None else {"scale_factor": (*map(float, beside), scale)}
    y = F.interpolate(x, **target, mode=style.mode, align_corners=style.align_corners, antialias=style.antialias)  # type: ignore[arg-type]
    return y[0, : len(lines)].reshape(len(lines), -1, y.shape[-1])


@dataclass(frozen=True)
class Picks:
    """Of one dim in a nearest mode: where each output's value comes from, and where its gradient goes."""

    value: tuple[int, ...]
    gradient: tuple[int, ...]

    def part(self, box: Interval, origin: int) -> Picks:
        value, gradient = (tuple(i - origin for i in side[box.lo : box.hi]) for side in (self.value, self.gradient))
        return Picks(value, gradient)


@lru_cache(4096)
def _picks(style: Style, size: int, out: int, scale: float | None, beside: tuple[int, ...]) -> Picks:
    """The line ``0, 1, 2, ...`` comes out as positions; a gradient of ones comes back as how often each was read."""
    with _plainly(style.device):
        line = torch.arange(size, dtype=style.dtype, device=style.device).unsqueeze(0).requires_grad_()
        y = _through(style, line, out, scale, beside)
        (counts,) = torch.autograd.grad(y.sum(), line)
        value = y.detach()[0, 0].long().tolist()
    each = (counts[0] / math.prod(beside)).round().long().cpu()
    gradient = torch.arange(size).repeat_interleave(each).tolist()
    if len(gradient) != len(value):
        raise _unclear(style, size, out)
    return Picks(tuple(value), tuple(gradient))


def _unclear(style: Style, size: int, out: int) -> Exception:
    return refuse(
        F.interpolate,
        f"from {size} to {out} in mode {style.mode!r}, torch's own positions on {style.device} cannot be told",
        "give another size, or call it on hc.gather(x)",
    )


@dataclass(frozen=True, eq=False)
class Taps:
    """Of one dim in a blending mode: output i reads ``first[i]..last[i]`` with the weights of row i."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    weights: Tensor

    @property
    def width(self) -> int:
        return self.weights.shape[1]

    @property
    def copies(self) -> bool:
        return self.width == 1 and self.first == tuple(range(len(self.first))) and bool((self.weights == 1).all())


@lru_cache(1024)
def _taps(style: Style, size: int, out: int, scale: float | None) -> Taps:
    """Combs of teeth so far apart that no output reads two: of ones for weights, of positions, and of infinities.

    Where a tooth is infinite, whatever reads it is not finite, be its weight zero: as much is read here too.
    """
    reach = _reach(style, size, out, scale)
    period = 2 * reach + 1
    with _plainly(style.device), torch.no_grad():
        places = torch.arange(size, dtype=style.dtype, device=style.device)
        teeth = places % period == torch.arange(period, device=style.device).unsqueeze(1)
        lines = torch.cat((teeth.to(places), teeth * places, torch.where(teeth, math.inf, 0.0).to(places)))
        found = _through(style, lines, out, scale, (1,) * (style.spatial - 1))[:, 0].double().cpu()
    weights, moments, touched = found[:period], found[period : 2 * period], ~found[2 * period :].isfinite()
    strongest = weights.abs().argmax(0, keepdim=True)
    anchor = (moments.gather(0, strongest) / weights.gather(0, strongest)).round()
    residue = torch.arange(period).unsqueeze(1)
    position = residue + period * ((anchor - residue) / period).round()
    if not torch.allclose((weights * position).sum(0), moments.sum(0), rtol=0.0, atol=1e-5 * size + 1e-5):
        raise _unclear(style, size, out)
    return _rows(weights, position.long(), touched)


def _reach(style: Style, size: int, out: int, scale: float | None) -> int:
    """The most inputs that one output reads. Against aliasing, as many more as the sample shrinks."""
    taps = _TAPS[style.mode]
    if style.antialias:
        shrinkage = max(1.0, size / out, 1 / scale if scale else 0.0, (size - 1) / max(1, out - 1))
        taps = 2 * math.ceil(taps / 2 * shrinkage) + 2
    return min(taps, size)


def _rows(weights: Tensor, position: Tensor, touched: Tensor) -> Taps:
    """From (tooth, output) to a row of weights for each output, from its first input on."""
    first = torch.where(touched, position, torch.iinfo(torch.long).max).amin(0)
    last = torch.where(touched, position, -1).amax(0)
    teeth, outputs = touched.nonzero(as_tuple=True)
    rows = torch.zeros(len(first), int((last - first).max()) + 1, dtype=torch.float64)
    rows[outputs, position[teeth, outputs] - first[outputs]] = weights[teeth, outputs]
    return Taps(tuple(first.tolist()), tuple(last.tolist()), rows)


# ---- nearest modes ----


class Nearest:
    """The call on a tile is torch's own where it reads what the whole call would; else one selection for each dim.

    With ``several`` memory formats torch has several answers, and what was fetched may lie otherwise than the tile.
    """

    def __init__(
        self, input: Operand, shape: tuple[int, ...], style: Style, scales: Scales, several: bool = False
    ) -> None:
        self.input, self.shape, self.style, self.scales, self.several = input, shape, style, scales, several
        self.picks = self._ask(style, input.shape[2:], shape[2:])
        self.plan = cache(self._plan)

    def _ask(self, style: Style, sizes: Sequence[int], outs: Sequence[int]) -> list[Picks]:
        scales = self.scales or (None,) * len(outs)
        found = []
        for i, (size, out, scale) in enumerate(zip(sizes, outs, scales, strict=True)):
            others = [*outs[:i], *outs[i + 1 :]]
            beside = tuple(min(other, _CAP) if style.spatial == 2 else 1 for other in others)
            found.append(_picks(style, size, out, scale, beside))
        return found

    def accesses(self) -> list[Access]:
        """Room for what any memory format reads, for the ranks must agree."""
        styles = [replace(self.style, last=last) for last in ((False, True) if self.several else (False,))]
        answers = [self._ask(style, self.input.shape[2:], self.shape[2:]) for style in styles]
        return [
            Resample(
                self.input.shape[2 + i],
                tuple(min(at) for at in zip(*(side for p in dim for side in (p.value, p.gradient)), strict=True)),
                tuple(max(at) for at in zip(*(side for p in dim for side in (p.value, p.gradient)), strict=True)),
            )
            for i, dim in enumerate(zip(*answers, strict=True))
        ]

    def local(self, work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        parts = self.plan(work, tile.device, self.several and _channels_last(tile))
        if parts is None:
            target = {"scale_factor": self.scales} if self.scales else {"size": [b.size for b in work.box[2:]]}
            return F.interpolate(tile, mode=self.style.mode, **target)  # type: ignore[arg-type]
        for dim, value, gradient in parts:
            tile = Take.apply(tile, dim, value, gradient)
        return tile

    def _plan(self, work: Work, device: torch.device, last: bool) -> list[tuple[int, Tensor, Tensor]] | None:
        needs = [slots[0] for slots in (slot.needs for slot in work.slots[self.input.index][2:])]
        wanted = [p.part(box, need.lo) for p, box, need in zip(self.picks, work.box[2:], needs, strict=True)]
        sizes, outs = [need.size for need in needs], [box.size for box in work.box[2:]]
        scaled = [int(size * scale) for size, scale in zip(sizes, self.scales or (), strict=False)]
        if scaled in ([], outs) and self._ask(replace(self.style, last=last), sizes, outs) == wanted:
            return None
        with torch.inference_mode(False):  # they outlive this call
            return [
                (dim, torch.tensor(p.value, device=device), torch.tensor(p.gradient, device=device))
                for dim, p in enumerate(wanted, 2)
            ]


class Take(torch.autograd.Function):
    """``index_select`` whose gradient goes to other places than its values came from, as torch's may."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, dim: int, value: Tensor, gradient: Tensor):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.size, ctx.value, ctx.gradient = dim, tile.shape[dim], value, gradient
        return tile.index_select(dim, value)

    @staticmethod
    def backward(ctx: Any, slope: Tensor):  # type: ignore[no-untyped-def]
        return Give.apply(slope, ctx.dim, ctx.size, ctx.value, ctx.gradient), None, None, None


class Give(torch.autograd.Function):
    """The way back of :class:`Take`, and it of this."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, dim: int, size: int, value: Tensor, gradient: Tensor):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.value, ctx.gradient = dim, value, gradient
        shape = [size if d == dim else n for d, n in enumerate(slope.shape)]
        return slope.new_zeros(shape).index_add_(dim, gradient, slope)

    @staticmethod
    def backward(ctx: Any, slope: Tensor):  # type: ignore[no-untyped-def]
        return Take.apply(slope, ctx.dim, ctx.value, ctx.gradient), None, None, None, None


# ---- blending modes ----


class Blend:
    """Cut dims are blended here with the sample's own weights, one after the other; the rest is torch's own call."""

    def __init__(self, input: Operand, shape: tuple[int, ...], style: Style, scales: Scales) -> None:
        self.input, self.shape, self.style, self.scales = input, shape, style, scales
        sizes = zip(input.shape[2:], shape[2:], scales or (None,) * style.spatial, strict=True)
        self.taps = [_taps(style, *each) for each in sizes]
        self.plan = cache(self._plan)

    def accesses(self) -> list[Access]:
        sizes = zip(self.input.shape[2:], self.taps, strict=True)
        return [Resample(size, taps.first, taps.last) for size, taps in sizes]

    def local(self, work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        native = self._native(work)
        for dim, steps in self.plan(work, tile.device):
            total = sum(tile.index_select(dim, places) * weights for places, weights in steps)
            tile = total.to(tile.dtype)  # type: ignore[union-attr]
        return self._rest(tile, native) if any(native) else tile

    def _native(self, work: Work) -> list[bool]:
        """Against aliasing, all dims or none: a tile may be of width 1, where torch is not to be asked."""
        native = [work.native(self.input, 2 + i) for i in range(self.style.spatial)]
        return native if all(native) or not self.style.antialias else [False] * len(native)

    def _plan(self, work: Work, device: torch.device) -> list[tuple[int, list[tuple[Tensor, Tensor]]]]:
        """For each cut dim: which rows to take, and their weights, as often as there are taps."""
        with torch.inference_mode(False):  # they outlive this call
            return [
                (dim, self._steps(dim, work, device))
                for dim, native in enumerate(self._native(work), 2)
                if not (native or self.taps[dim - 2].copies)
            ]

    def _steps(self, dim: int, work: Work, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        taps, box = self.taps[dim - 2], work.box[dim]
        (need,) = work.slots[self.input.index][dim].needs
        first, last = (torch.tensor(side[box.lo : box.hi]) - need.lo for side in (taps.first, taps.last))
        weights = taps.weights[box.lo : box.hi].to(device, self.style.dtype)
        rows = [torch.minimum(first + t, last).to(device) for t in range(taps.width)]
        shape = [-1 if d == dim else 1 for d in range(self.input.ndim)]
        return [(row, weights[:, t].reshape(shape)) for t, row in enumerate(rows)]

    def _rest(self, tile: Tensor, native: list[bool]) -> Tensor:
        """What was blended already goes through as it is. Where it comes first, as channels: that saves taps."""
        lead = native.index(True) if self.style.mode in _LINEAR and all(native[native.index(True) :]) else 0
        flat = tile.flatten(1, 1 + lead)
        sizes = zip(self.shape[2 + lead :], flat.shape[2:], native[lead:], strict=True)
        target: dict[str, Any] = {"size": [out if whole else size for out, size, whole in sizes]}
        if self.scales:
            factors = zip(self.scales[lead:], native[lead:], strict=True)
            target = {"scale_factor": [scale if whole else 1.0 for scale, whole in factors]}
        mode = _LINEAR[flat.ndim - 3] if lead else self.style.mode
        options = {"align_corners": self.style.align_corners, "antialias": self.style.antialias}
        return F.interpolate(flat, mode=mode, **options, **target).unflatten(1, tile.shape[1 : 2 + lead])
