"""The local halves of every norm: statistics of a tile, torch's own kernel to apply them, and their derivatives.

All norms are one map: view the tile as [B, K, rest], take statistics of groups of K, scale and shift each k. Batch
norm has K = channels; instance and group norm K = batch x channels with the batch folded away; layer norm K = rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_private import unsafe_view
from ...kernels.layout import memory_format_of
from ..recipe import Moments, merged

NARROW = (torch.half, torch.bfloat16)
Slopes = tuple[Tensor, Tensor, Tensor]
_LARGE = 1 << 14  # elements from which the faster statistics pay
_FAR = 1e6  # times the variance: the square of a mean whose rounding does not show in the variance
_HUGE = 1e36  # a variance in float32 of which no square has overflown


@dataclass(frozen=True)
class Normalization:
    """``(x - mean) / sqrt(var + eps) * weight + bias``: a :class:`Reduction` whose operands are x, weight and bias.

    Weight and bias have one value a k, or are None.
    """

    count: int  # elements of a group over all ranks
    view: tuple[int, ...]  # [B, K, rest]; rest may be several dims, which keeps the layout of channels last
    groups: int  # K = groups x members
    eps: float
    keeps_format: bool = False  # is the result to have the tile's memory format, as torch's own kernel leaves it?

    @property
    def members(self) -> int:
        """How many k share their statistics."""
        return self.view[1] // self.groups if self.groups else 1

    def by_group(self, values: Tensor) -> Tensor:
        """Sums over the members of each group, from one value a k in the last dim."""
        return values.view(*values.shape[:-1], self.groups, self.members).sum(-1)

    def moments(self, x: Tensor, *_: Tensor | None) -> Moments:
        """Those of each k, merged by group."""
        each = _moments_of_each_k(x.reshape(self.view))
        if self.groups == self.view[1]:
            return each
        mean, spread = merged(Moments(*(part.view(self.groups, self.members) for part in each)), dim=1)[1:]
        return Moments(self.by_group(each.elements), mean, spread)

    def result(self, mean: Tensor, variance: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel for given statistics, on the tile as it is seen."""
        if x.numel() == 0:
            return x.clone()
        dtype = _work_dtype(x)
        seen = _usual(x.reshape(self.view))
        moments = self._of_each_k(mean, dtype), self._of_each_k(variance, dtype)
        y = F.batch_norm(seen, *moments, _to(weight, dtype), _to(bias, dtype), False, 0.0, self.eps)
        if y.shape != x.shape:
            y = unsafe_view(y, x.shape)  # a plain reshape is a view, which nothing may change in place
        return y.contiguous(memory_format=memory_format_of(x)) if self.keeps_format else y

    def slopes(
        self, gradient: Tensor, mean: Tensor, variance: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Slopes]:
        """torch's kernel gives ``weight * rstd * dy``, sum(dy * xhat) and sum(dy)."""
        dtype = _work_dtype(x)
        ones = torch.ones(self.view[1], dtype=dtype, device=x.device)
        scale = ones if weight is None else weight.to(dtype)
        if x.numel() == 0:
            dx, slope, offset = torch.zeros_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
        else:
            seen, dy = _usual(x.reshape(self.view)), _usual(gradient.reshape(self.view))
            centre, spread, rstd = (self._of_each_k(v, dtype) for v in (mean, variance, (variance + self.eps).rsqrt()))
            dx, slope, offset = torch.ops.aten.native_batch_norm_backward(
                dy, seen, scale, centre, spread, centre, rstd, False, self.eps, [True, True, True]
            )
        # Float64, so that the sum over ranks adds no rounding of its own.
        sums = torch.stack((slope.double() * scale.double(), offset.double() * scale.double()))
        return self.by_group(sums), (dx, slope, offset)

    def gradients(
        self,
        means: Tensor,
        slopes: Slopes,
        mean: Tensor,
        variance: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From that the group's means are taken off."""
        dx, slope, offset = slopes
        if x.numel():
            # xhat * mean(dy w xhat) + mean(dy w), times rstd: once more an affine map of x by group.
            dtype, rstd = _work_dtype(x), (variance + self.eps).rsqrt()
            moments = self._of_each_k(mean, dtype), self._of_each_k(variance, dtype)
            affine = self._of_each_k(-means[0] * rstd, dtype), self._of_each_k(-means[1] * rstd, dtype)
            dx = dx + F.batch_norm(_usual(x.reshape(self.view)), *moments, *affine, False, 0.0, self.eps)
        return dx.reshape(x.shape), slope if weight is None else slope.to(weight.dtype), offset

    def composed(
        self, total: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The same map from torch functions, each of which can be differentiated again."""
        seen = x.reshape(self.view)
        shape = (1, self.view[1], *(1,) * (seen.ndim - 2))
        others = [d for d in range(seen.ndim) if d != 1]

        def group_mean(values: Tensor) -> Tensor:
            mean = total(self.by_group(values.double().sum(others))) / self.count
            return self._of_each_k(mean, seen.dtype).reshape(shape)

        # Two passes, the mean first: squares of uncentred values would lose digits.
        centred = seen - group_mean(seen)
        y = centred * (group_mean(centred * centred) + self.eps).rsqrt()
        if weight is not None:
            y = y * weight.reshape(shape)
        if bias is not None:
            y = y + bias.reshape(shape)
        return y.reshape(x.shape)

    def _of_each_k(self, per_group: Tensor, dtype: torch.dtype) -> Tensor:
        return per_group.repeat_interleave(self.members).to(dtype) if self.members > 1 else per_group.to(dtype)


def _moments_of_each_k(x: Tensor) -> Moments:
    """Count, mean and sum of squared deviations of each k in this tile, in float64; zeros for an empty tile."""
    dims = tuple(d for d in range(x.ndim) if d != 1)
    here = prod(x.shape[d] for d in dims)
    count = x.new_full((x.shape[1],), float(here), dtype=torch.float64)
    if x.numel() == 0:
        return Moments(count, torch.zeros_like(count), torch.zeros_like(count))
    mean, variance = _mean_and_variance(x.float() if x.dtype in NARROW else x, dims)
    return Moments(count, mean.double(), variance.double() * here)


def _mean_and_variance(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of each k, to the last digits of its dtype. Large tiles on CPUs take a kernel that is four times as fast."""
    # With channels last, and without elements behind the channels, that kernel adds up float32 in float32.
    adds_in_double = x.dtype == torch.float64 or (x.is_contiguous() and prod(x.shape[2:]) > 1)
    if x.device.type == "cpu" and x.numel() >= _LARGE and adds_in_double:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        # It subtracts a mean that is rounded, and squares in the tile's dtype.
        if bool(((mean * mean <= _FAR * variance) & (variance < _HUGE)).all()):
            return mean, variance
    variance, mean = torch.var_mean(x, dims, correction=0)
    return mean, variance


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in NARROW else x.dtype


def _usual(x: Tensor) -> Tensor:
    """``x`` with the strides that torch gives a new tensor of this shape and memory format.

    Reshaping may leave a dim of size one with any stride, and torch's CPU kernel of batch norm's backward then takes
    a tensor with channels last for a contiguous one.
    """
    form = memory_format_of(x)
    if not x.is_contiguous(memory_format=form):
        return x.contiguous() if x.device.type == "cpu" else x
    strides = _usual_strides(x.shape, form)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@lru_cache(maxsize=1024)
def _usual_strides(shape: torch.Size, form: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=form).stride()


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
