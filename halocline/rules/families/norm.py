"""Batch, instance, group, layer and RMS norm: which elements share statistics, and along which axes they lie.

A rule says over which dims statistics run and hands the executor a :class:`Reduced`; ``normalize.py`` has the local
computation. A norm takes one sum over ranks in each direction (in forward two, among many ranks).

Cut channels stay cut: each rank has the statistics, weights and gradients of its own. Where groups of channels lie
across a cut, the cut moves to a spatial dim for the call. With given statistics (evaluation) a norm is an affine map of
each channel, and nothing moves. Running statistics are the same on every rank: those of the global batch or, with
replica statistics, those of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Blocks
from ...tensor import ShardedTensor, current_module
from ..recipe import (
    Link,
    Operand,
    Output,
    Read,
    Recipe,
    Reduced,
    Tracking,
    Work,
    as_called,
    follow,
    per_tile,
    whole_operands,
)
from ..table import composite, refuse, run_rule
from .normalize import NARROW, Normalization

#: A module with this attribute set to "replica" takes batch statistics of each data replica by itself, as DDP does.
STATISTICS = "_halocline_statistics"


def _check(function: Any, *running: Any) -> None:
    """Raise for operands that must not be cut."""
    if any(isinstance(statistic, ShardedTensor) for statistic in running):
        raise refuse(function, "its running statistics are cut, and each rank updates all of them", "keep them whole")


def _channel_affine(input: Operand, *parameters: Operand | None, **options: Any) -> Recipe:
    """With given statistics a norm is local: one scale and shift for each channel."""

    def local(work: Work, tile: Tensor, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> Tensor:
        return F.batch_norm(tile, mean, var, weight, bias, False, 0.0, eps)

    of_channels = [follow(p, 1) for p in parameters if isinstance(p, Operand)]
    return Recipe(space=input.shape, reads=(follow(input), *of_channels), local=local)


def _given(input: Tensor, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    return run_rule(F.batch_norm, _channel_affine, (input, mean, var, weight, bias, eps), {})


@composite(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Training: statistics of each channel over the global batch, or over each replica's. Else an affine map."""
    if not training:
        return _given(input, running_mean, running_var, weight, bias, eps)
    _check(F.batch_norm, running_mean, running_var)
    # Set on the module by hc.distribute(statistics="replica").
    replica = getattr(current_module(), STATISTICS, "global") == "replica"
    call = (input, running_mean, running_var, weight, bias, momentum, eps, replica)
    return run_rule(F.batch_norm, _batch_rule, call, {}, by_value=False)


def _batch_rule(
    input: Operand, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float, replica: bool
) -> Recipe:
    """Statistics of each channel over batch and space; with ``replica`` over this rank's samples and their space."""
    shape = input.shape
    total = prod(shape) // shape[1]
    if total <= 1 and not replica:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(shape)}")

    def local(
        work: Work, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float, *_: Any
    ) -> Reduced:
        """The reduction for the executor to carry out, and the update of the running statistics."""
        batch = work.box[0]
        # Of a replica: this rank's samples only, all of their space.
        count = total // shape[0] * batch.size if replica else total

        def share(mean: Tensor, variance: Tensor) -> Tensor:
            """Of replicas, running statistics are those of the first on every rank, as DDP's are."""
            both = torch.stack((mean, variance * (count / max(1, count - 1))))
            both = both * float(batch.lo == 0 and batch.size > 0) if replica else both
            return _of_all_channels(both, work, shape[1])

        work_here = Normalization(max(1, count), tuple(x.shape), x.shape[1], eps)
        tracking = _tracking(mean, var, momentum, share)
        return Reduced(work_here, (x, weight, bias), tracking, alone if count > 1 else None)

    def alone(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)

    dims = {d for d in range(input.ndim) if d != 1}
    tracks = {0, 1} if replica else {1}
    return _norm(input, (weight, bias), local, dims - {0} if replica else dims, tracks, whole_operands(mean, var))


