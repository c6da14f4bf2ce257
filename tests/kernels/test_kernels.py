"""Kernels in chunks give what torch gives at once: value, gradient, gradient of the gradient, at any chunk size."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import derivatives, same
from ranges import often
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.kernels import convolution
from halocline.testing import check_rule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CHUNKS = (1, 7, 40, 300)  # elements: less than a kernel, less than a row, a slab or two
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def random_convolution(rng: random.Random, device: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function and its operands; torch may refuse the sizes."""
    dims, groups = rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
    into, out = groups * rng.choice([1, 2, 3]), groups * rng.choice([1, 2, 3])
    kernel, stride, dilation, padding = (
        [rng.choice(values) for _ in range(dims)] for values in ([1, 2, 3, 4], [1, 1, 2, 3], [1, 1, 2], [0, 1, 2, 3])
    )
    spatial = [rng.choice([3, 5, 8, 11]) for _ in range(dims)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(device)

    x, bias = draw(rng.choice([1, 2]), into, *spatial), draw(out)
    if dims > 1 and rng.random() < 0.5:
        x = x.contiguous(memory_format=LAST[dims + 2])
    if rng.random() < 0.5:
        extra = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        call = getattr(F, f"conv_transpose{dims}d")
        return lambda x, w, b: call(x, w, b, stride, padding, extra, groups, dilation), [
            x,
            draw(into, out // groups, *kernel),
            bias,
        ]
    call = getattr(F, f"conv{dims}d")
    return lambda x, w, b: call(x, w, b, stride, padding, dilation, groups), [
        x,
        draw(out, into // groups, *kernel),
        bias,
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
def test_convolutions_of_all_kinds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rng, valid, setups = random.Random(5), 0, often(100)
    cut: list[int] = []
    parts = convolution._in_parts

    def counting(*args: object) -> Tensor:
        cut.append(1)
        return parts(*args)

    monkeypatch.setattr(convolution, "_in_parts", counting)
    for _ in range(setups):
        function, operands = random_convolution(rng, device)
        try:
            true = derivatives(function, *operands)
        except RuntimeError:  # sizes that torch refuses
            continue
        valid += 1
        with hc.chunked(rng.choice(CHUNKS)):
            same(derivatives(function, *operands), true)
    assert valid > setups / 2 and len(cut) > 4 * valid  # most are cut in forward, backward and beyond


BY_CHANNEL: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool3d": lambda x: F.max_pool3d(x, 3, 2, 1),
    "max_pool3d ceil": lambda x: F.max_pool3d(x, 2, ceil_mode=True),
    "max_pool2d": lambda x: F.max_pool2d(x.flatten(3), 2),
    "unpooled": lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2, output_size=x.shape),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d": lambda x: F.avg_pool2d(x.flatten(3), 2),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, 3),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "nearest exact": lambda x: F.interpolate(x, size=(9, 5, 4), mode="nearest-exact"),
    "trilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"),
    "bilinear": lambda x: F.interpolate(x.flatten(3), scale_factor=2.0, mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x.flatten(3), scale_factor=2.0, mode="bicubic"),
    "linear": lambda x: F.interpolate(x.flatten(2), size=50, mode="linear"),
    "reflect": lambda x: F.pad(x, [1, 2, 0, 1, 3, 1], mode="reflect"),
    "replicate": lambda x: F.pad(x, [1, 2, 0, 1, 3, 1], mode="replicate"),
    "reflect 2d": lambda x: F.pad(x.flatten(3), [1, 2, 0, 1], mode="reflect"),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance norm": lambda x: F.instance_norm(x),
    "group norm": lambda x: F.group_norm(x.flatten(1, 2), 6),
    "group norm of one group": lambda x: F.group_norm(x, 1),
    "without batch": lambda x: F.max_pool3d(x[0], 2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", BY_CHANNEL)
def test_what_goes_by_channel(name: str, last: bool, device: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 6, 5, 4, dtype=torch.float64).to(device)
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    true = derivatives(BY_CHANNEL[name], x)
    for elements in (1, 130, 250, 500):
        with hc.chunked(elements):
            same(derivatives(BY_CHANNEL[name], x), true)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [nn.BatchNorm3d(6), nn.GroupNorm(3, 6), nn.InstanceNorm3d(6, affine=True)], ids=str)
def test_norms_with_weights_far_from_zero(norm: nn.Module, device: str) -> None:
    """A mean a thousand times the spread: sums must be taken about it."""
    torch.manual_seed(6)
    norm = norm.double().to(device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 6, 5, 4, 3, dtype=torch.float64).to(device) + 1000

    def of(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in norm.named_parameters()]
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    true = derivatives(of, x, *norm.parameters())
    with hc.chunked(100):
        same(derivatives(of, x, *norm.parameters()), true, 1e-8)


def test_batch_norm_keeps_its_running_statistics() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 5, 6, 4, 3, dtype=torch.float64)
    whole_norm, cut_norm = (nn.BatchNorm3d(5).double() for _ in range(2))
    for _ in range(3):
        true = whole_norm(x)
        with hc.chunked(200):
            found = cut_norm(x)
    same(
        [found.detach(), cut_norm.running_mean, cut_norm.running_var], [true.detach(), *list(whole_norm.buffers())[:2]]
    )
    whole_norm.eval()
    cut_norm.eval()
    true = derivatives(whole_norm, x)
    with hc.chunked(200):
        same(derivatives(cut_norm, x), true)


class Small(nn.Module):
    """Used twice: its first map goes into a skip and on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.down = nn.Conv3d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.last = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.first(x)))
        deep = F.max_pool3d(F.relu(self.down(skip)), 3, 1, 1)
        return self.last(torch.cat([skip, self.up(deep)], 1))


def gradients(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = (model if forward is None else forward)(x)
    output.square().mean().backward()
    return [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item]


def sample_and_model(dtype: torch.dtype = torch.float64) -> tuple[Small, Tensor]:
    torch.manual_seed(3)
    return Small().to(dtype), torch.randn(1, 2, 8, 6, 10, dtype=dtype)


@pytest.mark.parametrize("elements", [50, 400, 1000])
def test_a_network(elements: int) -> None:
    model, x = sample_and_model()
    true = gradients(model, x)
    with hc.chunked(elements):
        same(gradients(model, x), true)


def test_a_network_with_channels_last_keeps_them() -> None:
    model, x = sample_and_model()
    true = gradients(model, x)
    model = model.to(memory_format=torch.channels_last_3d)
    with hc.chunked(300):
        x = x.contiguous(memory_format=torch.channels_last_3d)
        assert model.first(x).is_contiguous(memory_format=torch.channels_last_3d)
        same(gradients(model, x), true)


def test_a_checkpointed_network() -> None:
    model, x = sample_and_model()
    model.eval()  # recomputing would track the statistics twice, chunks or not
    true = gradients(model, x)
    with hc.chunked(300):
        same(gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False)), true)


def test_without_gradients_and_in_inference_mode() -> None:
    model, x = sample_and_model()
    model.eval()
    true = model(x).detach()
    with hc.chunked(300), torch.no_grad():
        same([model(x)], [true])
    with hc.chunked(300), torch.inference_mode():
        same([model(x)], [true])


def test_autocast() -> None:
    """To the rounding of bfloat16, against the same without chunks."""
    model, x = sample_and_model(torch.float32)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    true = gradients(model, x, cast)
    exact = gradients(model, x)
    with hc.chunked(300):
        found = gradients(model, x, cast)
    for a, b, c in zip(found, true, exact, strict=True):
        assert a.dtype == b.dtype
        wrong = float((b - c).norm())  # what bfloat16 itself does to it
        assert float((a - c).norm()) <= 1.5 * wrong + 1e-6


def test_weight_gradients_of_narrow_dtypes_are_summed_in_float32() -> None:
    """A thousand chunks whose terms would vanish one by one in bfloat16."""
    x = torch.full((1, 1, 4096), 1.0, dtype=torch.bfloat16)
    weight = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    with hc.chunked(4):
        F.conv1d(x, weight).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 4096


@pytest.mark.long
def test_a_compiled_network() -> None:
    model, x = sample_and_model()
    true = gradients(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    with hc.chunked(300):
        same(gradients(model, x, compiled), true)


def test_a_rank_s_tile_goes_in_chunks_too() -> None:
    """The same kernels lie under cut tensors, halos and all."""
    torch.manual_seed(4)
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, 2, 12, 6, 10), (3, 2, 3, 3, 3), (3,)))

    def body(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.max_pool3d(F.conv3d(x, weight, bias, padding=1), 3, 2, 1)

    with hc.chunked(200):
        found = check_rule(body, x, weight, bias, cuts=[{2: "depth"}, None, None], mesh={"depth": 2}, second_order=True)
    assert found.verdict == "exact", found


def test_one_device_needs_no_mesh() -> None:
    model, x = sample_and_model()
    true = gradients(model, x)
    assert hc.distribute(model) is model
    same(gradients(model, x), true, 0.0)
    with hc.no_sync(model):
        same(gradients(model, x), true, 0.0)
    with pytest.raises(hc.MeshError, match="already"):
        hc.distribute(model)


def test_one_device_among_many_ranks_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(hc.MeshError, match="give it a mesh"):
        hc.distribute(nn.Linear(1, 1))
