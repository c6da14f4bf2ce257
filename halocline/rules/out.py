"""The argument ``out=``: the result is computed as usual and then copied into the given tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .table import name_of, refuse


def into(out: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute without ``out``, and copy; refused where torch would change a shape or lose a gradient."""
    result = function(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if not isinstance(out, Tensor) or not isinstance(result, Tensor):
        raise refuse(function, "with out= it fills several tensors", "assign the results instead")
    if out.shape != result.shape:
        raise refuse(function, "out= would change the shape of a tensor", "give one of the shape of the result")
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise RuntimeError(f"{name_of(function)}(): functions with out=... arguments don't support autograd")
    return out.copy_(result)
