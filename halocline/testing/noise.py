"""Measures how far rounding alone moves a network's results, where a cut run is further off than float64 explains.

A network may compute in float32 in the middle of a float64 run (a cast, a ``dtype=torch.cfloat`` of its own). A sum
over ranks then rounds differently from the sum of one rank, by far more than float64 does. Inputs that differ by one
unit in the last place do not show it, since a cast to float32 rounds the difference away. Therefore every result of
lower precision is moved by one unit in its own last place too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_private import TorchDispatchMode
from ..tree import tensors_in


class LastPlaces(TorchDispatchMode):
    """Inside, results of less precision than float64 are off by one unit in the last place, up or down at random."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not getattr(function, "is_view", False):
            for tensor in tensors_in(result):
                if is_real(tensor) and torch.finfo(tensor.dtype).eps > torch.finfo(torch.float64).eps:
                    nudge(tensor, self._generator)
        return result


@torch.no_grad()
def nudge(tensor: Tensor, generator: torch.Generator) -> None:
    """Every element off by about one unit in its last place."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8).to(tensor.real.dtype) * 2 - 1
    tensor.mul_(1 + torch.finfo(tensor.dtype).eps * signs)


def is_real(tensor: Tensor) -> bool:
    """Real or complex: of numbers that are rounded."""
    return tensor.is_floating_point() or tensor.is_complex()
