"""The functions of ``torch.nn.init`` that torch hands over whole, written out, so that their draws are seen.

Parameters are then filled by global index: a cut one tile by tile, with the values that it has on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init


@torch.no_grad()
def _uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    return tensor.uniform_(a, b, generator=generator)


@torch.no_grad()
def _normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    return tensor.normal_(mean, std, generator=generator)


@torch.no_grad()
def _constant_(tensor: Tensor, val: float) -> Tensor:
    return tensor.fill_(val)


@torch.no_grad()
def _kaiming_uniform_(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """By the global number of inputs or outputs."""
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")
    if tensor.ndim < 2:
        raise ValueError("Fan in and fan out can not be computed for tensor with fewer than 2 dimensions")
    if 0 in tensor.shape:
        return tensor
    fan = tensor.shape[1 if mode == "fan_in" else 0] * math.prod(tensor.shape[2:])
    bound = math.sqrt(3.0) * (init.calculate_gain(nonlinearity, a) / math.sqrt(fan))
    return tensor.uniform_(-bound, bound, generator=generator)


INITIALIZERS: dict[Any, Callable[..., Tensor]] = {
    init.uniform_: _uniform_,
    init.normal_: _normal_,
    init.constant_: _constant_,
    init.kaiming_uniform_: _kaiming_uniform_,
}
