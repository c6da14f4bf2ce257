"""Pools: windows whose divisor and whose choice among equals are those of the whole sample.

A window needs its neighbours' rows as a convolution does. What differs is the edge: an average divides by the elements
of the whole sample that its window meets, and a maximum must choose among equals as torch does, which depends on where
padding lies. Adaptive pools with even windows are ordinary ones; the others go a dim at a time. A pool of everything
is a reduction over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShardingError
from ...geometry import Access, Adaptive, Interval, Same, Window
from ...geometry.access import Pieces
from ...tensor import ShardedTensor, here
from ..recipe import Link, Operand, Read, Recipe, Work, pair
from ..table import composite, run_rule
from .pad import shape_from_torch

Pool = Callable[..., Tensor]
_NARROW = (torch.half, torch.bfloat16)


def windows_of(spatial: int, kernel: Any, stride: Any, padding: Any = 0, dilation: Any = 1) -> list[Window]:
    sizes = pair(kernel, spatial)
    given = stride is not None and not (isinstance(stride, Sequence) and len(stride) == 0)
    strides = pair(stride, spatial) if given else sizes
    return [Window(*w) for w in zip(sizes, strides, pair(dilation, spatial), pair(padding, spatial), strict=True)]


def _recipe(
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


def _max_windows(
    pool: Pool, input: Operand, shape: tuple[int, ...], windows: list[Window], ceil_mode: bool = False
) -> Recipe:
    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        tile, options = padded_call(work, tile, input, windows, ceil_mode)
        return own_windows(pool(tile, *options), work.box[input.ndim - len(windows) :])

    return _recipe(input, shape, windows, local)


def own_windows(tensor: Tensor, box: tuple[Interval, ...]) -> Tensor:
    """torch pads both sides alike, which can give windows past the box: they are another rank's, or no one's."""
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
    def describe(input: Operand, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Recipe:
        shape = shape_from_torch(function, input, kernel, stride, padding, dilation, ceil_mode)
        windows = windows_of(spatial, kernel, stride, padding, dilation)
        check_not_empty(function, input, windows)
        return _max_windows(function, input, shape, windows, ceil_mode)

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
    return isinstance(input, ShardedTensor) and input.sharding.cuts[dim] is not None


def _global(input: Tensor, windows: list[Window]) -> bool:
    """One window over all of a sample that is cut: reduce it where it lies, rather than bring it to one rank."""
    dims = range(input.ndim - len(windows), input.ndim)
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
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    if len(windows) == 1:  # as torch does it; only the 2-D form takes a divisor
        flat = tile.unsqueeze(-2), (1, *kernel), (1, *stride), (0, *padding)
        return F.avg_pool2d(*flat, ceil_mode, include_pad, divisor).squeeze(-2)
    pool = F.avg_pool2d if len(windows) == 2 else F.avg_pool3d
    return pool(tile, kernel, stride, padding, ceil_mode, include_pad, divisor)


def _average_windows(
    input: Operand,
    shape: tuple[int, ...],
    windows: list[Window],
    ceil_mode: bool = False,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Recipe:
    first = input.ndim - len(windows)
    sizes = input.shape[first:]

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        native = [work.native(input, first + i) for i in range(len(windows))]
        padding = [w.padding if n else 0 for w, n in zip(windows, native, strict=True)]
        if all(native) or divisor is not None:
            return _average(tile, windows, padding, ceil_mode, include_pad, divisor)
        counts = [_counts(*each, include_pad) for each in zip(windows, work.box[first:], sizes, strict=True)]
        if all(min(count) == max(count) for count in counts):
            common = math.prod(count[0] for count in counts)
            return _average(tile, windows, padding, ceil_mode, include_pad, common)
        # In half precision a bare sum could leave the range.
        base = math.prod(w.kernel for w in windows) if tile.dtype in _NARROW else 1
        return _divided(_average(tile, windows, padding, ceil_mode, include_pad, base), counts, base)

    return _recipe(input, shape, windows, local, fill=0.0)


def _divided(sums: Tensor, counts: list[list[int]], base: int) -> Tensor:
    """Window sums (over ``base``) by the outer product of the counts along each dim."""
    total = torch.ones((), dtype=torch.int64, device=sums.device)
    for count in counts:
        total = total.unsqueeze(-1) * torch.tensor(count, device=sums.device)
    if sums.dtype in _NARROW:
        return (sums / (total / base)).to(sums.dtype)
    return torch.div(sums, total, rounding_mode=None if sums.is_floating_point() else "trunc")


def _avg_pool(spatial: int, function: Any) -> Pool:
    adaptive = getattr(F, f"adaptive_avg_pool{spatial}d")

    def describe(
        input: Operand, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include_pad: bool, *divisor: int | None
    ) -> Recipe:
        shape = shape_from_torch(function, input, kernel, stride, padding, ceil_mode, include_pad, *divisor)
        windows = windows_of(spatial, kernel, stride, padding)
        return _average_windows(input, shape, windows, ceil_mode, include_pad, *divisor)

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
        if all(work.native(input, first + i) for i in range(len(sizes))):
            return function(tile, sizes)
        for dim in reversed(range(first, input.ndim)):
            access, box = accesses[dim - first], work.box[dim]
            (need,) = access.need(box)
            if access.in_size != access.out_size:
                tile = along(tile, dim, [access.window(i).shift(-need.lo) for i in range(box.lo, box.hi)])
        return tile

    return _recipe(input, shape, accesses, local)


def side_by_side(tile: Tensor, dim: int, windows: list[Interval]) -> tuple[Tensor, int]:
    """Windows of one width one after the other, in a view of three dims; short ones repeat their last element."""
    width = max(window.size for window in windows)
    places = [min(window.lo + t, window.hi - 1) for window in windows for t in range(width)]
    if places != list(range(tile.shape[dim])):
        tile = tile.index_select(dim, torch.tensor(places, device=tile.device))
    return tile.reshape(math.prod(tile.shape[:dim]), len(places), math.prod(tile.shape[dim + 1 :])), width


def _max_along(tile: Tensor, dim: int, windows: list[Interval]) -> Tensor:
    flat, width = side_by_side(tile, dim, windows)
    return F.max_pool2d(flat, (width, 1)).reshape(*tile.shape[:dim], len(windows), *tile.shape[dim + 1 :])


def _mean_along(tile: Tensor, dim: int, windows: list[Interval]) -> Tensor:
    if tile.dtype in _NARROW:
        return _mean_along(tile.float(), dim, windows).to(tile.dtype)
    flat, width = side_by_side(tile, dim, windows)
    counts = torch.tensor([window.size for window in windows], device=tile.device)
    if any(window.size < width for window in windows):
        repeated = torch.arange(width, device=tile.device) >= counts.unsqueeze(-1)
        flat = flat.masked_fill(repeated.reshape(-1, 1), 0)
    mean = F.avg_pool2d(flat, (width, 1), divisor_override=1) / counts.unsqueeze(-1)
    return mean.reshape(*tile.shape[:dim], len(windows), *tile.shape[dim + 1 :])


def _adaptive_avg_pool(spatial: int, function: Any) -> Pool:
    def describe(input: Operand, sizes: tuple[int, ...]) -> Recipe:
        shape = shape_from_torch(function, input, sizes)
        windows = _adaptive_windows(input, sizes)
        if windows and input.dtype not in _NARROW:  # torch averages those in 3-D only where the pool is adaptive
            return _average_windows(input, shape, windows)
        return _ragged(function, input, shape, sizes, _mean_along)

    def run(input: Tensor, output_size: Any) -> Tensor:
        input = _as_autocast_would(function, input)
        sizes = out_sizes(input, spatial, output_size)
        dims = range(input.ndim - len(sizes), input.ndim)
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
    def describe(input: Operand, sizes: tuple[int, ...]) -> Recipe:
        shape = shape_from_torch(function, input, sizes)
        windows = _adaptive_windows(input, sizes)
        if windows:
            recipe = _max_windows(pool, input, shape, windows)
        else:
            recipe = _ragged(function, input, shape, sizes, _max_along)
        return replace(recipe, uncut=frozenset(d for d, m in enumerate(shape) if m == 1 and input.shape[d] > 1))

    def run(input: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
        sizes = out_sizes(input, spatial, output_size)
        dims = range(input.ndim - len(sizes), input.ndim)
        if not any(m == 1 and has_several_a_tile(input, d) for d, m in zip(dims, sizes, strict=True)):
            return run_rule(function, describe, (input, sizes), {})
        x = input
        for d, m in reversed(list(zip(dims, sizes, strict=True))):
            if m == 1 and has_several_a_tile(x, d):
                x = run_rule(function, _tile_maximum, (x, d, tile_points(x, d)), {})
            if x.shape[d] != m:
                x = function(x, [m if other == d else x.shape[other] for other in dims])
        return x

    return run


def tile_points(input: Any, dim: int) -> tuple[int, ...]:
    """The cut points, without those of tiles that hold nothing."""
    return tuple(sorted(set(input.sharding.cuts[dim].partition.points)))


def has_several_a_tile(input: Tensor, dim: int) -> bool:
    """Cut, with more than one element a tile: a maximum within the tile comes before any movement."""
    return is_cut(input, dim) and len(tile_points(input, dim)) <= input.shape[dim]


def _tile_maximum(input: Operand, dim: int, points: tuple[int, ...]) -> Recipe:
    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        box = work.box[dim]
        pieces = [Interval(points[i], points[i + 1]) for i in range(box.lo, box.hi)]
        return _max_along(tile, dim, [piece.shift(-points[box.lo]) for piece in pieces])

    shape = (*input.shape[:dim], len(points) - 1, *input.shape[dim + 1 :])
    accesses = [Pieces(points) if d == dim else Same() for d in range(input.ndim)]
    return _recipe(input, shape, accesses, local)


for _spatial in (1, 2, 3):
    _max, _adaptive_max = getattr(torch, f"max_pool{_spatial}d"), getattr(F, f"adaptive_max_pool{_spatial}d")
    _avg, _adaptive_avg = getattr(F, f"avg_pool{_spatial}d"), getattr(F, f"adaptive_avg_pool{_spatial}d")
    composite(getattr(F, f"max_pool{_spatial}d"), _max, family="pool")(
        max_pool(_spatial, _max, _max_rule(_spatial, _max))
    )
    composite(_avg, family="pool")(_avg_pool(_spatial, _avg))
    composite(getattr(F, f"lp_pool{_spatial}d"), family="pool")(_lp_pool(_spatial))
    composite(_adaptive_avg, family="pool")(_adaptive_avg_pool(_spatial, _adaptive_avg))
    composite(_adaptive_max, family="pool")(_adaptive_max_pool(_spatial, _max, _adaptive_max))
