"""Runs backward with a torch function mode still active.

torch takes a mode off while it runs a function, and backward is one function: whatever is recomputed in it would run
without the mode. Called with gradient edges instead of tensors, torch sees no tensor that would make it do so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..tensor import ShardedTensor

BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


def run_backward(
    mode: TorchFunctionMode, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The function of ``BACKWARD`` that came to ``mode``, which is put on again."""
    tensors, inputs = args[0], args[1] if len(args) > 1 else kwargs.get("inputs")
    if not _differentiable(tensors) or not _differentiable(inputs):
        return function(*args, **kwargs)  # torch says what is wrong with it
    with mode:
        if ShardedTensor in types:
            return ShardedTensor.__torch_function__(function, types, args, kwargs)
        if function is torch.autograd.grad:
            return _grad(tensors, inputs, **kwargs)
        seeds = kwargs.pop("gradient" if function is Tensor.backward else "grad_tensors", None)
        return torch.autograd.backward(_edges(tensors), seeds, **kwargs | {"inputs": _edges(inputs)})


def _grad(outputs: Any, inputs: Any, *, materialize_grads: bool = False, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` by edges, which cannot fill in zeros by itself."""
    gradients = torch.autograd.grad(_edges(outputs), _edges(inputs), **kwargs)
    if not materialize_grads:
        return gradients
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, inputs, strict=True))


def _differentiable(values: Any) -> bool:
    """Has every tensor an edge in the graph?"""
    if isinstance(values, Tensor):
        return values.requires_grad
    return values is None or isinstance(values, GradientEdge) or all(map(_differentiable, _items(values)))


def _edges(values: Any) -> Any:
    if isinstance(values, Tensor):
        return get_gradient_edge(values)
    return values if values is None or isinstance(values, GradientEdge) else tuple(map(_edges, _items(values)))


def _items(values: Any) -> tuple[Any, ...]:
    return tuple(values.values() if isinstance(values, dict) else values)
