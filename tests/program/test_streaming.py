"""A streamed step gives the values and gradients of the plain model, in whatever segments and tiles."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.errors import Refused
from halocline.program.streaming import api
from halocline.program.streaming.operations import Trace
from halocline.program.streaming.search import Layout, units_of
from halocline.program.streaming.segments import TiledSegment
from halocline.testing.compare import relative_error
from halocline.testing.memory import peak_bytes
from halocline.tree import tensors_in
from halocline.workloads import WORKLOADS
from halocline.world import run_local

EXACT = 1e-8
PLENTY = 1 << 40


class Block(nn.Module):
    def __init__(self, channels: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(channels, out, 3, padding=1), nn.Conv3d(out, out, 3, padding=1)
        self.norms = nn.ModuleList([norm(out), norm(out)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(self.norms[1](self.second(x)), inplace=True)


class SmallUNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.down, self.bottom, self.up = Block(2, 4, norm), Block(4, 8, norm), Block(8, 4, norm)
        self.grow, self.head = nn.ConvTranspose3d(8, 4, 2, 2), nn.Conv3d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.bottom(F.max_pool3d(high, 2))
        return self.head(self.up(torch.cat([self.grow(low), high], 1)))


class Gate(nn.Module):
    """A squeeze-and-excitation block: whole work in the middle of work on tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.dense = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 8), nn.Sigmoid())

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.conv(x)
        gate = self.dense(x.mean((2, 3)))
        return {"y": x * gate[:, :, None, None], "gates": (gate, x.detach())}


