"""Losses: the loss of each voxel is local, the average is over the whole sample and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_private import caller_value
from ...errors import ShardingError
from ...tensor import here
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, read_whole
from ..table import composite, refuse, run_rule
from .pointwise import elementwise


def reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return values.mean() if reduction == "mean" else values.sum()


def _voxelwise(function: Callable[..., Tensor]) -> None:
    """A loss of pairs of values: torch's own with ``reduction='none'`` on the tiles, then a global reduction."""

    def describe(*args: Any, **kwargs: Any) -> Recipe:
        return elementwise(function, args, kwargs, inplace=False)

    def loss(
        input: Tensor,
        target: Tensor,
        *args: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> Tensor:
        no_legacy(function, size_average, reduce, args)
        weight = kwargs.pop("weight", None)
        if function is F.l1_loss and weight is None:  # torch itself forgets to hand it on
            weight = caller_value(F.l1_loss, "weight")
        values = run_rule(function, describe, (input, target), {**kwargs, "reduction": "none"})
        if weight is not None:
            return _weighted(function, values, weight, reduction)
        if reduction == "batchmean":
            return values.sum() / input.shape[0]
        return reduced(values, reduction)

    composite(function, family="loss")(loss)


def _weighted(function: Any, values: Tensor, weight: Tensor, reduction: str) -> Tensor:
    """As torch weighs: the mean is over the weights."""
    if tuple(weight.shape) != tuple(values.shape):
        raise refuse(function, "its weight has another shape than its input", "give a weight for each element")
    weighed = values * weight
    return weighed.sum() / weight.sum() if reduction == "mean" else reduced(weighed, reduction)


def no_legacy(function: Any, size_average: Any, reduce: Any, args: tuple[Any, ...] = ()) -> None:
    if size_average is not None or reduce is not None or args:
        raise refuse(function, "size_average, reduce and positional options are torch's old way", "use reduction=...")


for _loss in (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.soft_margin_loss,
    F.poisson_nll_loss,
):
    _voxelwise(_loss)


def _elementwise_of(function: Callable[..., Tensor]) -> Callable[..., Recipe]:
    return lambda *args, **kwargs: elementwise(function, args, kwargs, inplace=False)


_bce = _elementwise_of(F.binary_cross_entropy)
_bce_logits = _elementwise_of(F.binary_cross_entropy_with_logits)


@composite(F.binary_cross_entropy)
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    no_legacy(F.binary_cross_entropy, size_average, reduce)
    _same_shape("binary_cross_entropy", input, target)
    options = {"reduction": "none", **({} if weight is None else {"weight": weight})}
    return reduced(run_rule(F.binary_cross_entropy, _bce, (input, target), options), reduction)


@composite(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    no_legacy(F.binary_cross_entropy_with_logits, size_average, reduce)
    _same_shape("binary_cross_entropy_with_logits", input, target)
    options: dict[str, Any] = {"reduction": "none"}
    options.update({n: v for n, v in (("weight", weight), ("pos_weight", pos_weight)) if v is not None})
    values = run_rule(F.binary_cross_entropy_with_logits, _bce_logits, (input, target), options)
    return reduced(values, reduction)


def _same_shape(name: str, input: Tensor, target: Tensor) -> None:
    if tuple(input.shape) != tuple(target.shape):
        raise ShardingError(
            f"{name} in {here()}: input is {list(input.shape)} and target {list(target.shape)} in global terms; "
            "a target read as a tile becomes sharded by hc.from_tile(...)"
        )


def _voxels(input: Operand) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Link, ...]]:
    """Scores as voxels, each with its classes: the space of voxels, its dims, and how the scores follow them."""
    classes = 0 if input.ndim == 1 else 1
    space = tuple(n for d, n in enumerate(input.shape) if d != classes)
    places = iter(range(len(space)))
    links = tuple(WHOLE if d == classes else Link(next(places)) for d in range(input.ndim))
    return space, tuple(range(len(space))), links


def _class_rule(function: Callable[..., Tensor]) -> Callable[..., Recipe]:
    """Loss of each voxel over its classes, and the weight that its class has in the average."""

    def describe(
        input: Operand, target: Operand, weight: Operand | None, ignore_index: int, smoothing: float
    ) -> Recipe:
        space, dims, links = _voxels(input)
        if target.shape != space:
            raise ShardingError(
                f"{function.__name__} in {here()}: classes {list(input.shape)} want a target {list(space)} in global "
                f"terms, got {list(target.shape)}; a target read as a tile becomes sharded by hc.from_tile(...)"
            )
        reads = [Read(input, links), Read(target, tuple(map(Link, dims)))]
        if weight is not None:
            reads.append(read_whole(weight))
        options = {"label_smoothing": smoothing} if function is F.cross_entropy else {}

        def local(work: Any, tile: Tensor, aim: Tensor, w: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
            values = function(tile, aim, weight=w, ignore_index=ignore_index, reduction="none", **options)
            counted = aim != ignore_index
            if w is None:
                return values, counted.to(values.dtype)
            return values, torch.where(counted, w[torch.where(counted, aim, 0).long()], 0).to(values.dtype)

        return Recipe(
            space=space,
            reads=tuple(reads),
            outputs=(Output(space, dims), Output(space, dims, constant=True)),
            local=local,
        )

    return describe


_cross_entropy_rule = _class_rule(F.cross_entropy)
_nll_rule = _class_rule(F.nll_loss)


def _class_loss(function: Any, describe: Any, reduction: str, *call: Any) -> Tensor:
    values, weights = run_rule(function, describe, call, {})
    if reduction == "mean":
        return values.sum() / weights.sum()
    return reduced(values, reduction)


def _probability_rule(input: Operand, target: Operand, weight: Operand | None, smoothing: float) -> Recipe:
    space, dims, links = _voxels(input)

    def local(work: Any, tile: Tensor, aim: Tensor, w: Tensor | None, *_: Any) -> Tensor:
        return F.cross_entropy(tile, aim, weight=w, reduction="none", label_smoothing=smoothing)

    reads = [Read(input, links), Read(target, links), *([] if weight is None else [read_whole(weight)])]
    return Recipe(space=space, reads=tuple(reads), outputs=(Output(space, dims),), local=local)


@composite(F.cross_entropy)
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    no_legacy(F.cross_entropy, size_average, reduce)
    if target.is_floating_point():
        if target.ndim == input.ndim - 1:
            raise ShardingError(
                f"cross_entropy in {here()}: the target {list(target.shape)} holds {target.dtype}, which torch "
                f"takes for probabilities of the shape {list(input.shape)}; for class numbers give integers: y.long()"
            )
        _same_shape("cross_entropy", input, target)
        values = run_rule(F.cross_entropy, _probability_rule, (input, target, weight, label_smoothing), {})
        return reduced(values, reduction)
    call = (input, target, weight, ignore_index, label_smoothing)
    return _class_loss(F.cross_entropy, _cross_entropy_rule, reduction, *call)


@composite(F.nll_loss)
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    no_legacy(F.nll_loss, size_average, reduce)
    return _class_loss(F.nll_loss, _nll_rule, reduction, input, target, weight, ignore_index, 0.0)
