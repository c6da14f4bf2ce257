"""``torch.multinomial`` written with functions that draw by global index, so that every cut takes the same samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Refused
from ..tensor import ShardedTensor, here
from .functions import rand_like
from .generator import GlobalBox


def multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Tensor:
    """Without replacement, the winners of a race: what has weight p arrives at a time that is exponential with rate p.

    With it, where uniform numbers fall among the running sums of the weights.
    """
    if generator is not None:
        raise Refused("multinomial", here(), "a generator of torch's would draw other numbers on each tile", "omit it")
    weights = input.detach()
    _check(weights, num_samples, replacement)
    # One sample is the winner of the race too: a single pass without sums.
    if num_samples == 1 or not replacement:
        return (weights / torch.empty_like(weights).exponential_()).topk(num_samples, -1).indices
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    places = _uniform(total.expand(*weights.shape[:-1], num_samples)) * total
    return torch.searchsorted(sums, places, right=True).clamp(max=weights.shape[-1] - 1)


def _uniform(like: Tensor) -> Tensor:
    """Where the weights are cut, no mode is on that would draw a plain tensor's numbers by index too."""
    if isinstance(like, ShardedTensor):
        return torch.rand_like(like)
    return rand_like(GlobalBox.all_of(tuple(like.shape)), like)


def _check(weights: Tensor, num_samples: int, replacement: bool) -> None:
    """torch's own errors, nearly in its words; all ranks see the same global values."""
    if weights.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not weights.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {weights.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > weights.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if weights.is_meta or not weights.numel():
        return
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if int((weights > 0).sum(-1).min()) < (1 if replacement else num_samples):
        raise RuntimeError("invalid multinomial distribution (too few categories with a weight above 0)")
