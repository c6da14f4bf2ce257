"""What users write around a model: on two ranks it gives one rank's numbers, or the library says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.testing import relative_error, shared_pool
from halocline.world import run_local

Case = Callable[[hc.Mesh | None], list[Tensor]]
CASES: dict[str, Case] = {}
REFUSED: dict[str, tuple[str, Case]] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def refused(match: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        REFUSED[function.__name__] = match, function
        return function

    return keep


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(x: Tensor, mesh: hc.Mesh | None, dim: int = 2) -> Tensor:
    return x if mesh is None else hc.shard(x, mesh, {dim: "a"})


def distributed(model: nn.Module, mesh: hc.Mesh | None, **options: Any) -> Any:
    model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=5 + number))
    return model if mesh is None else hc.distribute(model, mesh, **options)


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


# ---- norms with channels last and one sample ----


@case
def batch_norm_of_one_sample_with_channels_last(mesh: hc.Mesh | None) -> list[Tensor]:
    norm = distributed(nn.BatchNorm2d(4), mesh)
    x = drawn(1, 4, 8, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    F.cross_entropy(norm(cut(x, mesh)), torch.zeros(1, 8, 6, dtype=torch.long)).backward()
    return [x.grad, norm.weight.grad]


@case
def batch_norm_of_a_batch_cut_to_one_with_channels_last(mesh: hc.Mesh | None) -> list[Tensor]:
    norm = distributed(nn.BatchNorm2d(4), mesh)
    x = drawn(2, 4, 8, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    F.cross_entropy(norm(cut(x, mesh, 0)), torch.zeros(2, 8, 6, dtype=torch.long)).backward()
    return [x.grad, norm.weight.grad]


@case
def batch_norm_after_a_pool_with_channels_last(mesh: hc.Mesh | None) -> list[Tensor]:
    form = torch.channels_last_3d
    model = distributed(nn.Sequential(nn.MaxPool3d(2), nn.BatchNorm3d(4), nn.Conv3d(4, 4, 3, padding=1)), mesh)
    x = drawn(1, 4, 8, 8, 8).contiguous(memory_format=form).requires_grad_()
    model.to(memory_format=form)(cut(x, mesh)).square().sum().backward()
    return [x.grad, model[1].weight.grad]


def test_instance_norm_is_right_where_torch_is_not() -> None:
    """On one CPU rank torch's backward is wrong for one sample whose gradient has channels last; ours is right."""
    x, seed = drawn(1, 4, 8, 6), drawn(1, 4, 8, 6, seed=1)
    true = x.clone().requires_grad_()
    F.instance_norm(true).backward(seed)

    def on_rank() -> Tensor:
        mesh = hc.Mesh(a=2)
        last, seeds = (t.contiguous(memory_format=torch.channels_last) for t in (x, seed))
        leaf = last.requires_grad_()
        F.instance_norm(hc.shard(leaf, mesh, {2: "a"})).backward(hc.shard(seeds, mesh, {2: "a"}))
        return leaf.grad

    assert max(relative_error(grad, true.grad) for grad in run_local(2, on_rank)) < 1e-12


# ---- writes ----


@case
def writes_to_parts(mesh: hc.Mesh | None) -> list[Tensor]:
    y, rows, one = cut(drawn(2, 3, 8, 6), mesh) * 1, cut(drawn(4, 3), mesh, 0) * 1, cut(drawn(1, 3, 8, 6), mesh) * 1
    y[:, :, 0] += 1
    y[:, :, 5, 1] *= 3
    y[y > 0] *= 2
    y.select(2, 3).mul_(4)
    rows[::2] += 1
    one[:, 0] *= 2
    return [y, rows, one]


@case
def a_written_row_has_its_gradient(mesh: hc.Mesh | None) -> list[Tensor]:
    leaf = drawn(2, 3, 8, 6).requires_grad_()
    y = cut(leaf, mesh) * 1
    y[:, :, 0] *= y[:, :, 7] + 2
    y.square().sum().backward()
    return [leaf.grad]


@case
def a_write_through_data_is_unseen_by_autograd(mesh: hc.Mesh | None) -> list[Tensor]:
    x = drawn(1, 4, 8).requires_grad_()
    y = cut(x, mesh).sin().relu()
    y.data.mul_(2)
    y.sum().backward()
    return [x.grad, y]


@refused("base was changed in place")
def a_moved_row_after_a_write_through_data(mesh: hc.Mesh | None) -> list[Tensor]:
    y = cut(drawn(2, 3, 8), mesh) * 1
    row = y[:, :, 0]
    y.data.mul_(2)
    return [row + 1]


