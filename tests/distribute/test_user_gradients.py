"""Gradients of whole intermediate results, checkpoints, second derivatives: one rank's numbers on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from user_cases import Cases, cut, distributed, drawn

import halocline as hc

CASES = Cases()
case, refused = CASES.case, CASES.refused


# ---- gradients of whole intermediate results ----


@case
def grad_by_a_whole_intermediate(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Linear(3, 4), mesh)
    s = model(drawn(2, 3))
    y = cut(drawn(2, 4, 8, 6), mesh) * s[:, :, None, None]
    return [*torch.autograd.grad(y.square().sum(), s)]


@case
def grad_by_one_that_is_used_cut_and_whole(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Linear(3, 4), mesh)
    s = model(drawn(2, 3))
    y, z = cut(drawn(2, 4, 8), mesh) * s[:, :, None], cut(drawn(2, 4, 6), mesh) + s.exp()[:, :, None]
    return [*torch.autograd.grad(y.square().sum() + z.pow(3).sum() + s.sin().sum(), s)]


@case
def second_derivative_by_a_whole_intermediate(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Linear(3, 4), mesh)
    s = model(drawn(2, 3))
    y = cut(drawn(2, 4, 8), mesh) * s[:, :, None]
    (slope,) = torch.autograd.grad(y.pow(3).sum(), s, create_graph=True)
    return [slope, *torch.autograd.grad(slope.square().sum(), model.weight)]


@case
def retain_grad_of_a_whole_intermediate(mesh: hc.Mesh | None) -> list[Tensor]:
    model, x = distributed(nn.Conv2d(3, 3, 1), mesh), cut(drawn(2, 3, 8, 6), mesh)
    pooled = model(x).mean((2, 3))
    pooled.retain_grad()
    (x * pooled[:, :, None, None]).square().sum().backward()
    return [pooled.grad, model.weight.grad]


@case
def a_hook_that_clips_a_whole_intermediate(mesh: hc.Mesh | None) -> list[Tensor]:
    model, x = distributed(nn.Conv2d(3, 3, 1, bias=False), mesh), cut(drawn(2, 3, 8, 6), mesh)
    pooled = model(x).mean((2, 3))
    pooled.register_hook(lambda gradient: gradient.clamp(-5, 5))
    (x * pooled.reshape(2, 3, 1, 1)).square().sum().backward()
    gate = model(x).mean((2, 3), keepdim=True)
    gate.register_hook(lambda gradient: gradient.clamp(-5, 5))
    (x * gate).square().sum().backward()
    return [model.weight.grad]


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-5, 5)


@case
def a_hook_registered_before_use(mesh: hc.Mesh | None) -> list[Tensor]:
    model, seen = distributed(nn.Linear(3, 4), mesh), []
    s = model(drawn(2, 3)).reshape(2, 4, 1)
    s.register_hook(lambda g: seen.append(g) or g.clamp(-1, 1))
    (cut(drawn(2, 4, 8), mesh) * s).square().sum().backward()
    return [*seen, model.weight.grad]


@case
def a_whole_intermediate_written_between_uses(mesh: hc.Mesh | None) -> list[Tensor]:
    model, x = distributed(nn.Linear(3, 4), mesh), cut(drawn(2, 4, 8), mesh)
    s, t = model(drawn(2, 3)).reshape(2, 4, 1), model(drawn(2, 3, seed=1)).reshape(2, 4, 1).sin()
    y = x + s
    s += t
    return [*torch.autograd.grad(y.sum() + (x * s).square().sum(), t)]


@case
def a_function_that_clips_a_whole_intermediate(mesh: hc.Mesh | None) -> list[Tensor]:
    model, x = distributed(nn.Conv2d(3, 3, 1, bias=False), mesh), cut(drawn(2, 3, 8, 6), mesh)
    pooled = Clip.apply(model(x).mean((2, 3)))
    (x * pooled[:, :, None, None]).square().sum().backward()
    return [model.weight.grad]


class Scale(torch.autograd.Function):
    """Named like one of the library's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


