"""Softmax and its kin, over a cut dim by a maximum and a sum over the ranks; nothing is gathered.

Where one tile has all of the dim, torch's own function runs. Otherwise the maximum over all ranks keeps the powers in
range, and the sum over all ranks divides them. In half precision both run in float32 and are rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recipe import Operand, Output, Read, Recipe, stretched
from ..table import run_for, run_rule
from .pointwise import broadcast_shape
from .reduce import NARROW, extreme_value
from .scan import cut_points
from .view import as_called, flat_ints, made_of, made_of_each, normal, shape
from .whole_axis import along


def _rule(function: Any, input: Operand, dim: int, alone: bool) -> Recipe:
    """Where one tile has all of the dim (``alone``), it may stay cut."""
    recipe = along(function, input, dim, dim)
    local = lambda work, tile, *_: function(tile, dim)  # noqa: E731
    return replace(recipe, local=local, uncut=frozenset() if alone else recipe.uncut)


def _softmax(function: Any, input: Any, dim: int | None, dtype: torch.dtype | None) -> Tensor:
    """torch's own kernel where a tile has all of the dim, else a maximum and a sum over ranks."""
    if dim is None:  # torch's old guess
        dim = 0 if input.ndim in (0, 1, 3) else 1
    place = normal(dim, input.ndim)
    input = input if dtype is None else input.to(dtype)
    points = cut_points(input, place)
    if points is None or len(points) == 2:
        return run_for(function, _rule, input, place, points is not None)
    wide = input.float() if input.dtype in NARROW else input  # as in torch, rounded once
    # The maximum over all ranks keeps the powers in range; it has no gradient of its own.
    shifted = wide - extreme_value(wide, (place,), True, True)
    powers = shifted.exp()
    total = powers.sum(place, keepdim=True)
    made = function(torch.zeros(1, dtype=input.dtype, device=input.device), 0).dtype  # autocast has a say in it
    return (powers / total if function is torch.softmax else shifted - total.log()).to(made)


@made_of_each("softmax log_softmax softmin")
def softmax(
    function: Any, input: Tensor, dim: int | None = None, *args: Any, dtype: Any = None, **kwargs: Any
) -> Tensor:
    """Along a cut dim a maximum and a sum over the ranks. The softmin is the softmax of the negative."""
    # torch.softmax takes a dtype as its third argument, F.softmax as its fourth.
    dtype = next((value for value in (dtype, *args) if isinstance(value, torch.dtype)), None)
    if function is F.softmin:
        return _softmax(torch.softmax, -input, dim, dtype)
    return _softmax(function, input, dim, dtype)


def _normalize_rule(input: Operand, p: float, dim: Any, eps: float) -> Recipe:
    return along(F.normalize, input, dim, p, dim, eps)


@made_of("normalize")
def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """Divided by a vector norm, over the ranks where its dim is cut."""
    dims = [normal(d, input.ndim) for d in flat_ints((dim,))]
    # torch's own kernel, bit for bit.
    if all(cut_points(input, d) is None for d in dims):
        return run_rule(F.normalize, _normalize_rule, (input, p, dim, eps), {})
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps).expand_as(input)


def _similarity_rule(x1: Operand, x2: Operand, dim: int, eps: float) -> Recipe:
    """torch's own kernel for vectors that are not cut."""
    space = broadcast_shape(x1.shape, x2.shape)
    kept = tuple(d for d in range(len(space)) if d != dim)
    return Recipe(
        space=space,
        reads=tuple(Read(operand, stretched(operand.shape, space)) for operand in (x1, x2)),
        outputs=(Output(shape(F.cosine_similarity, x1, x2, dim), kept),),
        local=as_called(F.cosine_similarity),
        uncut=frozenset({dim}),
        runs_empty=True,
    )


@made_of("cosine_similarity")
def cosine_similarity(input: Tensor, other: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Along a cut dim, three sums over the ranks."""
    ndim = max(input.ndim, other.ndim)
    place = normal(dim, ndim)
    if all(cut_points(t, place - ndim + t.ndim) is None for t in (input, other) if place - ndim + t.ndim >= 0):
        return run_rule(F.cosine_similarity, _similarity_rule, (input, other, place, eps), {})
    input, other = torch.broadcast_tensors(input, other)
    lengths = [torch.linalg.vector_norm(t, 2, place, keepdim=True) for t in (input, other)]
    # As in torch, what lifts a length to eps is no part of the graph.
    lifted = [length + (length.clamp_min(eps) - length).detach() for length in lengths]
    return ((input / lifted[0]) * (other / lifted[1])).sum(place)
