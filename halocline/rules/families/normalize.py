"""Norms over cut tensors: local statistics, one float64 sum over ranks, torch's own kernel to apply them.

All of them are one map: view the tile as [B, K, rest], take statistics of groups of K, scale and shift each k. Batch
norm has K = channels; instance and group norm K = batch x channels with the batch folded away; layer norm K = rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_private import unsafe_view
from ...kernels.layout import memory_format_of
from ...world import MovementFunction, Route, Sum, scaled
from ..double_backward import Autocast, differentiated

NARROW = (torch.half, torch.bfloat16)
Track = Callable[[Tensor, Tensor], None]
_FEW = 8  # ranks whose rows make one short message


@dataclass(frozen=True)
class NormLayout:
    """How a tile is seen by the kernel, and over which ranks its statistics run."""

    view: tuple[int, ...]  # [B, K, rest]; rest may be several dims, which keeps the layout of channels last
    groups: int  # K = groups x members
    count: int  # elements of a group over all ranks
    route: Route | None

    @property
    def members(self) -> int:
        return self.view[1] // self.groups if self.groups else 1

    def by_group(self, values: Tensor) -> Tensor:
        """Sums over the members of each group, from one value a k in the last dim."""
        return values.view(*values.shape[:-1], self.groups, self.members).sum(-1)


def _total(values: Tensor, route: Route | None) -> Tensor:
    return values if route is None else route.world.sum(values, route.ranks, route.label)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and sum of squared deviations of each k, and how many elements it has here."""
    dims = tuple(d for d in range(x.ndim) if d != 1)
    here = prod(x.shape[d] for d in dims)
    if x.numel() == 0:
        nothing = x.new_zeros(x.shape[1], dtype=torch.float64)
        return nothing, nothing, here
    wide = x.float() if x.dtype in NARROW else x
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return mean.double(), variance.double() * here, here


def statistics(tile: Tensor, layout: NormLayout) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each group, in float64. Never a mean of squares less a square of the mean."""
    means, squares, here = _channel_moments(tile.reshape(layout.view))
    counts = means.new_full(means.shape, float(here))
    shape = (layout.groups, layout.members)
    mean, spread = _merged(counts.view(shape), means.view(shape), squares.view(shape), dim=1)
    if layout.route is not None:
        counts, mean, spread = _of_all_ranks(layout.by_group(counts), mean, spread, layout.route)
        mean, spread = _merged(counts, mean, spread, dim=0)
    return mean, spread / layout.count


def _merged(counts: Tensor, means: Tensor, spreads: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of parts taken together."""
    total = counts.sum(dim).clamp_min(1)
    mean = (counts * means).sum(dim) / total
    return mean, (spreads + counts * (means - mean.unsqueeze(dim)) ** 2).sum(dim)