@refused("nobody averages its gradient")
def a_function_of_a_familiar_name_hides_no_leaf(mesh: hc.Mesh | None) -> list[Tensor]:
    leaf = drawn(3, 1, 1).requires_grad_()
    (cut(drawn(2, 3, 8, 6), mesh) * Scale.apply(leaf)).square().sum().backward()
    return []


# ---- checkpoints, empty tiles, second derivatives ----


@case
def running_statistics_of_a_checkpoint_that_ends_in_batch_norm(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)), mesh)
    x = drawn(2, 3, 8, 6).requires_grad_()
    made = checkpoint(model, cut(x, mesh), use_reentrant=False)
    (made.square() * cut(drawn(2, 3, 8, 6, seed=2), mesh)).sum().backward()
    return [model[1].running_mean, model[1].running_var, x.grad]


@case
def a_checkpointed_pool_to_fewer_rows_than_ranks(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.AvgPool2d(2)), mesh)
    checkpoint(model, cut(drawn(2, 2, 2, 4), mesh).requires_grad_(), use_reentrant=False).square().sum().backward()
    return [model[0].weight.grad]


@case
def a_checkpoint_whose_first_layer_needs_no_gradient_of_its_input(mesh: hc.Mesh | None) -> list[Tensor]:
    layers = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())
    model = distributed(layers, mesh)
    checkpoint(model, cut(drawn(2, 2, 3, 4), mesh), use_reentrant=False).square().sum().backward()
    return [model[0].weight.grad, model[2].weight.grad]


@case
def a_reentrant_checkpoint_that_pools_to_a_whole_result(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.ModuleList([nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)]), mesh)
    hidden = model[0](cut(drawn(2, 3, 8, 6), mesh))
    checkpoint(lambda h: model[1](h).mean((2, 3)), hidden, use_reentrant=True).square().sum().backward()
    return [model[0].weight.grad, model[1].weight.grad]


@case
def a_reentrant_checkpoint_that_ends_in_a_row(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Conv2d(3, 3, 3, padding=1), mesh)
    row = checkpoint(lambda x: model(x)[:, :, 0], cut(drawn(2, 3, 8, 6), mesh).requires_grad_(), use_reentrant=True)
    (row.square().sum() + model.weight.sum()).backward()
    return [model.weight.grad]


@case
def a_gradient_penalty_through_a_pool_that_leaves_a_rank_nothing(mesh: hc.Mesh | None) -> list[Tensor]:
    model = distributed(nn.Conv2d(1, 2, 3, padding=1, bias=False), mesh)
    x = cut(drawn(2, 1, 5, 4), mesh).requires_grad_()
    (slope,) = torch.autograd.grad(F.max_pool2d(model(x), 2).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [model.weight.grad]


@case
def a_deep_critic_with_a_gradient_penalty(mesh: hc.Mesh | None) -> list[Tensor]:
    """Five strides of two on eight rows: most ranks run empty on the way."""
    layers = [m for _ in range(4) for m in (nn.Conv2d(2, 2, 4, 2, 1), nn.InstanceNorm2d(2), nn.LeakyReLU(0.2))]
    model = distributed(nn.Sequential(*layers[:-2], nn.Conv2d(2, 1, 1)), mesh)
    x = cut(drawn(2, 2, 16, 18), mesh).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((slope.square().sum((1, 2, 3)) + 1e-6).sqrt() - 1).square().mean().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@case
def a_sum_that_each_rank_uses_in_its_own_way(mesh: hc.Mesh | None) -> list[Tensor]:
    """As local batches do: the loss is the mean of the ranks' losses."""
    model = distributed(nn.Linear(3, 1), mesh)
    total = model(cut(drawn(2, 4, 3), mesh, 1)).square().sum()
    own = 3.5 if mesh is None else (2.0, 5.0)[mesh.rank]
    (total.square() * own).backward()
    return [model.weight.grad, model.bias.grad]


@pytest.mark.parametrize("name", CASES.right)
def test_as_on_one_rank(name: str) -> None:
    CASES.check(name)


@pytest.mark.parametrize("name", CASES.refusals)
def test_refused_with_what_to_do(name: str) -> None:
    CASES.check_refused(name)