def _norm(
    input: Operand,
    parameters: tuple[Any, ...],
    local: Any,
    reduces: set[int],
    tracks: set[int],
    running: Sequence[Read] = (),
    whole_channels: bool = False,
    together: int = 1,
) -> Recipe:
    """Weights follow the channels, of which ``together`` make a group. A cut that must move never moves to the batch,
    whose axis tells replicas apart.
    """
    uncut, channels = {1} if whole_channels else set(), Link(1, Blocks(together, together))
    return per_tile(
        input,
        local,
        *running,
        *(Read(parameter, (channels,)) for parameter in parameters if isinstance(parameter, Operand)),
        uncut=frozenset(uncut if 0 in input.cut_dims else {0, *uncut}) if uncut else frozenset(),
        reduces=frozenset(reduces),
        tracks=frozenset(tracks),
        keeps_cut=whole_channels,
    )


def _of_all_channels(both: Tensor, work: Work, channels: int) -> Tensor:
    """Statistics of this rank's channels, with zeros for those of other ranks: ranks that cut channels add them up."""
    own = work.box[1]
    if own.size == channels:
        return both
    every = both.new_zeros(2, channels)
    every[:, own.lo : own.hi] = both
    return every


def _tracking(
    running_mean: Tensor | None, running_var: Tensor | None, momentum: float, share: Callable[[Tensor, Tensor], Tensor]
) -> Tracking | None:
    """The update of running statistics; None where the module keeps none."""
    if running_mean is None or running_var is None:
        return None

    def update(both: Tensor) -> None:
        with torch.no_grad():
            for running, value in zip((running_mean, running_var), both, strict=True):
                running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)

    return Tracking(share, update)


