"""Batch, instance, group, layer and RMS norm: which elements share statistics, and over which axes they lie."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.layout import memory_format_of
from ...tensor import ShardedTensor, current_module, entering, here, unwrap, wrap
from ...world import Label, Mesh, Route
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, read_whole
from ..table import composite, refuse, run_rule
from .channels import whole_channels
from .normalize import NARROW, NormLayout, normalize

#: A module with this attribute set to "replica" takes batch statistics of each data replica by itself, as DDP does.
STATISTICS = "_halocline_statistics"


def _axes_of(input: ShardedTensor, dims: Sequence[int]) -> frozenset[str]:
    return frozenset(cut.axis for d, cut in enumerate(input.sharding.cuts) if cut and d in dims)


def _route(mesh: Mesh, axes: frozenset[str], operation: str) -> Route | None:
    return Route(mesh.world, mesh.ranks_along(axes), Label(operation, here())) if axes else None


def _entering(input: ShardedTensor, parameter: Tensor | None) -> Tensor | None:
    """A whole parameter that enters work cut as ``input`` is: law 3."""
    if parameter is None:
        return parameter
    sharding = input.sharding
    return entering(parameter, sharding.mesh, sharding.axes, Label("a norm", here()))


def _check(function: Any, input: Any) -> None:
    if not isinstance(input, ShardedTensor):
        raise refuse(function, "its input is whole and another argument is cut", "shard the input, not the weights")


def _channel_affine(input: Operand, *parameters: Operand | None, **options: Any) -> Recipe:
    """With given statistics a norm is local: one scale and shift for each channel."""
    dims = tuple(range(input.ndim))
    links = tuple(WHOLE if d == 1 else Link(d) for d in dims)
    return Recipe(
        space=input.shape,
        reads=(Read(input, links), *(read_whole(p) for p in parameters if isinstance(p, Operand))),
        outputs=(Output(input.shape, tuple(None if d == 1 else d for d in dims)),),
        local=lambda work, tile, mean, var, weight, bias, eps: F.batch_norm(
            tile, mean, var, weight, bias, False, 0.0, eps
        ),
    )


def _given(input: Tensor, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    return run_rule(F.batch_norm, _channel_affine, (input, mean, var, weight, bias, eps), {})


@composite(F.batch_norm)
@whole_channels
def batch_norm(
    input: ShardedTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if not training:
        return _given(input, running_mean, running_var, weight, bias, eps)
    _check(F.batch_norm, input)
    sharding = input.sharding
    mesh = sharding.mesh
    replica = getattr(current_module(), STATISTICS, "global") == "replica"
    batch_axis = _axes_of(input, (0,)) if replica else frozenset()
    axes = sharding.axes - batch_axis
    count = prod(sharding.shape) // sharding.shape[1]
    if batch_axis:
        count = count // sharding.shape[0] * sharding.tile_shape[0]
    if count <= 1 and not replica:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(sharding.shape)}")
    tile = unwrap(input)
    layout = NormLayout(tuple(tile.shape), tile.shape[1], max(1, count), _route(mesh, axes, "batch_norm"))

    def track(mean: Tensor, var: Tensor) -> None:
        if running_mean is None or running_var is None:
            return
        unbiased = var * (count / max(1, count - 1))
        if batch_axis:
            mean, unbiased = _of_first_replica(mesh, batch_axis, mean, unbiased)
        _track(running_mean, running_var, mean, unbiased, momentum)

    return wrap(normalize(tile, _entering(input, weight), _entering(input, bias), eps, layout, track), sharding)


def _view(tile: Tensor) -> tuple[int, int, int]:
    return tile.shape[0], tile.shape[1], prod(tile.shape[2:])


def _track(running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, momentum: float) -> None:
    with torch.no_grad():
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        running_var.mul_(1 - momentum).add_(var.to(running_var.dtype), alpha=momentum)


def _of_first_replica(mesh: Mesh, axes: frozenset[str], mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Running statistics are those of replica 0 on every rank, as DDP's are."""
    first = all(mesh.coordinates[axis] == 0 for axis in axes)
    both = torch.stack((mean, var)) * float(first)
    mean, var = mesh.world.sum(both, mesh.ranks_along(axes), Label("batch_norm replica 0", here()))
    return mean, var


