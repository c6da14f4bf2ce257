"""The functions of ``torch.nn.init`` that torch hands over whole: parameters filled tile by tile, by global index."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from ..table import composite, refuse


def _no_generator(function: Any, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise refuse(function, "a generator of torch's would draw the same numbers for every tile", "leave it out")


@composite(init.uniform_)
@torch.no_grad()
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Uniform between two bounds."""
    _no_generator(init.uniform_, generator)
    return tensor.uniform_(a, b)


@composite(init.normal_)
@torch.no_grad()
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Normal around a mean."""
    _no_generator(init.normal_, generator)
    return tensor.normal_(mean, std)


@composite(init.constant_)
@torch.no_grad()
def constant_(tensor: Tensor, val: float) -> Tensor:
    """One value everywhere."""
    return tensor.fill_(val)


@composite(init.kaiming_uniform_)
@torch.no_grad()
def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """He's initialisation, by the global number of inputs or outputs."""
    _no_generator(init.kaiming_uniform_, generator)
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")
    fan = tensor.shape[1 if mode == "fan_in" else 0] * math.prod(tensor.shape[2:])
    bound = math.sqrt(3.0) * (init.calculate_gain(nonlinearity, a) / math.sqrt(fan))
    return tensor.uniform_(-bound, bound)