@refused("tile for the whole tensor")
def data_of_a_whole_tensor_set_to_a_cut_one(mesh: hc.Mesh | None) -> list[Tensor]:
    buffer = torch.zeros(3, 8, 6, dtype=torch.float64)
    buffer.data = cut(drawn(2, 3, 8, 6), mesh).mean(0)
    return [buffer.mean()]


@refused("tile for the whole tensor")
def a_tile_handed_out_by_dlpack(mesh: hc.Mesh | None) -> list[Tensor]:
    return [torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(cut(drawn(2, 3, 8), mesh)))]


# ---- resampling, autocast, other transforms ----


@case
def what_is_not_finite_spreads_no_further(mesh: hc.Mesh | None) -> list[Tensor]:
    x = drawn(1, 1, 8, 6)
    x[0, 0, 3, 2] = float("nan")
    made = [F.interpolate(cut(x, mesh, dim), [13, 9], mode=m) for m in ("bicubic", "bilinear") for dim in (2, 3)]
    return [hc.gather(y.isnan().double()) for y in made]


@case
def antialiasing_to_one_row(mesh: hc.Mesh | None) -> list[Tensor]:
    x = cut(drawn(1, 2, 8, 3), mesh, 3)
    return [F.interpolate(x, size=[1, 10], mode="bilinear", align_corners=True, antialias=True)]


@case
def unshuffling_nothing(mesh: hc.Mesh | None) -> list[Tensor]:
    return [torch.tensor(F.pixel_unshuffle(cut(drawn(2, 2, 24, 2), mesh)[..., :0], 2).shape).double()]


@case
def products_under_autocast(mesh: hc.Mesh | None) -> list[Tensor]:
    x, row = cut(drawn(2, 4, 3, 6).float(), mesh), drawn(2, 6, 6).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = [
            torch.einsum("bchw,bchv->bcwv", x, x),
            F.bilinear(x, x, row),
            torch.tensordot(x, x, 4),
            torch.addmm(row[0, :1], x.flatten(0, 2), row[0]),
        ]
    return [y.mul(0).double() + y.element_size() for y in made]


def forward_mode(mesh: hc.Mesh | None) -> list[Tensor]:
    one = torch.ones((), dtype=torch.float64)
    with forward_ad.dual_level():
        total = (cut(drawn(1, 3, 4, 3), mesh) * forward_ad.make_dual(one * 1.3, one)).square().sum()
        return [forward_ad.unpack_dual(total).tangent]


def forward_mode_on_a_rank() -> tuple[list[Tensor], str]:
    mesh, one = hc.Mesh(a=2), torch.ones((), dtype=torch.float64)
    norm = distributed(nn.BatchNorm2d(3), mesh)
    with forward_ad.dual_level(), pytest.raises(hc.Refused) as refusal:
        norm(cut(drawn(1, 3, 4, 3), mesh) * forward_ad.make_dual(one, one))
    return forward_mode(mesh), str(refusal.value)


def test_forward_mode_through_movements_and_not_through_norms() -> None:
    """On processes: torch has one level of forward mode in a process."""
    for tangents, refusal in shared_pool(2).run(forward_mode_on_a_rank, deadline=60):
        assert relative_error(tangents[0], forward_mode(None)[0]) < 1e-12
        assert "has no forward derivative" in refusal


@refused("a transform of torch.func")
def a_functional_call_under_grad(mesh: hc.Mesh | None) -> list[Tensor]:
    model, x = distributed(nn.Conv2d(3, 2, 3, padding=1), mesh), cut(drawn(1, 3, 4, 3), mesh)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return [*torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights).values()]


@refused("call the model once on a small plain tensor")
def a_lazy_module(mesh: hc.Mesh | None) -> list[Tensor]:
    hc.distribute(nn.Sequential(nn.LazyConv2d(4, 3)), mesh)
    return []


def plain(values: list[Tensor]) -> list[Tensor]:
    return [hc.gather(value.detach()) for value in values]


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_rank(name: str) -> None:
    true = plain(CASES[name](None))
    scale = max(float(value.abs().max()) for value in true)  # a bias before a norm has a gradient of rounding alone
    for rank in run_local(2, lambda: plain(CASES[name](hc.Mesh(a=2)))):
        assert len(rank) == len(true)
        assert max(relative_error(a, b, scale) for a, b in zip(rank, true, strict=True)) < 1e-9


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_do(name: str) -> None:
    match, run = REFUSED[name]

    def on_rank() -> None:
        with pytest.raises(hc.Refused, match=match):
            run(hc.Mesh(a=2))

    run_local(2, on_rank)
