"""Parameters that are cut: every layout gives the answer of one rank, value, gradients and double backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_axes import compared, drawn, layouts, mean_square
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halocline.testing.compare import EXACT
from halocline.workloads.transformer import Decoder


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


class Subject(NamedTuple):
    """A network, its input, and which dims of it the axes data and depth cut."""

    model: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    dims: tuple[int, int]
    loss: Callable[[Any], Tensor] = mean_square


def answers(scores: Tensor) -> Tensor:
    """Cross entropy of scores [N, classes, T], whose classes may be cut."""
    target = torch.arange(scores.shape[0] * scores.shape[2]).reshape(scores.shape[0], -1) % scores.shape[1]
    return F.cross_entropy(scores, target, ignore_index=2, label_smoothing=0.1)


SUBJECTS = {
    "linear pair": Subject(mlp, lambda: numbers(4, 3, 6), (0, 1)),
    "conv net": Subject(lambda: made(ConvNet()), lambda: numbers(2, 2, 8, 6), (0, 2)),
    "attention block": Subject(lambda: made(AttentionBlock()), lambda: numbers(2, 5, 8), (0, 1)),
    "transformer": Subject(
        lambda: made(Decoder(vocabulary=10, length=6, width=8, heads=4, layers=1)),
        lambda: torch.arange(12).reshape(2, 6) * 7 % 10,
        (0, 1),
        answers,
    ),
}
MESHES: list[dict[str, int]] = [
    {"model": 1, "data": 1},
    {"model": 4},
    {"data": 2, "model": 2},
    {"data": 2, "depth": 2, "model": 2},
]
MODEL = [{"model": 2}, {"data": 2, "model": 2}]


def check(subject: Subject, mesh: dict[str, int], layout: dict[str, dict[int, str]], twice: bool) -> None:
    """Exact, in a mesh whose axes data and depth cut the sample, and any axis parameters."""
    cuts = zip(subject.dims, ("data", "depth"), strict=True)
    dims = {dim: axis for dim, axis in cuts if mesh.get(axis, 1) > 1}
    error = compared(subject.model(), [subject.x()], mesh, layout, dims, subject.loss, twice)
    assert error <= EXACT, (error, mesh, layout)


@pytest.fixture(autouse=True)
def _twice_differentiable() -> Iterator[None]:
    """torch's fused attention has no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def test_every_layout_of_a_linear_pair() -> None:
    every = list(layouts(mlp(), ["model"]))
    assert len(every) == 3 * 2 * 3 * 2
    for number, layout in enumerate(every):
        check(SUBJECTS["linear pair"], MODEL[number % 2], layout, twice=number % 12 == 0)


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "linear pair"])
def test_some_layouts(name: str) -> None:
    meshes = [*MODEL, {"data": 2, "depth": 2, "model": 2}]
    for number, layout in enumerate(drawn(SUBJECTS[name].model(), ["model"], 4)):
        check(SUBJECTS[name], meshes[number % 3], layout, twice=number == 0)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_layouts_over_all_axes(name: str, mesh: dict[str, int]) -> None:
    """The axes that cut the sample cut parameters too."""
    for number, layout in enumerate(drawn(SUBJECTS[name].model(), list(mesh), 8, seed=1)):
        check(SUBJECTS[name], mesh, layout, twice=number % 3 == 0)


@pytest.mark.trial
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_hundreds_of_layouts(name: str, mesh: dict[str, int]) -> None:
    model = SUBJECTS[name].model()
    enumerated = name == "linear pair" and len(mesh) == 2
    every = list(layouts(model, list(mesh))) if enumerated else drawn(model, list(mesh), 100, seed=2)
    assert len(every) == (7 * 3 * 7 * 3 if enumerated else 100)
    for number, layout in enumerate(every):
        check(SUBJECTS[name], mesh, layout, twice=number % 5 == 0)
