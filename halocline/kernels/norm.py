"""Norms whose operands are too large for torch's fast kernels, or too few channels or groups to keep a GPU busy.

Batch norm's backward loses its fast kernel at 2^31 elements: here it goes in slabs, sums first and then the gradient.
Its forward, and that of group norm, give each channel or group to one block of threads where the tensor is contiguous:
with 32 channels of 64 million voxels, 32 blocks on a card that has room for thousands. The same numbers, laid out so
that torch reduces them as it does any other tensor, take a tenth of the time.
"""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

from ..geometry import Box, chunks_of, shape_of, whole
from .layout import CHANNELS_LAST, span
from .parts import at
from .replace import Original, kernel
from .sizes import sizes

_MANY = 256  # channels or groups that keep a card busy, one block of threads each
_TEMPORARY = 1 << 26  # elements of intermediate results in float32


def _few_channels(x: Tensor, *rest: Any) -> bool:
    """Too few channels to keep a GPU busy, in a large contiguous tensor."""
    few = x.dim() > 2 and x.shape[1] < _MANY and x.is_contiguous()
    return few and x.numel() > sizes(x.device, "norm").whole


@kernel("native_batch_norm", _few_channels)
def native_batch_norm(original: Original, x: Tensor, *rest: Any) -> Any:
    """Each channel is reduced by the whole card."""
    y, *statistics = original(_spread(x), *rest)
    return _gathered(y, x), *statistics


def _spread(x: Tensor) -> Tensor:
    """The same tensor with its rows across: no longer contiguous, and so no longer one block for each channel."""
    elements = prod(x.shape[2:])
    rows = next(n for n in range(isqrt(elements), 0, -1) if elements % n == 0)
    return x.view(*x.shape[:2], rows, elements // rows).transpose(2, 3)


def _gathered(y: Tensor, like: Tensor) -> Tensor:
    return y.transpose(2, 3).contiguous().view(like.shape)


def _few_groups(
    x: Tensor, weight: Any, bias: Any, batch: int, channels: int, elements: int, groups: int, _: Any
) -> bool:
    """Too few groups to keep a GPU busy, in a large contiguous tensor."""
    few = batch * groups < _MANY and x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
    return few and x.numel() > sizes(x.device, "norm").whole


@kernel("native_group_norm", _few_groups)
def native_group_norm(
    original: Original,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    elements: int,
    groups: int,
    eps: float,
) -> Any:
    """Statistics of groups as of channels, then one scale and shift for each channel: batch norm's kernels."""
    members = channels // groups
    mean, variance = torch.batch_norm_update_stats(_spread(x.view(1, batch * groups, -1)), None, None, 0.0)
    each = (moment.repeat_interleave(members) for moment in (mean, variance))
    scales = (None if p is None else p.to(x.dtype).repeat(batch) for p in (weight, bias))
    seen = x.view(1, batch * channels, -1)
    y = original.of("native_batch_norm")(seen, *scales, *each, False, 0.0, eps)[0]
    moments = (moment.view(batch, groups) for moment in (mean, (variance + eps).rsqrt()))
    return y.view(x.shape), *moments


def _large_backward(gradient: Tensor, x: Tensor, *rest: Any) -> bool:
    """On a GPU only with channels last: else torch's way is no slower than this."""
    fast = x.dim() > 2 and (not x.is_cuda or _has_kernel(x))
    return fast and max(x.numel(), span(gradient)) > sizes(x.device, "norm backward").whole


@kernel("native_batch_norm_backward", _large_backward)
def native_batch_norm_backward(
    original: Original, gradient: Tensor, x: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    """In slabs: the sums of all slabs first, then each slab's gradient."""
    running_mean, running_var, saved_mean, saved_rstd, train, eps, wanted = rest
    mean, rstd = (saved_mean, saved_rstd) if train else (running_mean, (running_var + eps).rsqrt())
    wide = torch.float32 if x.dtype in (torch.half, torch.bfloat16) else x.dtype
    mean, rstd = mean.to(wide), rstd.to(wide)
    return _backward(gradient, x, weight, mean, rstd, train, wanted)


@kernel("cudnn_batch_norm_backward", lambda x, gradient, *rest: _large_backward(gradient, x))
def cudnn_batch_norm_backward(original: Original, x: Tensor, gradient: Tensor, weight: Tensor, *rest: Any) -> Any:
    """The same, for cuDNN's order of arguments."""
    _, _, mean, rstd, _, _ = rest
    return _backward(gradient, x, weight, mean, rstd, True, [True] * 3)


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, train: bool, wanted: Any
) -> tuple[Tensor | None, ...]:
    """Gradients by input, weight and bias, as far as they are ``wanted``."""
    boxes = _slabs(x, sizes(x.device, "norm backward").chunk)
    # First pass: the gradient of each element needs sums over all slabs.
    parts = [_sums(at(gradient, box), at(x, box), mean, rstd) for box in boxes]
    offset, slope = (torch.stack(some).sum(0) for some in zip(*parts, strict=True))
    of_x = None
    if wanted[0]:
        of_x = torch.empty_like(x)
        # With given statistics the mean does not depend on the input.
        share = x.shape[1] / x.numel() if train else 0.0
        for box in boxes:
            slopes = _slopes(at(gradient, box), at(x, box), mean, rstd, weight, share * offset, share * slope)
            at(of_x, box).copy_(slopes)
    dtype = x.dtype if weight is None else weight.dtype
    return of_x, (slope * rstd).to(dtype) if wanted[1] else None, offset.to(dtype) if wanted[2] else None


def _slabs(x: Tensor, most: int) -> list[Box]:
    """Small ones where intermediate results are as large as they are."""
    most = most if _has_kernel(x) else min(most, _TEMPORARY)
    box = tuple(map(whole, (x.shape[0], *x.shape[2:])))
    return chunks_of(box, range(len(box)), lambda part: x.shape[1] * prod(shape_of(part)), most)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dim() in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])


def _across(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (like.dim() - 2))


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Of the gradient, and of the gradient times the distance from the mean, by channel."""
    if _has_kernel(x):
        laid = gradient.contiguous(memory_format=CHANNELS_LAST[x.dim()])
        return torch.batch_norm_backward_reduce(laid, x, mean, rstd, None, True, False, False)[:2]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = gradient.to(mean.dtype)
    return wide.sum(dims), (x - _across(mean, x)).mul_(wide).sum(dims)


def _slopes(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, offset: Tensor, slope: Tensor
) -> Tensor:
    """The gradient by the input, given the means over all of :func:`_sums`."""
    if _has_kernel(x):
        laid, one = (
            gradient.contiguous(memory_format=CHANNELS_LAST[x.dim()]),
            torch.ones(1, dtype=torch.int32, device=x.device),
        )
        return torch.batch_norm_backward_elemt(laid, x, mean, rstd, weight, offset, slope, one)
    scale = rstd if weight is None else rstd * weight
    centred = (x - _across(mean, x)).mul_(_across(-slope * rstd * rstd, x))
    return centred.add_(gradient).sub_(_across(offset, x)).mul_(_across(scale, x))