@composite(F.instance_norm)
@whole_channels
def instance_norm(
    input: ShardedTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if not use_input_stats:
        return _given(input, running_mean, running_var, weight, bias, eps)
    _check(F.instance_norm, input)
    sharding, tile = input.sharding, unwrap(input)
    batch, channels, _rest = _view(tile)
    count = prod(sharding.shape[2:])
    if count <= 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {list(sharding.shape)}")
    space = sharding.axes - _axes_of(input, (0,))
    route = _route(sharding.mesh, space, "instance_norm")
    layout = NormLayout((1, batch * channels, _rest), batch * channels, count, route)

    def track(mean: Tensor, var: Tensor) -> None:
        if running_mean is not None and running_var is not None:
            _track_instances(input, running_mean, running_var, mean, var * (count / (count - 1)), momentum)

    return wrap(normalize(tile, _repeated(input, weight), _repeated(input, bias), eps, layout, track), sharding)


def _repeated(input: ShardedTensor, parameter: Tensor | None) -> Tensor | None:
    """One value for each channel of each sample of this rank."""
    entered = _entering(input, parameter)
    # Not repeat: without samples its gradient is cut off, and this rank would miss the sums of the others.
    return None if entered is None else entered.expand(input.sharding.tile_shape[0], -1).reshape(-1).contiguous()


def _track_instances(
    input: ShardedTensor, running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, momentum: float
) -> None:
    """The average over the batch of each sample's statistics."""
    sharding = input.sharding
    both = torch.stack((mean, var)).view(2, -1, sharding.shape[1]).sum(1)
    ranks = sharding.mesh.ranks_along(_axes_of(input, (0,)))
    mean, var = sharding.mesh.world.sum(both, ranks, Label("instance_norm batch", here())) / sharding.shape[0]
    _track(running_mean, running_var, mean, var, momentum)


@composite(F.group_norm, torch.group_norm)
@whole_channels
def group_norm(
    input: ShardedTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    _check(F.group_norm, input)
    sharding, tile = input.sharding, unwrap(input)
    if sharding.shape[1] % num_groups:
        raise RuntimeError(f"Expected number of channels {sharding.shape[1]} to be divisible by {num_groups} groups")
    batch, channels, rest = _view(tile)
    count = prod(sharding.shape[1:]) // num_groups
    route = _route(sharding.mesh, sharding.axes - _axes_of(input, (0,)), "group_norm")
    layout = NormLayout((1, batch * channels, rest), batch * num_groups, count, route)
    made = normalize(tile, _repeated(input, weight), _repeated(input, bias), eps, layout)
    return wrap(made.contiguous(memory_format=memory_format_of(tile)), sharding)  # as torch's kernel leaves it


def _layer_rule(input: Operand, normalized_shape: tuple[int, ...], weight: Any, bias: Any, eps: float) -> Recipe:
    dims, last = tuple(range(input.ndim)), len(normalized_shape)
    links = tuple(WHOLE if d >= input.ndim - last else Link(d) for d in dims)
    return Recipe(
        space=input.shape,
        reads=(Read(input, links), *(read_whole(p) for p in (weight, bias) if isinstance(p, Operand))),
        outputs=(Output(input.shape, tuple(None if d >= input.ndim - last else d for d in dims)),),
        local=lambda work, tile, shape, w, b, e: F.layer_norm(tile, shape, w, b, e),
    )


@composite(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: ShardedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    shape = tuple(normalized_shape)
    _check(F.layer_norm, input)
    first = input.ndim - len(shape)
    dims = tuple(range(first, input.ndim))
    if not _axes_of(input, dims):
        return run_rule(F.layer_norm, _layer_rule, (input, shape, weight, bias, eps), {})
    if tuple(input.shape[first:]) != shape:
        raise RuntimeError(f"Given normalized_shape={list(shape)}, expected input to end so, got {list(input.shape)}")
    sharding, tile = input.sharding, unwrap(input)
    rows = prod(tile.shape[:first])
    route = _route(sharding.mesh, _axes_of(input, dims), "layer_norm")
    layout = NormLayout((1, rows, prod(tile.shape[first:])), rows, prod(shape), route)
    y: Tensor = wrap(normalize(tile, None, None, eps, layout), sharding)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@composite(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    shape = tuple(normalized_shape)
    dims = tuple(range(input.ndim - len(shape), input.ndim))
    if tuple(input.shape[-len(shape) :]) != shape or (weight is not None and tuple(weight.shape) != shape):
        raise RuntimeError(f"Given normalized_shape={list(shape)}, got input {list(input.shape)}; weight must match")
    wide = input.float() if input.dtype in NARROW else input
    small = torch.finfo(wide.dtype).eps if eps is None else eps
    y = wide * (wide.square().mean(dims, True) + small).rsqrt()
    return (y if weight is None else y * weight).to(input.dtype)


@composite(torch.batch_norm)
def torch_batch_norm(
    input: ShardedTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *options: Any, **named: Any
) -> Tensor:
    """torch's own names its parameters before its statistics."""
    return batch_norm(input, running_mean, running_var, weight, bias, *options, **_without_cudnn(named))


@composite(torch.instance_norm)
def torch_instance_norm(
    input: ShardedTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *options: Any, **named: Any
) -> Tensor:
    return instance_norm(input, running_mean, running_var, weight, bias, *options, **_without_cudnn(named))


def _without_cudnn(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name != "cudnn_enabled"}
