"""Parameters that are cut: every layout gives the answer of one rank, value, gradients and double backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from model_axes import compared, drawn, layouts
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halocline.testing.compare import EXACT


def made(model: nn.Module) -> nn.Module:
    """In float64, from a seed, with noise where torch begins with zeros and ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + 0.1)
    return model.double()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp() -> nn.Module:
    return made(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))


class ConvNet(nn.Module):
    """Groups, depthwise, a transposed convolution, and four norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.groups = nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.layer = nn.LayerNorm(6)
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.batch(self.first(x)))
        x = torch.tanh(self.groups(self.grouped(x)))
        x = self.instance(self.depthwise(x))
        x = self.layer(self.up(x).movedim(1, -1)).movedim(-1, 1)
        return self.last(x)


class AttentionBlock(nn.Module):
    """nn.MultiheadAttention and a gated MLP, behind RMS norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.RMSNorm(8), nn.RMSNorm(8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.gate, self.rise, self.fall = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.second(x)
        return x + self.fall(F.silu(self.gate(y)) * self.rise(y))


@pytest.fixture
def _twice_differentiable() -> Iterator[None]:
    """torch's fused attention has no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


MESHES: list[tuple[dict[str, int], dict[int, str]]] = [
    ({"model": 1, "data": 1}, {}),
    ({"model": 4}, {}),
    ({"data": 2, "model": 2}, {0: "data"}),
    ({"data": 2, "depth": 2, "model": 2}, {0: "data", 1: "depth"}),
]


def test_every_layout_of_a_linear_pair() -> None:
    model, x = mlp(), numbers(4, 6)
    every = list(layouts(model, ["model"]))
    assert len(every) == 3 * 2 * 3 * 2
    for number, layout in enumerate(every):
        for mesh, dims in (({"model": 2}, {}), ({"data": 2, "model": 2}, {0: "data"})):
            assert compared(model, [x], mesh, layout, dims, twice=number % 9 == 0) <= EXACT, (layout, mesh)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "dims"), MESHES)
def test_layouts_of_a_linear_pair(mesh: dict[str, int], dims: dict[int, str]) -> None:
    model, x = mlp(), numbers(4, 3, 6)
    for layout in drawn(model, list(mesh), 40):
        assert compared(model, [x], mesh, layout, dims, twice=True) <= EXACT, layout


def conv_cuts(mesh: dict[str, int]) -> dict[int, str]:
    return {dim: axis for dim, axis in ((0, "data"), (2, "depth")) if mesh.get(axis, 1) > 1}


@pytest.mark.parametrize("mesh", [{"model": 2}, {"data": 2, "depth": 2, "model": 2}])
def test_some_layouts_of_a_conv_net(mesh: dict[str, int]) -> None:
    model, x = made(ConvNet()), numbers(2, 2, 8, 6)
    for number, layout in enumerate(drawn(model, ["model"], 6)):
        assert compared(model, [x], mesh, layout, conv_cuts(mesh), twice=number == 0) <= EXACT, layout


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "dims"), MESHES)
def test_layouts_of_a_conv_net(mesh: dict[str, int], dims: dict[int, str]) -> None:
    model, x = made(ConvNet()), numbers(2, 2, 8, 6)
    for number, layout in enumerate(drawn(model, list(mesh), 40, seed=1)):
        assert compared(model, [x], mesh, layout, conv_cuts(mesh), twice=number % 4 == 0) <= EXACT, layout


@pytest.mark.usefixtures("_twice_differentiable")
@pytest.mark.parametrize("mesh", [{"model": 2}, {"data": 2, "model": 2}])
def test_some_layouts_of_an_attention_block(mesh: dict[str, int]) -> None:
    model, x = made(AttentionBlock()), numbers(2, 5, 8)
    dims = {0: "data"} if "data" in mesh else {}
    for number, layout in enumerate(drawn(model, ["model"], 6)):
        assert compared(model, [x], mesh, layout, dims, twice=number == 0) <= EXACT, layout


@pytest.mark.long
@pytest.mark.usefixtures("_twice_differentiable")
@pytest.mark.parametrize(("mesh", "dims"), MESHES)
def test_layouts_of_an_attention_block(mesh: dict[str, int], dims: dict[int, str]) -> None:
    model, x = made(AttentionBlock()), numbers(2, 5, 8)
    for number, layout in enumerate(drawn(model, list(mesh), 40, seed=2)):
        assert compared(model, [x], mesh, layout, dims, twice=number % 4 == 0) <= EXACT, layout