class Awkward(nn.Module):
    """Strides, dilation, even kernels, other paddings, resampling, slices, constants and weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 3, 3) / 4)
        self.even = nn.Conv2d(4, 4, 4, stride=2, padding=1, padding_mode="circular")
        self.wide = nn.Conv2d(4, 4, 3, padding=4, dilation=4, groups=2)
        self.register_buffer("scale", torch.linspace(0.5, 2, 4).view(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        standard = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        y = F.conv2d(F.pad(x, (1, 2, 2, 0), mode="reflect"), standard)
        y = self.wide(y) * self.scale + y.new_full(y.shape, 0.25)
        y = self.even(F.avg_pool2d(y, 3, 2, 1, count_include_pad=False))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        y = y[:, :, 1:, :-1] + torch.linspace(0, 1, y.shape[-1] - 1, device=x.device, dtype=x.dtype)
        return F.softmax(y.roll(3, 2), 1).flip(3)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.LeakyReLU(), nn.AvgPool3d(2), nn.Dropout3d(0.3))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 4 * 3, 5), nn.Dropout(0.5), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x), 0.2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "no norm": (lambda: SmallUNet(lambda c: nn.Identity()), (2, 2, 8, 12, 4)),
    "batch norm": (lambda: SmallUNet(nn.BatchNorm3d), (2, 2, 8, 12, 4)),
    "instance norm": (lambda: SmallUNet(lambda c: nn.InstanceNorm3d(c, affine=True)), (2, 2, 8, 12, 4)),
    "group norm": (lambda: SmallUNet(lambda c: nn.GroupNorm(2, c)), (2, 2, 8, 12, 4)),
    "gate": (Gate, (2, 2, 9, 7)),
    "awkward": (Awkward, (1, 2, 21, 26)),
    "classifier": (Classifier, (3, 2, 8, 8, 6)),
}


def in_tiles(monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, ...], longest: int = 100) -> None:
    """Let every segment have these tiles, and at most ``longest`` operations."""

    def choose(trace: Trace, limit: int, training: bool) -> Layout:
        dims = max((len(value.tiled) for value in trace.values), default=0)
        runs = [(a, min(a + longest, last)) for first, last in units_of(trace) for a in range(first, last, longest)]
        return Layout(tuple(TiledSegment(a, b, tiles[:dims]) for a, b in runs), 0, 1.0)

    monkeypatch.setattr(api, "choose_layout", choose)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    with hc.random.reproducible(7):
        outputs = [tensor for tensor in tensors_in(model(x)) if tensor.requires_grad]
        torch.manual_seed(1)
        sum((output * torch.randn_like(output)).sum() for output in outputs).backward()  # type: ignore[union-attr]
    return outputs


def differences(model: nn.Module, plain: nn.Module, x: Tensor) -> tuple[float, str]:
    """The largest error of outputs, gradients and buffers, and whose it is."""
    ours, true = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
    outputs = zip(step(model, ours), step(plain, true), strict=True)
    errors = [(relative_error(a, b), "output") for a, b in outputs]
    named = zip(model.named_parameters(), plain.parameters(), strict=True)
    pairs = [
        (n, *(g.to_dense() if g is not None and g.is_sparse else g for g in (a.grad, b.grad))) for (n, a), b in named
    ]
    scale = max(true_one.abs().max().item() for _, _, true_one in pairs if true_one is not None)
    for name, mine, theirs in [*pairs, ("the input", ours.grad, true.grad)]:
        if theirs is not None:
            errors.append((float("inf") if mine is None else relative_error(mine, theirs, scale), name))
    buffers = zip(model.named_buffers(), plain.buffers(), strict=True)
    errors += [(relative_error(a, b, 1e3), name) for (name, a), b in buffers]
    return max(errors)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("tiles", "longest"), [((1, 1, 1), 2), ((2, 2, 1), 100), ((3, 4, 2), 3), ((1, 5, 3), 1)])
def test_every_layout_is_exact(
    monkeypatch: pytest.MonkeyPatch, name: str, tiles: tuple[int, ...], longest: int
) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double()
    plain, x = copy.deepcopy(model), torch.randn(shape, dtype=torch.float64)
    in_tiles(monkeypatch, tiles, longest)
    error, where = differences(hc.stream(model, PLENTY), plain, x)
    assert error <= EXACT, (error, where)


@pytest.mark.long
def test_a_quarter_of_the_memory_is_enough() -> None:
    """Predicted and measured; and again an eighth where no norm keeps its input."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(4)]
    chain = nn.Sequential(*[module for layer in layers for module in (layer, nn.LeakyReLU(0.1))], nn.AvgPool3d(2))
    for model, share in ((SmallUNet(lambda c: nn.GroupNorm(2, c)), 4), (chain, 8)):
        x = torch.randn(1, 2, 32, 32, 32)
        plain = copy.deepcopy(model)

        def run(net: nn.Module, x: Tensor = x) -> Callable[[], None]:
            def once() -> None:
                net.zero_grad()
                net(x).square().mean().backward()

            return once

        run(plain)()
        limit = peak_bytes(run(plain)).peak // share
        streamed = hc.stream(model, limit)
        run(streamed)()
        assert peak_bytes(run(streamed)).peak <= limit
        pairs = list(zip(streamed.parameters(), plain.parameters(), strict=True))
        scale = max(b.grad.abs().max().item() for _, b in pairs)  # type: ignore[union-attr]
        worst = max((a.grad - b.grad).abs().max().item() for a, b in pairs)  # type: ignore[operator, union-attr]
        assert worst <= 1e-4 * scale  # float32


def test_inference_and_evaluation_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = SmallUNet(nn.BatchNorm3d).double().eval()
    plain, x = copy.deepcopy(model), torch.randn(1, 2, 8, 8, 4, dtype=torch.float64)
    in_tiles(monkeypatch, (2, 2, 2))
    with torch.no_grad():
        y = hc.stream(model, PLENTY)(x)
        assert relative_error(y, plain(x)) <= EXACT and not y.requires_grad


def test_training_after_evaluation_has_segments_of_its_own() -> None:
    """With gradients in both, a norm whose statistics are given needs no kept input, and one that takes them does."""
    torch.manual_seed(0)
    model = SmallUNet(nn.BatchNorm3d).double().eval()
    plain, x = copy.deepcopy(model), torch.randn(1, 2, 8, 8, 4, dtype=torch.float64)
    hc.stream(model, PLENTY)(x.clone().requires_grad_()).sum().backward()
    for each in (model.train(), plain.train()):
        each.zero_grad()
    error, where = differences(model, plain, x)
    assert error <= EXACT, (error, where)


