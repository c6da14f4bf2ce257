"""What users write around a model: on two ranks it gives one rank's numbers, or the library says why not."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from user_cases import Cases, cut, distributed, drawn

import halocline as hc
from halocline.testing import relative_error, shared_pool
from halocline.world import run_local

CASES = Cases()
case, refused = CASES.case, CASES.refused


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


@pytest.mark.parametrize("name", CASES.right)
def test_as_on_one_rank(name: str) -> None:
    CASES.check(name)


@pytest.mark.parametrize("name", CASES.refusals)
def test_refused_with_what_to_do(name: str) -> None:
    CASES.check_refused(name)
