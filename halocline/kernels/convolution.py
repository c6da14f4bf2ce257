"""Convolutions in chunks.

Three sums suffice: a convolution; a transposed convolution (each is the other's gradient by the input); and the
gradient by the weight, which is the same for both, with input and output exchanged. A chunk is a box of the output, or,
for the weight's gradient, of the summed volume.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .layout import CHANNELS_LAST, channels_last
from .parts import Call, at
from .replace import Original, kernel
from .sizes import sizes

_WIDE = {torch.half: torch.float32, torch.bfloat16: torch.float32}


def _large(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> bool:
    """And such that torch takes it: what it refuses it is to refuse itself."""
    call = Call.of(weight.dim() - 2, *rest)
    shape = call.shape(x, weight)
    largest = max(x.numel(), prod(shape))
    return largest > sizes(x.device, _family(call)).whole and min(x.numel(), weight.numel(), *shape) > 0 and call.legal


def _family(call: Call) -> str:
    return "transposed" if call.transposed else "convolution"


@kernel("convolution", _large)
def convolution(original: Original, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """In boxes of the output."""
    call = Call.of(weight.dim() - 2, *rest)
    return _in_parts(original, x, weight, bias, call, call.shape(x, weight), channels_last(x, weight))


def _large_backward(gradient: Tensor, x: Tensor, *rest: Any) -> bool:
    largest = max(gradient.numel(), x.numel())
    return any(largest > sizes(x.device, family).whole for family in ("convolution", "transposed", "weight gradient"))


@kernel("convolution_backward", _large_backward)
def convolution_backward(
    original: Original, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """By input, weight and bias, each in the chunks that suit it."""
    *settings, wanted = rest
    call = Call.of(weight.dim() - 2, *settings)
    of_x = of_weight = of_bias = None
    if wanted[0]:
        of_x = _input_gradient(original.of("convolution"), gradient, x, weight, call)
    # The weight's gradient of a transposed convolution is a plain one's, with both ends exchanged.
    if wanted[1]:
        ends = (gradient, x) if call.transposed else (x, gradient)
        of_weight = _weight_gradient(original, *ends, weight, call)
        if channels_last(x, weight):
            of_weight = of_weight.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    if wanted[2]:
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        of_bias = gradient.sum(dims, dtype=_WIDE.get(gradient.dtype)).to(gradient.dtype)
    return of_x, of_weight, of_bias


def _in_parts(
    original: Original,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    shape: tuple[int, ...],
    last: bool,
) -> Tensor:
    """The output of this shape, computed box by box. It may be smaller than what torch would make."""
    result = _room(x, last, shape)
    for part in call.parts(x.shape, shape, weight.shape[2:], sizes(x.device, _family(call)).chunk):
        target = at(result, part.box)
        # No input reaches these outputs: they are the bias.
        if part.need is None:
            target.copy_(_bias_alone(bias, target))
            continue
        piece, here = part.read(x), call._replace(padding=part.padding, extra=[0] * len(part.padding))
        if _writes_in_place(piece, target, here):
            _write(piece, weight, bias, target, here)
        else:
            target.copy_(part.kept(original(piece, weight, bias, *here)))
    return result


def _room(x: Tensor, last: bool, shape: tuple[int, ...]) -> Tensor:
    layout = CHANNELS_LAST[x.dim()] if last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _bias_alone(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(()) if bias is None else bias.view(-1, *(1,) * (like.dim() - 2))


def _writes_in_place(piece: Tensor, target: Tensor, call: Call) -> bool:
    """Can cuDNN put its result where it belongs? Only if both lie dense, with channels last."""
    return (
        piece.is_cuda
        and torch.version.hip is None
        and piece.dim() in CHANNELS_LAST
        and not call.transposed
        and call.groups == 1
        and piece.dtype in (torch.half, torch.bfloat16, torch.float32)
        and min(piece.shape[1], target.shape[1]) > 1
        and all(tensor.is_contiguous(memory_format=CHANNELS_LAST[piece.dim()]) for tensor in (piece, target))
        and all(tensor.data_ptr() % 16 == 0 for tensor in (piece, target))  # as of tensors that torch allocates
        and torch.backends.cudnn.is_acceptable(piece)
    )


def _write(piece: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, call: Call) -> None:
    """cuDNN's convolution, straight into ``target``: no copy of the chunk's result."""
    cudnn = torch.backends.cudnn
    dense = weight.contiguous(memory_format=CHANNELS_LAST[piece.dim()])
    steady = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    settings = (call.padding, call.stride, call.dilation, call.groups, cudnn.benchmark, steady, _tf32())
    torch.ops.aten.cudnn_convolution.out(piece, dense, *settings, out=target)
    if bias is not None:
        target.add_(_bias_alone(bias, target))


def _tf32() -> bool:
    """torch has an old and a new way of setting it, and refuses to answer in the old where the new was used."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _input_gradient(original: Original, gradient: Tensor, x: Tensor, weight: Tensor, call: Call) -> Tensor:
    """The convolution that goes the other way, over the gradient."""
    last = channels_last(x, weight)
    reach, none = call.reach(weight.shape[2:]), [0] * len(call.stride)
    if (
        set(call.stride) == {1}
        and not call.transposed
        and all(p <= r for p, r in zip(call.padding, reach, strict=True))
    ):
        # A plain one by the reversed kernel, which cuDNN writes where it belongs.
        weight = _reversed(weight, call.groups)
        back = call._replace(padding=[r - p for p, r in zip(call.padding, reach, strict=True)])
    else:
        back = call._replace(transposed=not call.transposed, extra=none)
    return _in_parts(original, gradient, weight, None, back, tuple(x.shape), last)


def _reversed(weight: Tensor, groups: int) -> Tensor:
    """The kernel backwards, from the output's channels to the input's."""
    out, into, *kernel = weight.shape
    turned = weight.flip(*range(2, weight.dim())).reshape(groups, out // groups, into, *kernel)
    return turned.transpose(1, 2).reshape(groups * into, out // groups, *kernel)


def _weight_gradient(original: Original, x: Tensor, gradient: Tensor, weight: Tensor, call: Call) -> Tensor:
    """Of a convolution from ``x`` to where ``gradient`` is, summed over chunks in float32 at least."""
    direct = call._replace(transposed=False, extra=[0] * len(call.extra))
    # Many chunks add up: in half precision the sum would lose what each adds.
    total = torch.zeros_like(weight, dtype=_WIDE.get(weight.dtype, weight.dtype))
    most = sizes(x.device, "weight gradient").chunk
    for part in direct.parts(x.shape, gradient.shape, weight.shape[2:], most):
        here = direct._replace(padding=part.padding)
        only_weight = [False, True, False]
        total += original(at(gradient, part.box), part.read(x), weight, None, *here, only_weight)[1]
    return total.to(weight.dtype)
