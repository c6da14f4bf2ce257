"""Convolutions and transposed convolutions: windows that reach past a tile's edge into its neighbours'.

The rule says which window each output needs; the executor decides whether the halo is glued to the tile or, for large
tiles, added by linearity (``convolve.py``). Along a dim that is not cut torch pads by itself, as on one rank.

Channels are those of a matrix product: cut output channels stay cut, cut input channels are summed over the ranks.
Groups are cut between groups, and what lies across a cut moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShardingError
from ...geometry import Blocks, Transposed, Window
from ...tensor import here
from ..recipe import WHOLE, Link, Local, Operand, Output, Read, Recipe, SingleNode, Work, pair
from ..table import rule
from .convolve import Convolve

#: The class of the node that torch makes for a convolution.
_NODE = type(torch.conv1d(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, requires_grad=True)).grad_fn)


def _batched(input: Operand, spatial: int, name: str) -> int:
    """How many dims stand before the channels: 1 with a batch, 0 without."""
    if input.ndim not in (spatial + 1, spatial + 2):
        raise ShardingError(
            f"{name} in {here()}: expected {spatial + 1} or {spatial + 2} dims, got {list(input.shape)}"
        )
    return input.ndim - spatial - 1


def _convolution(
    spatial: int,
    torch_function: Callable[..., Tensor],
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Recipe:
    """The rule of ``conv*d``."""
    name = f"conv{spatial}d"
    lead = _batched(input, spatial, name)
    # Before anything moves: what one rank refuses must not run here.
    _ask_torch(name, torch_function, input, weight, stride, padding, dilation, groups)
    kernel, strides, dilations = weight.shape[2:], pair(stride, spatial), pair(dilation, spatial)
    before, after = _padding(padding, kernel, dilations)
    sizes = input.shape[lead + 1 :]
    out = tuple(
        (n + b + a - d * (k - 1) - 1) // s + 1
        for n, k, s, d, b, a in zip(sizes, kernel, strides, dilations, before, after, strict=True)
    )
    _check_sizes(name, input, out, 1)
    channels = _Channels(input, weight, bias, groups, lead, weight.shape[0])
    windows = [Link(lead + 1 + i, Window(kernel[i], strides[i], dilations[i], before[i]), 0.0) for i in range(spatial)]

    def inner(work: Work) -> list[int]:
        """Padding that torch does, on both sides: where the dim is not cut."""
        return [amount if work.native(input, lead + 1 + i) else 0 for i, amount in enumerate(before)]

    def local(work: Work) -> Callable[..., Tensor]:
        """torch's call for this rank: halos stand in for padding along cut dims."""
        home = [work.native(input, lead + 1 + i) for i in range(spatial)]
        outer = [a - b if native else 0 for a, b, native in zip(after, before, home, strict=True)]
        more, both = [side for amount in reversed(outer) for side in (0, amount)], inner(work)
        own_groups, adds_bias = channels.groups_of(work), channels.adds_bias(work)

        def compute(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
            if bias is not None and not adds_bias:
                weight, bias = _without_bias(weight, bias), None
            return torch_function(input, weight, bias, strides, both, dilations, own_groups)

        def padded(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """'same' padding of an even kernel is not symmetric."""
            return compute(F.pad(input, more), *args, **kwargs)

        return padded if any(more) else compute

    def again(work: Work, gradient: Tensor, slope: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        """The input's gradient. Of the input itself only the shape counts."""
        call = (strides, inner(work), dilations, False, [0] * spatial, groups, [True, False, False])
        return torch.ops.aten.convolution_backward(gradient, slope, weight.to(gradient.dtype), None, *call)[0]

    linear = Convolve(torch_function, kernel, strides, dilations, before, groups)
    recipe = _recipe(channels, out, windows, Local(local), linear)
    return replace(recipe, single_node=SingleNode(_NODE, again)) if recipe.linear_part is not None else recipe


@dataclass(frozen=True)
class _Channels:
    """How channels follow the space: output channels are dim ``lead``, input channels are its last dim.

    With groups there is no dim of input channels: a block of them belongs to a block of output channels.
    """

    input: Operand
    weight: Operand
    bias: Operand | None
    groups: int
    lead: int
    out: int
    transposed: bool = False

    @property
    def cut(self) -> bool:
        """Are channels cut in any operand?"""
        weights = self.weight.cut_dims | (self.bias.cut_dims if self.bias is not None else set())
        return self.lead in self.input.cut_dims or bool(weights)

    @property
    def size(self) -> int:
        """Input channels."""
        return self.input.shape[self.lead]

    def groups_of(self, work: Work) -> int:
        """The groups of this rank's output channels."""
        return 1 if self.groups == 1 else -(-work.box[self.lead].size // (self.out // self.groups))

    def adds_bias(self, work: Work) -> bool:
        """Does this rank add the bias? Of ranks that sum over input channels, the one with the first of them does."""
        return self.groups > 1 or work.box[-1].size == self.size or (work.box[-1].lo == 0 and work.box[-1].size > 0)

    def reads(self, windows: Sequence[Link]) -> tuple[Read, ...]:
        """Input, weight and bias, as they follow the space."""
        last, made = self.lead + 1 + len(windows), self.out // self.groups
        of_input, of_weight, of_bias = Link(last), (Link(self.lead), Link(last)), Link(self.lead)
        if self.groups > 1:
            of_input, of_bias = (
                Link(self.lead, Blocks(self.size // self.groups, made)),
                Link(self.lead, Blocks(made, made)),
            )
            of_weight = (of_input if self.transposed else of_bias, WHOLE)
        elif self.transposed:
            of_weight = (of_weight[1], of_weight[0])
        reads = [
            Read(self.input, (*map(Link, range(self.lead)), of_input, *windows)),
            Read(self.weight, (*of_weight, *(WHOLE for _ in windows))),
        ]
        return (*reads, *([] if self.bias is None else [Read(self.bias, (of_bias,))]))


def _without_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """The weight, with a bias of which nothing is added but which takes part in backward."""
    return weight + bias[:0].sum().to(weight.dtype)


def _recipe(
    channels: _Channels, out: tuple[int, ...], windows: Sequence[Link], local: Callable[..., Any], linear: Convolve
) -> Recipe:
    """Spatial dims are read in windows; without a batch, or where channels are cut, the halo is always glued."""
    shape = (*channels.input.shape[: channels.lead], channels.out, *out)
    return Recipe(
        space=(*shape, channels.size) if channels.groups == 1 else shape,
        reads=channels.reads(windows),
        outputs=(Output(shape, tuple(range(len(shape)))),),
        local=local,
        combine="sum",
        linear_part=linear.linear_part if channels.lead and not channels.cut else None,
    )


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Zeros before and after, for each spatial dim."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    both = pair(padding, len(kernel))
    return both, both


def _ask_torch(name: str, function: Callable[..., Tensor], input: Operand, weight: Operand, *rest: Any) -> None:
    """What torch refuses for the global shapes is refused here, whatever a tile might allow."""
    shapes = (torch.empty(o.shape, dtype=o.dtype, device="meta") for o in (input, weight))
    try:
        function(*shapes, None, *rest)
    except RuntimeError as error:
        raise ShardingError(
            f"{name} in {here()}: torch refuses an input of {list(input.shape)} with a weight of {list(weight.shape)}: "
            f"{error}{_channels(name, input, weight, rest)}"
        ) from error


def _channels(name: str, input: Operand, weight: Operand, rest: Sequence[Any]) -> str:
    """Of an input with other channels than the layer takes, which torch says in few words."""
    spatial = len(weight.shape) - 2
    # Channels stand just before the spatial dims, with or without a batch.
    there = input.shape[len(input.shape) - spatial - 1] if len(input.shape) > spatial else 0
    groups = 1 if "transpose" in name else next((each for each in rest[3:4] if isinstance(each, int)), 1)
    wanted = weight.shape[0] if "transpose" in name else weight.shape[1] * groups
    if there in (0, wanted):
        return ""
    return f"; the input has {there} channels and the layer takes {wanted}: make them the same"


def _check_sizes(name: str, input: Operand, out: tuple[int, ...], least: int) -> None:
    if any(size < least for size in out):
        raise ShardingError(f"{name} in {here()}: an input of {list(input.shape)} leaves an output of {list(out)}")


def _transposed(
    spatial: int,
    torch_function: Callable[..., Tensor],
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Recipe:
    """The rule of ``conv_transpose*d``."""
    name = f"conv_transpose{spatial}d"
    operand, lead = input, _batched(input, spatial, name)
    _ask_torch(name, torch_function, input, weight, stride, padding, output_padding, groups, dilation)
    kernel, strides, dilations = weight.shape[2:], pair(stride, spatial), pair(dilation, spatial)
    pads, extra = pair(padding, spatial), pair(output_padding, spatial)
    out = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(input.shape[lead + 1 :], strides, pads, dilations, kernel, extra, strict=True)
    )
    _check_sizes(name, input, out, 0)  # torch allows an empty result here
    channels = _Channels(input, weight, bias, groups, lead, weight.shape[1] * groups, transposed=True)
    accesses = [Transposed(kernel[i], strides[i], dilations[i], pads[i]) for i in range(spatial)]
    windows = [Link(lead + 1 + i, access) for i, access in enumerate(accesses)]

    def local(work: Work, input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        """Under the names that torch's functions have for their arguments, which may be given by name."""
        tile, w, b, groups = input, weight, bias, channels.groups_of(work)
        if b is not None and not channels.adds_bias(work):
            w, b = _without_bias(w, b), None
        native = [work.native(operand, lead + 1 + i) for i in range(spatial)]
        inner = [pads[i] if native[i] else 0 for i in range(spatial)]
        more = [extra[i] if native[i] else 0 for i in range(spatial)]
        if all(native):
            return torch_function(tile, w, b, strides, inner, more, groups, dilations)
        if 0 in tile.shape:  # outputs that no input reaches
            shape = [*tile.shape[:lead], w.shape[1] * groups, *(work.box[lead + 1 + i].size for i in range(spatial))]
            probe = tile.new_zeros([*tile.shape[: lead + 1], *(max(1, n) for n in tile.shape[lead + 1 :])])
            dtype = torch_function(probe, w.detach(), None, strides, inner, more, groups, dilations).dtype
            full = (tile.new_zeros(shape) + tile.sum() * 0 + w.sum() * 0).to(dtype)
            return full if b is None else full + b.to(full.dtype).view(-1, *(1,) * spatial)
        full = torch_function(tile, w, None, strides, inner, more, groups, dilations)
        full = _trim(full, [None if native[i] else _margin(work, i) for i in range(spatial)])
        return full if b is None else full + b.to(full.dtype).view(-1, *(1,) * spatial)

    def _margin(work: Work, i: int) -> tuple[int, int]:
        """How far the wanted output lies inside (or, negative, outside) what the local tile reaches."""
        (need,), wanted = work.slots[operand.index][lead + 1 + i].needs, work.box[lead + 1 + i]
        first = strides[i] * need.lo - pads[i]
        last = strides[i] * (need.hi - 1) - pads[i] + accesses[i].reach + 1
        return wanted.lo - first, last - wanted.hi

    linear = Convolve(torch_function, kernel, strides, dilations, pads, groups, transposed=True)
    return _recipe(channels, out, windows, local, linear)


def _trim(tensor: Tensor, margins: list[tuple[int, int] | None]) -> Tensor:
    """Cut off what belongs to neighbours; add zeros where nothing reaches."""
    if all(margin in (None, (0, 0)) for margin in margins):
        return tensor
    pads: list[int] = []
    for margin in reversed(margins):
        before, after = margin or (0, 0)
        pads += [-before, -after]
    return F.pad(tensor, pads)


for _spatial, _conv, _deconv in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    rule(_conv, getattr(torch, f"conv{_spatial}d"), family="window")(partial(_convolution, _spatial, _conv))
    rule(_deconv, getattr(torch, f"conv_transpose{_spatial}d"), family="window")(
        partial(_transposed, _spatial, _deconv)
    )
