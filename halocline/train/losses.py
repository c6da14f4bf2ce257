"""The loss of a run: a function of the output and y, or a class or factory that makes one.

Settings name it as ``package.module:name``, such as ``torch.nn:CrossEntropyLoss`` or a function of the user's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .imports import called, named

Criterion = Callable[[Any, Tensor], Tensor]


def make_loss(target: str, options: Mapping[str, Any]) -> Criterion:
    """The loss that ``package.module:name`` names, as a function of the network's output and y.

    A class, or a function whose parameters all have defaults, is called with ``options`` and returns the loss. Any
    other function is the loss itself, and is called with the output, y and ``options``.
    """
    loss, arguments = named("loss", target), _as_tensors(options)
    if isinstance(loss, type) or _is_factory(loss):
        made: Any = called("loss_options", loss, **arguments)
        return made.requires_grad_(False) if isinstance(made, nn.Module) else made
    if arguments:
        return lambda output, y: called("loss_options", loss, output, y, **arguments)
    return loss


def _is_factory(function: Any) -> bool:
    """Can a function be called without arguments? Then it makes a loss; a loss itself needs two."""
    if isinstance(function, nn.Module):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return False
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return not required


def _as_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with class weights (``weight``, ``pos_weight``, ...) as tensors, which a settings file cannot hold."""
    return {
        name: torch.tensor(value, dtype=torch.get_default_dtype())
        if name.endswith(("weight", "weights")) and isinstance(value, (list, tuple))
        else value
        for name, value in options.items()
    }
