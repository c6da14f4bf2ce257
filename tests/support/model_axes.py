"""Layouts of a model's parameters, enumerated or drawn, and their comparison with the untouched model on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import halocline as hc
from halocline.testing.compare import relative_error
from halocline.world import run_local

Layout = dict[str, dict[int, str]]
Loss = Callable[[Any], Tensor]


def cuts_of(ndim: int, axes: Sequence[str]) -> list[dict[int, str]]:
    """Every way to cut a tensor: each axis cuts one dim or none, and each dim is cut by one axis at most."""
    places = product([None, *range(ndim)], repeat=len(axes))
    made = [{dim: axis for axis, dim in zip(axes, where, strict=True) if dim is not None} for where in places]
    wanted = product([None, *range(ndim)], repeat=len(axes))
    return [cut for cut, where in zip(made, wanted, strict=True) if len(cut) == sum(dim is not None for dim in where)]


def layouts(model: nn.Module, axes: Sequence[str]) -> Iterator[Layout]:
    """Every layout of a model's parameters over these axes."""
    names = {name: parameter.ndim for name, parameter in model.named_parameters()}
    for cuts in product(*(cuts_of(ndim, axes) for ndim in names.values())):
        yield dict(zip(names, cuts, strict=True))


def drawn(model: nn.Module, axes: Sequence[str], count: int, seed: int = 0) -> list[Layout]:
    """Some of them, at random."""
    random = Random(seed)
    names = {name: cuts_of(parameter.ndim, axes) for name, parameter in model.named_parameters()}
    return [{name: random.choice(cuts) for name, cuts in names.items()} for _ in range(count)]


def mean_square(output: Any) -> Tensor:
    """A loss that no norm makes constant."""
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([((each + 0.3) ** 2).mean() for each in outputs if isinstance(each, Tensor)]).sum()


def gradients(model: nn.Module, inputs: Sequence[Any], loss: Loss, twice: bool) -> dict[str, Tensor]:
    """The loss, the gradient of every parameter and, with ``twice``, that of a penalty on the gradients."""
    found: dict[str, Tensor] = {"loss": loss(model(*inputs))}
    found["loss"].backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found |= {name: hc.gather(p.grad).clone() for name, p in named.items() if p.grad is not None}
    if twice:
        model.zero_grad()
        first = torch.autograd.grad(loss(model(*inputs)), list(named.values()), create_graph=True, allow_unused=True)
        torch.stack([g.square().sum() for g in first if g is not None]).sum().backward()
        found |= {f"{n} twice": hc.gather(p.grad).clone() for n, p in named.items() if p.grad is not None}
    return {name: each.detach() for name, each in found.items()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Its buffers, which must be those of one rank."""
    return {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}


def compared(
    model: nn.Module,
    inputs: Sequence[Tensor],
    mesh: Mapping[str, int],
    layout: Layout,
    dims: Mapping[int, str] | Sequence[Mapping[int, str]] = {},
    loss: Loss = mean_square,
    twice: bool = False,
    **options: Any,
) -> float:
    """The largest relative error of loss, gradients and buffers on any rank, against the untouched model."""
    plain = copy.deepcopy(model)
    true = gradients(plain, inputs, loss, twice) | buffers(plain)
    scale = max(each.abs().max().item() for name, each in true.items() if each.is_floating_point())

    def body() -> dict[str, Tensor]:
        ranks = hc.Mesh(**dict(mesh))
        cut = hc.distribute(copy.deepcopy(model), ranks, layout=layout, **options)
        each = [dims] * len(inputs) if isinstance(dims, Mapping) else dims
        placed = [hc.shard(x, ranks, own) if own else x for x, own in zip(inputs, each, strict=True)]
        return gradients(cut, placed, loss, twice) | buffers(cut)

    results = run_local(prod(mesh.values()), body)
    worst = 0.0
    for found in results:
        assert set(found) == set(true), set(found) ^ set(true)
        worst = max([worst, *(relative_error(found[name], true[name], scale) for name in true)])
    return worst
