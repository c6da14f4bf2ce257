"""Which inputs an interpolation reads, and with what weights: torch itself is asked, a dim at a time.

Torch rounds positions by dtype, device, mode, number of dims and even output size, and its nearest modes do not always
send a gradient back where the value came from. So nothing of its arithmetic is repeated here: short lines go through
its own kernel, and what comes out tells the positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Refused
from ...geometry import Interval
from ...kernels.layout import memory_format_of
from ..asking_torch import planned
from ..table import refuse

Scales = tuple[float, ...] | None  # where None, torch divides the sizes

LINEAR = ("linear", "bilinear", "trilinear")  # of one, two and three dims
_TAPS = {**dict.fromkeys(LINEAR, 2), "bicubic": 4, "lanczos": 6}
_FEW = 128  # in 2-D, an output of at most so many rows and columns together goes through another kernel on the CPU


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
        """Does the mode copy values instead of blending them?"""
        return self.mode.startswith("nearest")


@contextmanager
def _plainly(device: str) -> Iterator[None]:
    """Inside, torch answers by an ordinary differentiable call, in any mode of the
    caller and outside the user's program.
    """
    with planned(), torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        yield


def _through(style: Style, lines: Tensor, out: int, scale: float | None, beside: tuple[int, ...]) -> Tensor:
    """Each line of (lines, size) as the last dim of a channel; the other spatial dims go from 1 to ``beside``."""
    x = lines.reshape(1, len(lines), *[1] * len(beside), -1)
    if style.last:
        format = torch.channels_last if style.spatial == 2 else torch.channels_last_3d
        x = x.repeat(1, 4, *[1] * style.spatial).contiguous(memory_format=format)
    target = {"size": (*beside, out)} if scale is None else {"scale_factor": (*map(float, beside), scale)}
    y = F.interpolate(x, **target, mode=style.mode, align_corners=style.align_corners, antialias=style.antialias)
    return y[0, : len(lines)].reshape(len(lines), -1, y.shape[-1])


def channels_last(tile: Tensor) -> bool:
    """Is the tensor laid out so, on which torch's choice of a kernel depends?"""
    return memory_format_of(tile) is not torch.contiguous_format


@dataclass(frozen=True)
class Picks:
    """Of one dim in a nearest mode: where each output's value comes from, and where its gradient goes."""

    value: tuple[int, ...]
    gradient: tuple[int, ...]

    def part(self, box: Interval, origin: int) -> Picks:
        """The picks of the outputs in ``box``, counted from ``origin`` of the input."""
        value, gradient = (tuple(i - origin for i in side[box.lo : box.hi]) for side in (self.value, self.gradient))
        return Picks(value, gradient)


def picks_of(style: Style, sizes: Sequence[int], outs: Sequence[int], scales: Scales) -> list[Picks]:
    """Of every spatial dim of a call."""
    picks = []
    for i, (size, out, scale) in enumerate(zip(sizes, outs, scales or (None,) * len(outs), strict=True)):
        others = [*outs[:i], *outs[i + 1 :]]
        beside = tuple(min(other, _FEW) if style.spatial == 2 else 1 for other in others)
        picks.append(_picks(style, size, out, scale, beside))
    return picks


@lru_cache(4096)
def _picks(style: Style, size: int, out: int, scale: float | None, beside: tuple[int, ...]) -> Picks:
    """The line ``0, 1, 2, ...`` comes out as positions; a gradient of ones comes back as how often each was read."""
    with _plainly(style.device):
        line = torch.arange(size, dtype=style.dtype, device=style.device).unsqueeze(0).requires_grad_()
        y = _through(style, line, out, scale, beside)
        (counts,) = torch.autograd.grad(y.sum(), line)
    each = (counts[0] / math.prod(beside)).round().long().cpu()
    # Positions are in order, so that counts determine them.
    gradient = torch.arange(size).repeat_interleave(each)
    if len(gradient) != y.shape[-1]:
        raise _unclear(style, size, out)
    return Picks(tuple(y[0, 0].long().tolist()), tuple(gradient.tolist()))


def _unclear(style: Style, size: int, out: int) -> Refused:
    """The error for positions that torch's answers do not determine."""
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
        """The most inputs that one output reads."""
        return self.weights.shape[1]

    @property
    def copies(self) -> bool:
        """Does every output copy the input of its own index?"""
        return self.width == 1 and self.first == tuple(range(len(self.first))) and bool((self.weights == 1).all())


def taps_of(style: Style, sizes: Sequence[int], outs: Sequence[int], scales: Scales) -> list[Taps]:
    """Of every spatial dim of a call."""
    dims = zip(sizes, outs, scales or (None,) * len(outs), strict=True)
    return [_taps(style, *dim) for dim in dims]


@lru_cache(1024)
def _taps(style: Style, size: int, out: int, scale: float | None) -> Taps:
    """Combs of teeth so far apart that no output reads two: of ones for weights, of positions, and of infinities.

    An output that reads an infinite tooth is not finite, even with weight zero: such inputs count as read too.
    """
    # Teeth further apart than any output reaches: each response comes from one tooth.
    period = 2 * _reach(style, size, out, scale) + 1
    with _plainly(style.device), torch.no_grad():
        places = torch.arange(size, dtype=style.dtype, device=style.device)
        teeth = places % period == torch.arange(period, device=style.device).unsqueeze(1)
        lines = torch.cat((teeth.to(places), teeth * places, torch.where(teeth, math.inf, 0.0).to(places)))
        responses = _through(style, lines, out, scale, (1,) * (style.spatial - 1))[:, 0].cpu().double()
    weights, moments, marks = responses.split(period)
    # The moment divided by the weight tells the position; the largest weight tells it best.
    strongest = weights.abs().argmax(0, keepdim=True)
    anchor = (moments.gather(0, strongest) / weights.gather(0, strongest)).round()
    tooth = torch.arange(period).unsqueeze(1)
    position = tooth + period * ((anchor - tooth) / period).round()
    if not torch.allclose((weights * position).sum(0), moments.sum(0), rtol=0.0, atol=1e-5 * size + 1e-5):
        raise _unclear(style, size, out)
    return _rows(weights, position.long(), ~marks.isfinite())


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
