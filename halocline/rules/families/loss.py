"""Losses: the loss of each voxel is local, the average runs over the whole sample and batch.

torch's own loss with ``reduction="none"`` runs on the tiles, so that the values are torch's to the bit. The reduction
is a sum over all ranks and a division by a global count, or by the global sum of weights. The classes of a voxel are
read whole; where they are cut, a voxel's loss is a maximum and two sums over the ranks, and no score is gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_private import caller_value
from ...errors import ShardingError
from ...tensor import ShardedTensor, here
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, follow, whole_operands
from ..table import composite, refuse, run_for, run_rule
from .pointwise import elementwise

Unreduced = Callable[..., Tensor | tuple[Tensor, Tensor]]


def loss(function: Any) -> Callable[[Unreduced], Unreduced]:
    """Register a loss by what it gives for each element, with torch's own parameters but for those of the reduction.

    Where the mean is weighted, it gives the weights too.
    """
    signature = inspect.signature(function)

    def register(values_of: Unreduced) -> Unreduced:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            """Bind the arguments as torch does, compute each element's loss, and reduce it over the whole batch."""
            # By name, however the caller passed them.
            options = signature.bind(*args, **kwargs).arguments
            if [options.pop(old, None) for old in ("size_average", "reduce")] != [None, None]:
                raise refuse(function, "size_average and reduce are options of old torch", "use reduction=...")
            reduction = options.pop("reduction", "mean")
            values: Any = values_of(**options)
            if reduction == "batchmean" and function is F.kl_div:
                return _reduced(values, "sum") / options["input"].shape[0]
            # A pair means a weighted mean: values, and what each counts.
            if isinstance(values, Tensor):
                return _reduced(values, reduction)
            return values[0].sum() / values[1].sum() if reduction == "mean" else _reduced(values[0], reduction)

        composite(function, family="loss")(call)
        return values_of

    return register


def _reduced(values: Tensor, reduction: str) -> Tensor:
    """The reduction that torch calls none, mean or sum, over all ranks."""
    if reduction == "none":
        return values
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return values.mean() if reduction == "mean" else values.sum()


def _voxelwise(function: Callable[..., Tensor]) -> None:
    """A loss of pairs of values: torch's own with ``reduction='none'`` on the tiles, then a global reduction."""

    def values_of(input: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
        if function is F.l1_loss and weight is None:  # torch itself forgets to hand it on
            weight = caller_value(F.l1_loss, "weight")
        values = run_for(function, _elementwise, input, target, **options, reduction="none")
        if weight is None:
            return values
        if tuple(weight.shape) != tuple(values.shape):
            raise refuse(function, "its weight has another shape than its input", "give a weight for each element")
        return values * weight, weight

    loss(function)(values_of)


def _elementwise(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Recipe:
    return elementwise(function, args, kwargs, inplace=False)


for _name in "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss poisson_nll_loss".split():
    _voxelwise(getattr(F, _name))


def _binary(function: Callable[..., Tensor]) -> None:
    """Binary cross entropy of probabilities or of scores; its weights stretch, and do not change the mean."""

    def values_of(input: Tensor, target: Tensor, **weights: Tensor | None) -> Tensor:
        _same_shape(function.__name__, input, target)
        # None would be an operand of the rule.
        given = {name: weight for name, weight in weights.items() if weight is not None}
        return run_for(function, _elementwise, input, target, reduction="none", **given)

    loss(function)(values_of)


_binary(F.binary_cross_entropy)
_binary(F.binary_cross_entropy_with_logits)


def _same_shape(name: str, input: Tensor, target: Tensor) -> None:
    """Raise where a target has another global shape than its input, and say how a tile is handed over."""
    if tuple(input.shape) != tuple(target.shape):
        raise ShardingError(
            f"{name} in {here()}: input is {list(input.shape)} and target {list(target.shape)} in global terms; "
            "a target read as a tile becomes sharded by hc.from_tile(...)"
        )


def _voxels(input: Operand) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Link, ...]]:
    """Scores as voxels, each with its classes: the space of voxels, its dims, and how the scores follow them."""
    # A single sample without a batch has its classes first.
    classes = 0 if input.ndim == 1 else 1
    space = tuple(n for d, n in enumerate(input.shape) if d != classes)
    places = iter(range(len(space)))
    links = tuple(WHOLE if d == classes else Link(next(places)) for d in range(input.ndim))
    return space, tuple(range(len(space))), links


def _check_target(function: Any, scores: Sequence[int], target: Sequence[int]) -> None:
    """Raise where the global shape of a target is not that of the voxels."""
    classes = 0 if len(scores) == 1 else 1
    space = [size for dim, size in enumerate(scores) if dim != classes]
    if list(target) != space:
        raise ShardingError(
            f"{function.__name__} in {here()}: classes {list(scores)} want a target {space} in global "
            f"terms, got {list(target)}; a target read as a tile becomes sharded by hc.from_tile(...)"
        )


