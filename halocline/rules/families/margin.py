"""Losses with a margin, of pairs and of triplets; written as torch writes them, with sums over all ranks.

Most are written out in torch functions on cut tensors. Those of many classes run torch's own kernel on whole rows.
"""

from __future__ import annotations

from math import log, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recipe import Operand, Recipe, follow, whole_operands
from ..table import composite, refuse, run_for
from .loss import loss


@loss(F.gaussian_nll_loss)
def gaussian_nll_loss(input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6) -> Tensor:
    """A variance below zero on any rank is an error on all."""
    spread = _variance(input, var)
    # Over all ranks, so that all raise together.
    negative = (spread < 0).any()
    if not negative.is_meta and bool(negative):
        raise ValueError("var has negative entry/entries")
    spread = spread.clone()
    with torch.no_grad():  # as in torch, what is clamped keeps its gradient
        spread.clamp_(min=eps)
    values = 0.5 * (spread.log() + (input - target) ** 2 / spread)
    return values + 0.5 * log(2 * pi) if full else values


def _variance(input: Tensor, var: Any) -> Tensor:
    """As large as the input, one dim short of it, or of size one in one dim."""
    if not isinstance(var, Tensor):
        return torch.full_like(input, var).detach()
    given, wanted = list(var.shape), list(input.shape)
    if given == wanted[:-1]:
        return var.unsqueeze(-1)
    # torch allows one dim of size one in place of the input's.
    different = [size for size, other in zip(given, wanted, strict=False) if size != other]
    if len(given) != len(wanted) or different not in ([], [1]):
        raise ValueError("var is of incorrect size")
    return var


@loss(F.margin_ranking_loss)
def margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0) -> Tensor:
    """By how much two inputs are in the wrong order."""
    return (-target * (input1 - input2) + margin).clamp_min(0)


@loss(F.hinge_embedding_loss)
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0) -> Tensor:
    """Distances of pairs that belong together or apart."""
    zero = torch.zeros((), dtype=input.dtype, device=input.device)
    apart = torch.where(target != 1, (margin - input).clamp_min(0), zero)
    return apart + torch.where(target != -1, input, zero)


@loss(F.cosine_embedding_loss)
def cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0) -> Tensor:
    """Angles of pairs that belong together or apart; vectors may be cut."""
    tiny = 1e-12
    # torch adds this to the squares, not to the lengths.
    lengths = ((input1 * input1).sum(-1) + tiny) * ((input2 * input2).sum(-1) + tiny)
    cosine = (input1 * input2).sum(-1) / lengths.sqrt()
    zero = torch.zeros((), dtype=cosine.dtype, device=cosine.device)
    alike = torch.where(target == 1, 1 - cosine, zero)
    return alike + torch.where(target == -1, (cosine - margin).clamp_min(0), zero)


def _triplet(anchor: Tensor, positive: Tensor, negative: Tensor, distance: Any, margin: float, swap: bool) -> Tensor:
    """The loss of three points under any distance."""
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    near, far = distance(anchor, positive), distance(anchor, negative)
    # The nearer of both distances to the negative.
    far = torch.minimum(far, distance(positive, negative)) if swap else far
    return (margin + near - far).clamp_min(0)


@loss(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
) -> Tensor:
    """How much nearer the positive is than the negative."""
    distance = lambda one, other: F.pairwise_distance(one, other, p, eps)  # noqa: E731
    return _triplet(anchor, positive, negative, distance, margin, swap)


@loss(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Any = None,
    margin: float = 1.0,
    swap: bool = False,
) -> Tensor:
    """The same with a distance of the user's own, which runs by rules."""
    distance = distance_function or F.pairwise_distance
    return _triplet(anchor, positive, negative, distance, margin, swap)


@loss(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(input: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Logistic losses averaged over the classes of a sample."""
    values = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    values = values if weight is None else values * weight
    return values.sum(-1) / input.shape[-1]


def _rows_rule(
    function: Any, input: Operand, target: Operand, options: tuple[Any, ...] = (), weight: Operand | None = None
) -> Recipe:
    """One loss a sample, of all its classes. ``options`` are pairs of name and value."""
    if input.ndim != 2:
        raise refuse(function, "its classes are cut, and there is no batch", "call it on x.unsqueeze(0)")

    def local(work: Any, input: Tensor, target: Tensor, options: Any = (), weight: Tensor | None = None) -> Tensor:
        given = {} if weight is None else {"weight": weight}
        return function(input, target, reduction="none", **dict(options), **given)

    reads = (follow(input, 0, None), follow(target, *(0, None)[: target.ndim]), *whole_operands(weight))
    return Recipe(space=input.shape[:1], reads=reads, local=local)


@loss(F.multi_margin_loss)
def multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """All classes of a sample, which are brought together."""
    return run_for(F.multi_margin_loss, _rows_rule, input, target, (("p", p), ("margin", margin)), weight)


@loss(F.multilabel_margin_loss)
def multilabel_margin_loss(input: Tensor, target: Tensor) -> Tensor:
    """All classes of a sample, which are brought together."""
    return run_for(F.multilabel_margin_loss, _rows_rule, input, target)


@composite(F.ctc_loss, torch.ctc_loss, family="refused")
def ctc_loss(*args: Any, **kwargs: Any) -> Tensor:
    """Always refused."""
    raise refuse(
        "ctc_loss",
        "it runs through all times of a sample, in kernels that know no empty batch",
        "call it on hc.gather of its log-probabilities",
    )
