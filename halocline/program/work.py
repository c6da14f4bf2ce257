"""How much work a local torch operation is: floating-point operations, and bytes read and written."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from ..tree import tensors_in

aten = torch.ops.aten


def _convolution(args: tuple[Any, ...], output: Any) -> float:
    """The weight's shape past its first dim is what one output (or, transposed, one input) is multiplied with."""
    volume, weight, transposed = args[0], args[1], args[6]
    return 2.0 * prod(volume.shape if transposed else output.shape) * prod(weight.shape[1:])


def _convolution_backward(args: tuple[Any, ...], output: Any) -> float:
    """As much as forward for each of the two gradients that are asked for; the bias counts nothing."""
    gradient, volume, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    once = 2.0 * prod(volume.shape if transposed else gradient.shape) * prod(weight.shape[1:])
    return once * (bool(wanted[0]) + bool(wanted[1]))


def _product(left: int) -> Callable[[tuple[Any, ...], Any], float]:
    """A matrix product: twice the output times the summed length."""
    return lambda args, output: 2.0 * prod(output.shape) * args[left].shape[-1]


FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], float]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.mm.default: _product(0),
    aten.bmm.default: _product(0),
    aten.addmm.default: _product(1),
    aten.baddbmm.default: _product(1),
}


def flops(function: Any, args: tuple[Any, ...], output: Any) -> float:
    """Twice the multiplications of convolutions and products; one for each result of anything else."""
    formula = FORMULAS.get(function)
    if formula is not None:
        return formula(args, output)
    return float(sum(tensor.numel() for tensor in tensors_in(output)))


def size_of(value: Any) -> int:
    """Bytes of all tensors in a structure, views in full."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