def _of_all_ranks(counts: Tensor, mean: Tensor, spread: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
    """Each rank's own in a row of its own: among few ranks one sum brings all rows, else a second is smaller."""
    ranks = len(route.ranks)
    if ranks <= _FEW:
        rows = mean.new_zeros(ranks, 3, *mean.shape)
        rows[route.ranks.index(route.world.rank)] = torch.stack((counts, mean, spread))
        rows = _total(rows, route)
        return rows[:, 0], rows[:, 1], rows[:, 2]
    total, centre = _total(torch.stack((counts, counts * mean)), route)
    centre = centre / total.clamp_min(1)
    spread = _total(spread + counts * (mean - centre) ** 2, route)
    return total.unsqueeze(0), centre.unsqueeze(0), spread.unsqueeze(0)


def _spread(per_group: Tensor, layout: NormLayout, dtype: torch.dtype) -> Tensor:
    """From one value a group to one value a k."""
    return per_group.repeat_interleave(layout.members).to(dtype) if layout.members > 1 else per_group.to(dtype)


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in NARROW else x.dtype


class NormFunction(MovementFunction):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` with statistics over groups and ranks.

    Saves the tile and the statistics only. Its backward takes one more sum over ranks; when that backward is itself
    differentiated, it is composed from differentiable pieces instead.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        layout: NormLayout,
        track: Track | None,
    ):
        mean, variance = statistics(x, layout)
        if track is not None:
            track(mean, variance)
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.eps, ctx.layout = eps, layout
        return _apply(x, mean, variance, weight, bias, eps, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        x, weight, bias, mean, variance = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            again = partial(composed, eps=ctx.eps, layout=ctx.layout)
            found = differentiated(again, (x, weight, bias), needed, gradient, Autocast.now(x.device).off)
        else:
            found = _fast_backward(x, weight, gradient, mean, variance, ctx.eps, ctx.layout)
        return *(g if wanted else None for g, wanted in zip(found, needed, strict=True)), None, None, None


def _usual(x: Tensor) -> Tensor:
    """``x`` with the strides that torch gives a new tensor of this shape and memory format.

    Reshaping may leave a dim of size one with any stride, and torch's CPU kernel of batch norm's backward then takes
    a tensor with channels last for a contiguous one.
    """
    form = memory_format_of(x)
    if not x.is_contiguous(memory_format=form):
        return x.contiguous() if x.device.type == "cpu" else x
    strides = torch.empty(x.shape, device="meta", memory_format=form).stride()
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def _apply(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layout: NormLayout,
) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    dtype = _work_dtype(x)
    seen = _usual(x.reshape(layout.view))
    moments = _spread(mean, layout, dtype), _spread(variance, layout, dtype)
    y = F.batch_norm(seen, *moments, _to(weight, dtype), _to(bias, dtype), False, 0.0, eps)
    if y.shape == x.shape:
        return y
    return unsafe_view(y, x.shape)  # a plain reshape is a view, which nothing may change in place


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _fast_backward(
    x: Tensor, weight: Tensor | None, gradient: Tensor, mean: Tensor, variance: Tensor, eps: float, layout: NormLayout
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """torch's kernel gives ``weight * rstd * dy``, sum(dy * xhat) and sum(dy); the group's means are taken off."""
    dtype = _work_dtype(x)
    rstd = (variance + eps).rsqrt()
    ones = torch.ones(layout.view[1], dtype=dtype, device=x.device)
    scale = ones if weight is None else weight.to(dtype)
    if x.numel() == 0:
        dx, slope, offset = torch.zeros_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
    else:
        seen, dy = _usual(x.reshape(layout.view)), _usual(gradient.reshape(layout.view))
        centre, deviation = _spread(mean, layout, dtype), _spread(variance, layout, dtype)
        dx, slope, offset = torch.ops.aten.native_batch_norm_backward(
            dy, seen, scale, centre, deviation, centre, _spread(rstd, layout, dtype), False, eps, [True, True, True]
        )
    sums = torch.stack((slope.double() * scale.double(), offset.double() * scale.double()))
    sums = _total(layout.by_group(sums), layout.route) / layout.count
    if x.numel():
        # xhat * mean(dy w xhat) + mean(dy w), times rstd: once more an affine map of x by group.
        factor, shift = _spread(-sums[0] * rstd, layout, dtype), _spread(-sums[1] * rstd, layout, dtype)
        dx = dx + F.batch_norm(seen, centre, deviation, factor, shift, False, 0.0, eps)
    return dx.reshape(x.shape), slope if weight is None else slope.to(weight.dtype), offset


def composed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layout: NormLayout) -> Tensor:
    """The same map from differentiable pieces: sums over ranks are cut to whole, their use whole to cut."""
    seen = x.reshape(layout.view)
    dtype = seen.dtype
    shape = (1, layout.view[1], *(1,) * (seen.ndim - 2))
    mean = _spread(_group_mean(seen, layout), layout, dtype).reshape(shape)
    centred = seen - mean
    variance = _spread(_group_mean(centred * centred, layout), layout, dtype).reshape(shape)
    y = centred * (variance + eps).rsqrt()
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y.reshape(x.shape)


def _group_mean(seen: Tensor, layout: NormLayout) -> Tensor:
    """A sum over ranks (cut to whole) whose result is used by cut work again (whole to cut): the factors cancel."""
    total = layout.by_group(seen.double().sum([d for d in range(seen.ndim) if d != 1]))
    if layout.route is not None:
        ranks = len(layout.route.ranks)
        total = scaled((1.0, float(ranks)), Sum.apply(total, layout.route, (1.0, 1.0 / ranks)))
    return total / layout.count


def normalize(
    tile: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layout: NormLayout,
    track: Track | None = None,
) -> Tensor:
    """The normalised tile. ``track`` is called with mean and biased variance of each group.

    It runs inside the Function's forward: a checkpoint may end its recomputation as soon as the Function has saved
    its tensors, and torch's own kernel has updated running statistics by then.
    """
    normalized: Tensor = NormFunction.apply(tile, weight, bias, eps, layout, track)
    return normalized
