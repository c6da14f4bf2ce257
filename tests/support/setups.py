"""Random set-ups of the sweep: an operation, its input, and a cut of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ranges
import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

import halocline as hc

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DECONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_AVG = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
BLENDS = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}


@dataclass
class Setup:
    """``function(*tensors)`` with the first tensor cut; the words say what it was if it fails."""

    words: str
    function: Callable[..., Any]
    shapes: list[tuple[int, ...]]
    mesh: dict[str, int]
    cuts: dict[int, str]
    points: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def torch_is_wrong(self) -> bool:
        """torch's own instance norm gives wrong gradients for one sample with channels last on the CPU."""
        return self.words.startswith("instance") and self.shapes[0][0] == 1

    def tensors(self, dtype: torch.dtype, channels_last: bool = False) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes]
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(made[0].ndim)
        if channels_last and form is not None:
            made[0] = made[0].contiguous(memory_format=form)
        return made


def whole(draw: st.DrawFn, bounds: tuple[int, int]) -> int:
    return draw(st.integers(*bounds))


def each(draw: st.DrawFn, bounds: tuple[int, int], count: int) -> tuple[int, ...]:
    return tuple(whole(draw, bounds) for _ in range(count))


def sample(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    """Spatial dims, channels, and the input shape."""
    spatial = draw(st.sampled_from([1, 1, 2, 2, 3]))
    channels = whole(draw, ranges.CHANNELS)
    sizes = (whole(draw, ranges.SIZE), *each(draw, ranges.SECOND_SIZE, spatial - 1))
    return spatial, channels, (whole(draw, ranges.BATCH), channels, *sizes)


def placed(draw: st.DrawFn, words: str, function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> Setup:
    """Cut the first spatial dim; sometimes another spatial dim or the batch as well, sometimes at random points."""
    ranks = whole(draw, ranges.RANKS)
    mesh, cuts = {"first": ranks}, {2: "first"}
    other = draw(st.sampled_from([None, None, 0, len(shapes[0]) - 1]))
    if other is not None and other != 2 and ranks <= 2:
        mesh["second"], cuts[other] = 2, "second"
    points = {}
    if draw(st.booleans()):
        size = shapes[0][2]
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
        points[2] = (0, *inner, size)
    return Setup(f"{words} on {shapes[0]} cut {cuts} at {points} over {mesh}", function, shapes, mesh, cuts, points)


@st.composite
def convolution(draw: st.DrawFn) -> Setup:
    spatial, channels, shape = sample(draw)
    kernel, stride = each(draw, ranges.KERNEL, spatial), each(draw, ranges.STRIDE, spatial)
    dilation = each(draw, ranges.DILATION, spatial)
    padding: Any = each(draw, ranges.PADDING, spatial)
    if draw(st.integers(0, 5)) == 0:
        padding, stride = draw(st.sampled_from(["same", "valid"])), (1,) * spatial
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
    groups = channels if draw(st.booleans()) else 1
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode}
    words = f"conv{spatial}d kernel {kernel} {options}"

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        module = CONV[spatial](channels, 2 * channels, kernel, **options)
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    return placed(draw, words, function, [shape, (2 * channels, channels // groups, *kernel), (2 * channels,)])


@st.composite
def transposed(draw: st.DrawFn) -> Setup:
    spatial, channels, shape = sample(draw)
    shape = (*shape[:2], min(shape[2], 24), *shape[3:])
    kernel, stride = each(draw, ranges.KERNEL, spatial), each(draw, ranges.STRIDE, spatial)
    dilation, padding = each(draw, ranges.DILATION, spatial), each(draw, (0, 4), spatial)
    extra = tuple(whole(draw, (0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    groups = channels if draw(st.booleans()) else 1
    options = {"stride": stride, "padding": padding, "output_padding": extra, "groups": groups, "dilation": dilation}
    words = f"conv_transpose{spatial}d kernel {kernel} {options}"

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return DECONV[spatial](x, weight, bias, **options)

    return placed(draw, words, function, [shape, (channels, 2, *kernel), (2 * groups,)])


@st.composite
def pool(draw: st.DrawFn) -> Setup:
    spatial, _, shape = sample(draw)
    kernel, stride = each(draw, ranges.KERNEL, spatial), each(draw, ranges.STRIDE, spatial)
    padding = tuple(whole(draw, (0, k // 2)) for k in kernel)
    options: dict[str, Any] = {"stride": stride, "padding": padding, "ceil_mode": draw(st.booleans())}
    largest = draw(st.booleans())
    if largest:
        options["dilation"] = each(draw, ranges.DILATION, spatial)
    else:
        options["count_include_pad"] = draw(st.booleans())
    kind = MAX if largest else AVG
    words = f"{'max' if largest else 'avg'}_pool{spatial}d kernel {kernel} {options}"
    return placed(draw, words, lambda x: kind[spatial](x, kernel, **options), [shape])


@st.composite
def adaptive_pool(draw: st.DrawFn) -> Setup:
    spatial, _, shape = sample(draw)
    out = tuple(whole(draw, (1, max(1, size))) for size in shape[2:])
    kind = draw(st.sampled_from([ADAPTIVE_AVG, ADAPTIVE_MAX]))
    return placed(draw, f"{kind[spatial].__name__} to {out}", lambda x: kind[spatial](x, out), [shape])


@st.composite
def pad(draw: st.DrawFn) -> Setup:
    _, _, shape = sample(draw)
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    lowest = ranges.PAD[0] if mode == "constant" else 0
    amounts = []
    for size in reversed(shape[2:]):
        most = {"reflect": size - 1, "circular": size}.get(mode, ranges.PAD[1])
        amounts += list(each(draw, (lowest, max(0, min(most, ranges.PAD[1]))), 2))
    value = {"value": 0.5} if mode == "constant" else {}
    words = f"pad {amounts} {mode}"
    return placed(draw, words, lambda x: F.pad(x, amounts, mode=mode, **value), [shape])


@st.composite
def norm(draw: st.DrawFn) -> Setup:
    _, channels, shape = sample(draw)
    kind = draw(st.sampled_from(["batch", "instance", "group", "layer", "layer over channels"]))
    if kind == "layer":
        affine = shape[2:]
    elif kind == "layer over channels":
        affine = shape[1:]
    else:
        affine = (channels,)
    # One element by itself is its own mean: what torch leaves of it in float32 is rounding, and so is the gradient.
    groups = {"group": channels if channels % 2 else channels // 2, "layer": channels}.get(kind, 1)
    assume(prod(shape[1:]) > groups)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        if kind == "batch":
            running = torch.zeros(channels, dtype=weight.dtype), torch.ones(channels, dtype=weight.dtype)
            return F.batch_norm(x, *running, weight, bias, True, 0.1, 1e-2), *running
        if kind == "instance":
            return F.instance_norm(x, None, None, weight, bias, eps=1e-2)
        if kind == "group":
            return F.group_norm(x, channels if channels % 2 else channels // 2, weight, bias, 1e-2)
        return F.layer_norm(x, affine, weight, bias, 1e-2)

    return placed(draw, f"{kind} norm", function, [shape, tuple(affine), tuple(affine)])


@st.composite
def interpolation(draw: st.DrawFn) -> Setup:
    spatial, _, shape = sample(draw)
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "area", *2 * BLENDS[spatial]]))
    options: dict[str, Any] = {"mode": mode}
    if mode in BLENDS[spatial]:
        options["align_corners"] = draw(st.booleans())
        options["antialias"] = spatial == 2 and draw(st.integers(0, 2)) == 0
    if draw(st.booleans()):
        options["size"] = (whole(draw, ranges.RESIZED), *each(draw, ranges.SECOND_SIZE, spatial - 1))
    else:
        factors = tuple(draw(st.sampled_from(ranges.FACTORS)) for _ in range(spatial))
        options["scale_factor"] = draw(st.sampled_from([factors, factors[0]]))
        options["recompute_scale_factor"] = draw(st.sampled_from([None, True]))
    return placed(draw, f"interpolate {options}", lambda x: F.interpolate(x, **options), [shape])


@st.composite
def pool_indices(draw: st.DrawFn) -> Setup:
    spatial, _, shape = sample(draw)
    kernel, stride = each(draw, ranges.KERNEL, spatial), each(draw, ranges.STRIDE, spatial)
    padding = tuple(whole(draw, (0, k // 2)) for k in kernel)
    ceil_mode, dilation = draw(st.booleans()), each(draw, ranges.DILATION, spatial)
    out = tuple(whole(draw, (1, max(1, size))) for size in shape[2:])
    kind = draw(st.sampled_from(["max_pool", "adaptive_max_pool", "max_unpool"]))

    def function(x: torch.Tensor) -> Any:
        if kind == "adaptive_max_pool":
            return ADAPTIVE_MAX[spatial](x, out, return_indices=True)
        if kind == "max_pool":
            return MAX[spatial](x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
        values, indices = MAX[spatial](x, kernel, stride, padding, return_indices=True)
        return UNPOOL[spatial](values, indices, kernel, stride, padding, output_size=x.shape[2:])

    words = f"{kind}{spatial}d with indices, kernel {kernel} {stride} {padding} {dilation} {ceil_mode} to {out}"
    return placed(draw, words, function, [shape])


@st.composite
def grid_sample(draw: st.DrawFn) -> Setup:
    """The sample is cut and the grid whole, or the other way round, or both are cut: a grid made of the sample."""
    spatial = draw(st.sampled_from([2, 3]))
    batch, channels, sizes = whole(draw, ranges.BATCH), whole(draw, ranges.CHANNELS), each(draw, (2, 9), spatial)
    options = {
        "mode": draw(st.sampled_from(["bilinear", "nearest", *["bicubic"] * (spatial == 2)])),
        "padding_mode": draw(st.sampled_from(["zeros", "border", "reflection"])),
        "align_corners": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["sample", "grid", "both"]))
    sample, grid = (batch, channels, *sizes), (batch, *each(draw, (1, 9), spatial), spatial)

    def function(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if kind == "grid":
            return F.grid_sample(second, 0.6 * first, **options)
        if kind == "sample":
            return F.grid_sample(first, 0.6 * second, **options)
        base = F.affine_grid(second, first.shape, align_corners=options["align_corners"])
        return F.grid_sample(first, 0.5 * base + 0.1 * first[:, :1].movedim(1, -1), **options)

    shapes = {"sample": [sample, grid], "grid": [grid, sample], "both": [sample, (batch, spatial, spatial + 1)]}
    return placed(draw, f"grid_sample {options} with a cut {kind} and {shapes[kind]}", function, shapes[kind])


@st.composite
def dropout(draw: st.DrawFn) -> Setup:
    """Both sides draw by the same generator: what is kept where must be the same, and the gradient with it."""
    spatial, _, shape = sample(draw)
    features = {1: F.dropout1d, 2: F.dropout2d, 3: F.dropout3d}[spatial]
    kinds = [F.dropout, features, F.alpha_dropout, F.feature_alpha_dropout]
    kind, p = draw(st.sampled_from(kinds)), draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    inplace, noise = draw(st.booleans()), draw(st.sampled_from([torch.rand_like, torch.randn_like]))

    def function(x: torch.Tensor) -> torch.Tensor:
        with hc.random.reproducible(3):
            return kind(kind(x + noise(x), p, True, inplace) * 2, 0.3, True)

    return placed(draw, f"{kind.__name__} p={p} inplace={inplace} after {noise.__name__}", function, [shape])


FAMILIES = {
    "convolution": convolution,
    "transposed": transposed,
    "pool": pool,
    "adaptive pool": adaptive_pool,
    "pad": pad,
    "norm": norm,
    "interpolation": interpolation,
    "pool indices": pool_indices,
    "grid_sample": grid_sample,
    "dropout": dropout,
}
