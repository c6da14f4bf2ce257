"""Functions that need a dim whole: softmax, cumulative sums, sorting, look-ups. All other dims keep their cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .executor import run_rule
from .recipe import WHOLE, Link, Operand, Output, Read, Recipe
from .table import composite, refuse, rule
from .view import as_called, each, forms, made_of, normal, shape, shapes
from .pointwise import broadcast_shape


def along(function: Any, input: Operand, dims: int | Sequence[int], *args: Any, **kwargs: Any) -> Recipe:
    """``function(input, *args, **kwargs)`` on whole ``dims``; results have the input's dims, those perhaps resized."""
    listed = (dims,) if isinstance(dims, int) else dims
    results = shapes(function, input, *args, **kwargs)
    return Recipe(
        space=results[0],
        reads=(Read(input, tuple(map(Link, range(input.ndim)))),),
        outputs=tuple(Output(result, tuple(range(len(result)))) for result in results),
        local=as_called(function),
        uncut=frozenset(normal(dim, input.ndim) for dim in listed),
        runs_empty=True,
    )


@each("softmax log_softmax softmin")
def softmax(function: Any, input: Operand, dim: int | None = None, *args: Any, **kwargs: Any) -> Recipe:
    if dim is None:  # torch's old guess
        dim = 0 if input.ndim in (0, 1, 3) else 1
    return along(function, input, dim, dim)


@each("cumsum cumprod logcumsumexp")
def cumulative(function: Any, input: Operand, dim: int, **kwargs: Any) -> Recipe:
    return along(function, input, dim, dim)


@each("glu")
def glu(function: Any, input: Operand, dim: int = -1) -> Recipe:
    return along(function, input, dim, dim)


@each("channel_shuffle")
def channel_shuffle(function: Any, input: Operand, groups: int) -> Recipe:
    return along(function, input, 1, groups)


@each("local_response_norm")
def local_response_norm(function: Any, input: Operand, size: int, *args: Any, **kwargs: Any) -> Recipe:
    return along(function, input, 1, size)