def _class_rule(
    function: Callable[..., Tensor],
    input: Operand,
    target: Operand,
    weight: Operand | None,
    ignore_index: int,
    smoothing: float,
) -> Recipe:
    """Loss of each voxel over its classes, and the weight that its class has in the average."""
    _check_target(function, input.shape, target.shape)
    space, dims, links = _voxels(input)
    options = {"label_smoothing": smoothing} if function is F.cross_entropy else {}

    def local(work: Any, tile: Tensor, aim: Tensor, w: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        """torch's loss of each voxel, and what the voxel counts in the mean."""
        values = function(tile, aim, weight=w, ignore_index=ignore_index, reduction="none", **options)
        counted = aim != ignore_index
        if w is None:
            return values, counted.to(values.dtype)
        return values, torch.where(counted, w[torch.where(counted, aim, 0).long()], 0).to(values.dtype)

    reads = (Read(input, links), follow(target), *whole_operands(weight))
    outputs = (Output(space, dims), Output(space, dims, constant=True))
    return Recipe(space=space, reads=reads, outputs=outputs, local=local)


def _probability_rule(input: Operand, target: Operand, weight: Operand | None, smoothing: float) -> Recipe:
    """Cross entropy with a probability for each class, of which every voxel reads all."""
    space, _, links = _voxels(input)

    def local(work: Any, tile: Tensor, aim: Tensor, w: Tensor | None, *_: Any) -> Tensor:
        return F.cross_entropy(tile, aim, weight=w, reduction="none", label_smoothing=smoothing)

    return Recipe(space=space, reads=(Read(input, links), Read(target, links), *whole_operands(weight)), local=local)


def _class_dim(input: Any) -> int:
    return 0 if input.ndim == 1 else 1


def _classes_cut(input: Any) -> bool:
    """Are the scores of a voxel cut over ranks?"""
    return isinstance(input, ShardedTensor) and input.sharding.cuts[_class_dim(input)] is not None


def _pick_rule(scores: Operand, target: Operand, ignore_index: int) -> Recipe:
    """The score of each voxel's class, from the rank that has it; zero where the class is ignored."""
    space, dims, _ = _voxels(scores)
    place, classes = _class_dim(scores), scores.shape[_class_dim(scores)]

    def local(work: Work, tile: Tensor, aim: Tensor, *_: Any) -> Tensor:
        own = work.box[-1]
        if own.empty:
            return tile.new_zeros(aim.shape) + tile.sum()
        mine = (aim >= own.lo) & (aim < own.hi)
        # A class that no rank has stays outside the scores, so that torch raises its own error.
        others = torch.where((aim >= 0) & (aim < classes) | (aim == ignore_index), 0, classes)
        found = tile.gather(place, torch.where(mine, aim - own.lo, others).long().unsqueeze(place)).squeeze(place)
        return found.masked_fill(mine.logical_not() | (aim == ignore_index), 0.0)

    links = list(map(Link, dims))
    links.insert(place, Link(len(space)))
    return Recipe(
        space=(*space, classes),
        reads=(Read(scores, tuple(links)), follow(target)),
        outputs=(Output(space, dims),),
        local=local,
        combine="sum",
        runs_empty=True,
    )


def _of_cut_classes(
    function: Any, scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Loss and weight of each voxel, as :func:`_class_rule` gives them, from logarithms whose classes are cut."""
    _check_target(function, scores.shape, target.shape)
    place = _class_dim(scores)
    values = -run_rule(function, _pick_rule, (scores, target, ignore_index), {})
    counted = (target != ignore_index).to(values.dtype)
    if weight is not None:
        share = F.embedding(torch.where(target != ignore_index, target, 0), weight.unsqueeze(1)).squeeze(-1)
        counted = counted * share.to(values.dtype)
        values = values * counted
    if smoothing:
        kept = (target != ignore_index).to(values.dtype)
        each = scores if weight is None else scores * _along(weight, place, scores.ndim)
        values = values * (1 - smoothing) - each.sum(place) * kept * (smoothing / scores.shape[place])
    return values, counted


def _of_cut_probabilities(scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """Loss of each voxel with a probability for each class."""
    place = _class_dim(scores)
    aim = target * (1 - smoothing) + smoothing / scores.shape[place] if smoothing else target
    each = scores * aim if weight is None else scores * aim * _along(weight, place, scores.ndim)
    return -each.sum(place)


def _along(weight: Tensor, place: int, ndim: int) -> Tensor:
    return weight.view(-1, *[1] * (ndim - place - 1))


@loss(F.cross_entropy)
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Any:
    """Of class numbers, or of probabilities for each class."""
    if _classes_cut(input) and not target.is_floating_point():
        scores = F.log_softmax(input, _class_dim(input))
        return _of_cut_classes(F.cross_entropy, scores, target, weight, ignore_index, label_smoothing)
    if not target.is_floating_point():
        return run_for(F.cross_entropy, _class_rule, input, target, weight, ignore_index, label_smoothing)
    if target.ndim == input.ndim - 1:
        raise ShardingError(
            f"cross_entropy in {here()}: the target {list(target.shape)} holds {target.dtype}, which torch "
            f"takes for probabilities of the shape {list(input.shape)}; for class numbers give integers: y.long()"
        )
    _same_shape("cross_entropy", input, target)
    if _classes_cut(input):
        return _of_cut_probabilities(F.log_softmax(input, _class_dim(input)), target, weight, label_smoothing)
    return run_rule(F.cross_entropy, _probability_rule, (input, target, weight, label_smoothing), {})


@loss(F.nll_loss)
def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Any:
    """Cross entropy of scores that are logarithms already."""
    if _classes_cut(input):
        return _of_cut_classes(F.nll_loss, input, target, weight, ignore_index, 0.0)
    return run_for(F.nll_loss, _class_rule, input, target, weight, ignore_index, 0.0)