@composite(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Statistics of each channel of each sample; running ones are averaged over the global batch."""
    if not use_input_stats:
        return _given(input, running_mean, running_var, weight, bias, eps)
    _check(F.instance_norm, running_mean, running_var)
    call = (input, running_mean, running_var, weight, bias, momentum, eps)
    return run_rule(F.instance_norm, _instance_rule, call, {}, by_value=False)


def _instance_rule(input: Operand, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float) -> Recipe:
    """Statistics of each channel of each sample over space."""
    shape, count = input.shape, prod(input.shape[2:])
    if count <= 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {list(shape)}")

    def local(
        work: Work, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float
    ) -> Reduced:
        def share(mean: Tensor, variance: Tensor) -> Tensor:
            """The average over the batch of each sample's statistics."""
            both = torch.stack((mean, variance * (count / (count - 1))))
            own = both.view(2, x.shape[0], x.shape[1]).sum(1) / shape[0]
            return _of_all_channels(own, work, shape[1])

        samples = x.shape[0] * x.shape[1]
        work_here = Normalization(count, (1, samples, prod(x.shape[2:])), samples, eps)
        return Reduced(work_here, (x, *_repeated(x, weight, bias)), _tracking(mean, var, momentum, share))

    reduces, running = set(range(2, input.ndim)), whole_operands(mean, var)
    return _norm(input, (weight, bias), local, reduces, {0, 1}, running)


def _repeated(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """One value for each channel of each sample of this rank."""
    # Not repeat: without samples its gradient is cut off, and this rank would miss the sums of the others.
    return [None if p is None else p.expand(x.shape[0], -1).reshape(-1).contiguous() for p in parameters]


@composite(F.group_norm, torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Statistics of each group of channels of each sample. Groups across a cut are brought together."""
    points = input.sharding.cuts[1].partition.points if 1 in _cut_dims(input) else ()  # type: ignore[attr-defined]
    members = max(1, input.shape[1] // num_groups)
    across = num_groups > 1 and any(point % members for point in points)
    return run_rule(F.group_norm, _group_rule, (input, num_groups, weight, bias, eps, across), {})


def _cut_dims(input: Tensor) -> Collection[int]:
    """The dims along which a tensor is cut; of a plain one none."""
    return input.sharding.dims_by_axis() if isinstance(input, ShardedTensor) else ()


def _group_rule(input: Operand, groups: int, weight: Any, bias: Any, eps: float, across: bool) -> Recipe:
    """Statistics of each group of channels of each sample over space, and over channels if they are one group."""
    channels = input.shape[1]
    if channels % groups:
        raise RuntimeError(f"Expected number of channels {channels} to be divisible by {groups} groups")
    count = prod(input.shape[1:]) // groups

    def local(work: Work, x: Tensor, groups: int, weight: Any, bias: Any, eps: float, *_: Any) -> Reduced:
        batch, view = x.shape[0], (1, x.shape[0] * x.shape[1], prod(x.shape[2:]))
        own = 1 if groups == 1 else x.shape[1] * groups // channels
        return Reduced(Normalization(count, view, batch * own, eps, True), (x, *_repeated(x, weight, bias)))

    reduces, together = set(range(1 if groups == 1 else 2, input.ndim)), 1 if groups == 1 else channels // groups
    return _norm(input, (weight, bias), local, reduces, set(), whole_channels=across, together=together)


def _layer_rule(input: Operand, normalized_shape: tuple[int, ...], weight: Any, bias: Any, eps: float) -> Recipe:
    """torch's own kernel: the normalised dims are read whole, all others keep their cuts."""
    last = len(normalized_shape)
    dims = tuple(None if dim >= input.ndim - last else dim for dim in range(input.ndim))
    return Recipe(
        space=input.shape,
        reads=(follow(input, *dims), *whole_operands(weight, bias)),
        outputs=(Output(input.shape, dims),),
        local=as_called(F.layer_norm),
    )


def _rms_rule(input: Operand, normalized_shape: tuple[int, ...], weight: Any, eps: float | None) -> Recipe:
    """torch's own kernel on whole normalised dims, as for layer norm."""
    return replace(_layer_rule(input, normalized_shape, weight, None, 0.0), local=as_called(F.rms_norm))


def _cut_layer_rule(input: Operand, normalized_shape: tuple[int, ...], eps: float) -> Recipe:
    """Statistics of each row, where a normalised dim is cut and may stay so."""
    first = input.ndim - len(normalized_shape)
    if input.shape[first:] != normalized_shape:
        wanted, got = list(normalized_shape), list(input.shape)
        raise RuntimeError(f"Given normalized_shape={wanted}, expected input to end so, got {got}")

    def local(work: Work, x: Tensor, *_: Any) -> Reduced:
        rows = prod(x.shape[:first])
        view = (1, rows, prod(x.shape[first:]))
        return Reduced(Normalization(prod(normalized_shape), view, rows, eps), (x, None, None))

    return _norm(input, (), local, set(range(first, input.ndim)), set())


@composite(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Local where the normalised dims are whole; else statistics over the axes that cut them."""
    shape = tuple(normalized_shape)
    if len(shape) > input.ndim or all(dim < input.ndim - len(shape) for dim in _cut_dims(input)):
        return run_rule(F.layer_norm, _layer_rule, (input, shape, weight, bias, eps), {})
    wide = input.float() if input.dtype in NARROW else input  # as in torch's kernel, rounded once
    y: Tensor = run_rule(F.layer_norm, _cut_layer_rule, (wide, shape, eps), {})
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(F.layer_norm(torch.zeros(1, dtype=input.dtype, device=input.device), (1,)).dtype)  # autocast decides


@composite(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch's own where the normalised dims are whole; else a mean of squares, written with torch functions."""
    shape = tuple(normalized_shape)
    dims = tuple(range(input.ndim - len(shape), input.ndim))
    if tuple(input.shape[-len(shape) :]) != shape or (weight is not None and tuple(weight.shape) != shape):
        raise RuntimeError(f"Given normalized_shape={list(shape)}, got input {list(input.shape)}; weight must match")
    if all(dim < dims[0] for dim in _cut_dims(input)):  # cut weights are gathered, and features stay whole
        return run_rule(F.rms_norm, _rms_rule, (input, shape, weight, eps), {})
    wide = input.float() if input.dtype in NARROW else input
    small = torch.finfo(wide.dtype).eps if eps is None else eps
    y = wide * (wide.square().mean(dims, True) + small).rsqrt()
    return (y if weight is None else y * weight).to(input.dtype)


def _parameters_first(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's own functions take weight and bias before the statistics, and a flag for cuDNN."""

    def call(
        input: Tensor,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        *options: Any,
        cudnn_enabled: bool = True,
        **named: Any,
    ) -> Tensor:
        return run(input, running_mean, running_var, weight, bias, *options, **named)

    return call


composite(torch.batch_norm, family="norm")(_parameters_first(batch_norm))
composite(torch.instance_norm, family="norm")(_parameters_first(instance_norm))
