"""Pools: windows whose divisor and whose choice among equals are those of the whole sample.

A window needs its neighbours' rows as a convolution does. What differs is the edge: an average divides by the elements
of the whole sample that its window meets, and a maximum must choose among equals as torch does, which depends on where
padding lies. Adaptive pools with even windows are ordinary ones; the others go a dim at a time. A pool of everything
is a reduction over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShardingError
from ...geometry import Access, Interval, Window
from ...tensor import ShardedTensor, here
from ..recipe import Link, Operand, Read, Recipe, Work, pair
from ..table import composite, run_rule
from .pad import shape_from_torch

Pool = Callable[..., Tensor]
NARROW = (torch.half, torch.bfloat16)


def windows_of(spatial: int, kernel: Any, stride: Any, padding: Any = 0, dilation: Any = 1) -> list[Window]:
    """One window for each spatial dim, from arguments as torch takes them; without a stride, the kernel's size."""
    sizes = pair(kernel, spatial)
    # torch passes an empty list for a stride that was left out.
    given = stride is not None and not (isinstance(stride, Sequence) and len(stride) == 0)
    strides = pair(stride, spatial) if given else sizes
    return [Window(*w) for w in zip(sizes, strides, pair(dilation, spatial), pair(padding, spatial), strict=True)]


def pool_recipe(
    input: Operand, shape: tuple[int, ...], accesses: Sequence[Access], local: Pool, fill: float | None = None
) -> Recipe:
    """Batch and channels one to one, each of the last dims by its access; without ``fill``, within the sample."""
    lead = input.ndim - len(accesses)
    return Recipe(
        space=shape,
        reads=(Read(input, (*map(Link, range(lead)), *(Link(lead + i, a, fill) for i, a in enumerate(accesses)))),),
        local=local,
        box_local=True,
    )


def padded_call(
    work: Work, tile: Tensor, input: Operand, windows: list[Window], ceil_mode: bool
) -> tuple[Tensor, tuple[Any, ...]]:
    """The tile, and torch's options, that give the maxima of this rank's windows, and perhaps of some past them.

    Before the sample torch pads, which leaves the choice among equals to it; after it stands what loses every tie.
    """
    first = input.ndim - len(windows)
    native = [work.native(input, first + i) for i in range(len(windows))]
    before, after = [], []
    for window, uncut, box, size in zip(windows, native, work.box[first:], input.shape[first:], strict=True):
        (need,) = window.need(box)
        left, right = max(0, -need.lo), max(0, need.hi - size)  # how far the windows reach out of the sample
        before.append(window.padding if uncut else left)
        after.append(0 if uncut else max(0, right - left))
    if any(after):
        lowest = float("-inf") if tile.is_floating_point() else torch.iinfo(tile.dtype).min
        tile = F.pad(tile, [a for size in reversed(after) for a in (0, size)], value=lowest)
    steps = [w.stride for w in windows], before, [w.dilation for w in windows]
    return tile, ([w.kernel for w in windows], *steps, ceil_mode)


def max_windows(
    pool: Pool, input: Operand, shape: tuple[int, ...], windows: list[Window], ceil_mode: bool = False
) -> Recipe:
    """The recipe of a maximum pool with these windows."""

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        tile, options = padded_call(work, tile, input, windows, ceil_mode)
        return own_windows(pool(tile, *options), work.box[input.ndim - len(windows) :])

    return pool_recipe(input, shape, windows, local)


def own_windows(tensor: Tensor, box: tuple[Interval, ...]) -> Tensor:
    """torch pads both sides alike, which can give windows past the box: they belong to another rank, or to none."""
    for dim, interval in enumerate(box, tensor.ndim - len(box)):
        if tensor.shape[dim] != interval.size:
            tensor = tensor.narrow(dim, 0, interval.size)
    return tensor


Describe = Callable[..., Recipe]