def test_autocast_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallUNet(nn.BatchNorm3d)
    plain, x = copy.deepcopy(model), torch.randn(1, 2, 8, 8, 4)
    in_tiles(monkeypatch, (2, 1, 1))
    hc.stream(model, PLENTY)
    with torch.autocast("cpu", torch.bfloat16):
        mine, true = model(x), plain(x)
    assert mine.dtype == true.dtype == torch.bfloat16
    mine.float().sum().backward()
    assert relative_error(mine.float(), true.float()) < 0.05


def test_a_copy_is_streamed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    in_tiles(monkeypatch, (2, 1, 1))
    model = hc.stream(SmallUNet(nn.BatchNorm3d).double(), PLENTY)
    twin, x = copy.deepcopy(model), torch.randn(1, 2, 8, 8, 4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert model(x).abs().sum() > 0 and twin(x).abs().sum() == 0
    assert list(model.state_dict()) == list(SmallUNet(nn.BatchNorm3d).state_dict())


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.mean() > 0 else x


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean((0, 2, 3)))
        return x * self.seen.view(1, 2, 1, 1)


class Stale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        part = x[:, :1]
        x.mul_(2.0)
        return x + part


@pytest.mark.parametrize(
    ("model", "words"),
    [(Branch(), "values"), (Keeps(), "keeps"), (Stale(), "another view"), (nn.ReLU(inplace=True), "was given")],
)
def test_what_cannot_be_streamed_is_refused_by_name(model: nn.Module, words: str) -> None:
    with pytest.raises(Refused, match=words):
        hc.stream(model, PLENTY)(torch.randn(1, 2, 6, 6, dtype=torch.float64))


def test_inputs_without_space_run_whole() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
    plain = copy.deepcopy(model)
    error, where = differences(hc.stream(model, PLENTY), plain, x)
    assert error <= EXACT, (error, where)


def test_cut_inputs_are_refused() -> None:
    def body() -> None:
        x = hc.shard(torch.ones(1, 2, 6, 6), hc.Mesh(rows=2), {2: "rows"})
        with pytest.raises(hc.MeshError, match="one device"):
            hc.stream(nn.Conv2d(2, 2, 3), PLENTY)(x)

    run_local(2, body)


def test_too_small_a_limit_names_one_that_works(caplog: pytest.LogCaptureFixture) -> None:
    model, x = SmallUNet(nn.BatchNorm3d), torch.randn(1, 2, 16, 16, 16)
    with pytest.raises(Refused, match=r"memory='[0-9.]+KiB' or more") as refused:
        hc.stream(copy.deepcopy(model), "10KiB")(x)
    enough = str(refused.value).split("memory='")[1].split("'")[0]
    with caplog.at_level(logging.INFO, "halocline"):
        hc.stream(model, enough)(x).sum().backward()
    assert "segments" in caplog.text and model.head.weight.grad is not None


def test_misuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_tiles(monkeypatch, (2, 1, 1))
    model, x = hc.stream(SmallUNet(nn.BatchNorm3d), PLENTY), torch.randn(1, 2, 8, 8, 4, requires_grad=True)
    with pytest.raises(hc.MeshError, match="streamed already"):
        hc.stream(model, PLENTY)
    with pytest.raises(Refused, match="second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    y = model(x)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = model(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.factory(**workload.fit(workload.shapes)).double()
    plain, x = copy.deepcopy(model), torch.randn(workload.shapes[0], dtype=torch.float64)
    if workload.tokens is not None:
        x = torch.randint(workload.tokens, workload.shapes[0])
    in_tiles(monkeypatch, (2, 2, 1))
    error, where = differences(hc.stream(model, PLENTY), plain, x)
    assert error <= EXACT, (error, where)