def max_pool(spatial: int, function: Any, describe: Describe, **options: Any) -> Callable[..., Any]:
    """The composite of a maximum pool, with or without indices; ``options`` go to the adaptive pool of one window."""
    adaptive = getattr(F, f"adaptive_max_pool{spatial}d")

    def run(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,  # the name of the function says so too
    ) -> Any:
        if _global(input, windows_of(spatial, kernel_size, stride, padding, dilation)):
            return adaptive(input, 1, **options)
        return run_rule(function, describe, (input, kernel_size, stride, padding, dilation, ceil_mode), {})

    return run


def _max_rule(spatial: int, function: Any) -> Describe:
    """The rule of ``max_pool*d`` without indices."""

    def describe(input: Operand, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Recipe:
        shape = shape_from_torch(function, input, kernel, stride, padding, dilation, ceil_mode)
        windows = windows_of(spatial, kernel, stride, padding, dilation)
        check_not_empty(function, input, windows)
        return max_windows(function, input, shape, windows, ceil_mode)

    return describe


def check_not_empty(function: Any, input: Operand, windows: list[Window]) -> None:
    """With a dilation wider than the sample a window can step over it; torch then writes past the gradient's end."""
    for size, w in zip(input.shape[-len(windows) :], windows, strict=True):
        if any(start % w.dilation >= size for start in range(-w.padding, 0, w.stride)):
            raise ShardingError(
                f"{function.__name__} in {here()}: a window of dilation {w.dilation} steps over all {size} elements "
                f"of a dim of {list(input.shape)} and has no maximum; dilate or pad less"
            )


def is_cut(input: Tensor, dim: int) -> bool:
    """Is this dim of the tensor cut over ranks?"""
    return isinstance(input, ShardedTensor) and input.sharding.cuts[dim] is not None


def _global(input: Tensor, windows: list[Window]) -> bool:
    """One window over all of a sample that is cut: reduce it where it lies, rather than bring it to one rank."""
    dims = range(input.ndim - len(windows), input.ndim)
    # One window, without padding or dilation, that covers the dim.
    covered = all(w == Window(input.shape[d], w.stride) for d, w in zip(dims, windows, strict=True))
    return covered and any(is_cut(input, d) and input.shape[d] > 1 for d in dims)


def _counts(window: Window, box: Interval, size: int, include_pad: bool) -> list[int]:
    """How many elements torch counts in each window of a box: with padding, but never what ceil_mode adds."""
    starts = [window.stride * i - window.padding for i in range(box.lo, box.hi)]
    if include_pad:
        return [min(start + window.kernel, size + window.padding) - start for start in starts]
    return [min(start + window.kernel, size) - max(start, 0) for start in starts]


def _average(
    tile: Tensor, windows: list[Window], padding: list[int], ceil_mode: bool, include_pad: bool, divisor: int | None
) -> Tensor:
    """torch's average pool for one, two or three dims, with the same arguments for all."""
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    if len(windows) == 1:  # as torch does it; only the 2-D form takes a divisor
        flat = tile.unsqueeze(-2), (1, *kernel), (1, *stride), (0, *padding)
        return F.avg_pool2d(*flat, ceil_mode, include_pad, divisor).squeeze(-2)
    pool = F.avg_pool2d if len(windows) == 2 else F.avg_pool3d
    return pool(tile, kernel, stride, padding, ceil_mode, include_pad, divisor)


def average_windows(
    input: Operand,
    shape: tuple[int, ...],
    windows: list[Window],
    ceil_mode: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Recipe:
    """The recipe of an average pool with these windows; the divisor is that of the whole sample."""
    first = input.ndim - len(windows)
    sizes = input.shape[first:]

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        """torch's own call where its divisor is right; else sums of windows, divided by global counts."""
        native = [work.native(input, first + i) for i in range(len(windows))]
        padding = [w.padding if n else 0 for w, n in zip(windows, native, strict=True)]
        if all(native) or divisor is not None:
            return _average(tile, windows, padding, ceil_mode, include_pad, divisor)
        # torch would count the fetched halo, or the edge of the tile, as part of the sample.
        counts = [_counts(*each, include_pad) for each in zip(windows, work.box[first:], sizes, strict=True)]
        # Away from the edges all windows count alike: one divisor for torch's kernel.
        if all(min(count) == max(count) for count in counts):
            common = math.prod(count[0] for count in counts)
            return _average(tile, windows, padding, ceil_mode, include_pad, common)
        # In half precision a bare sum could leave the range.
        base = math.prod(w.kernel for w in windows) if tile.dtype in NARROW else 1
        return _divided(_average(tile, windows, padding, ceil_mode, include_pad, base), counts, base)

    return pool_recipe(input, shape, windows, local, fill=0.0)


def _divided(sums: Tensor, counts: list[list[int]], base: int) -> Tensor:
    """Window sums (over ``base``) by the outer product of the counts along each dim."""
    total = torch.ones((), dtype=torch.int64, device=sums.device)
    for count in counts:
        total = total.unsqueeze(-1) * torch.tensor(count, device=sums.device)
    if sums.dtype in NARROW:
        return (sums / (total / base)).to(sums.dtype)
    return torch.div(sums, total, rounding_mode=None if sums.is_floating_point() else "trunc")


def _avg_pool(spatial: int, function: Any) -> Pool:
    """The composite and rule of ``avg_pool*d``."""
    adaptive = getattr(F, f"adaptive_avg_pool{spatial}d")

    def describe(
        input: Operand, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include_pad: bool, *divisor: int | None
    ) -> Recipe:
        shape = shape_from_torch(function, input, kernel, stride, padding, ceil_mode, include_pad, *divisor)
        windows = windows_of(spatial, kernel, stride, padding)
        return average_windows(input, shape, windows, ceil_mode, include_pad, *divisor)

    def run(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *divisor: int | None,
        divisor_override: int | None = None,
    ) -> Tensor:
        override = divisor or ((divisor_override,) if divisor_override is not None else ())
        if override in ((), (None,)) and _global(input, windows_of(spatial, kernel_size, stride, padding)):
            return adaptive(input, 1)
        stride = () if stride is None else stride
        args = (input, kernel_size, stride, padding, ceil_mode, count_include_pad, *override)
        return run_rule(function, describe, args, {})

    return run


#: Newer releases of torch take the maximum for an infinite norm, older ones the formula all the same.
_INFINITE_NORMS = F.lp_pool1d(torch.tensor([[-2.0, 1.0]]), math.inf, 2).item() == 2.0


def _lp_pool(spatial: int) -> Pool:
    """As torch composes it."""
    max_pool, avg_pool = getattr(F, f"max_pool{spatial}d"), getattr(F, f"avg_pool{spatial}d")

    def run(input: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Tensor:
        if math.isinf(norm_type) and _INFINITE_NORMS:
            sign = math.copysign(1, norm_type)
            return sign * max_pool(sign * input.abs(), kernel_size, stride, 0, 1, ceil_mode)
        stride = () if stride is None else stride
        mean = avg_pool(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        volume = math.prod(pair(kernel_size, spatial))
        return (mean.sign() * F.relu(mean.abs())).mul(volume).pow(1.0 / norm_type)

    return run


for _spatial in (1, 2, 3):
    _max, _avg = getattr(torch, f"max_pool{_spatial}d"), getattr(F, f"avg_pool{_spatial}d")
    composite(getattr(F, f"max_pool{_spatial}d"), _max, family="pool")(
        max_pool(_spatial, _max, _max_rule(_spatial, _max))
    )
    composite(_avg, family="pool")(_avg_pool(_spatial, _avg))
    composite(getattr(F, f"lp_pool{_spatial}d"), family="pool")(_lp_pool(_spatial))
