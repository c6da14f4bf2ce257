"""What users write around a network: every pattern gives one rank's loss and gradients on every mesh.

`make test` tries each on two meshes, `make long` on the other two.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

MESHES = [{"data": 2, "depth": 2}, {"data": 1, "depth": 3}, {"data": 2, "depth": 1}, {"depth": 2, "height": 2}]
INPUT = {0: "data", 2: "depth", 3: "height"}
TARGET = {0: "data", 1: "depth", 2: "height"}


class Network(nn.Module):
    """A little U-Net with a dense head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.pool = nn.MaxPool3d(2)
        self.deep = nn.Conv3d(4, 6, 3, padding=1)
        self.up = nn.ConvTranspose3d(6, 4, 2, 2)
        self.decode = nn.Conv3d(8, 3, 3, padding=1)
        self.head = nn.Linear(6 * 5 * 2 * 3, 2)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        high = F.leaky_relu(self.norm(self.encode(x)), 0.1, inplace=True)
        return high, torch.tanh(self.deep(self.pool(high)))

    def forward(self, x: Tensor) -> Tensor:
        high, low = self.features(x)
        return self.decode(torch.cat([high, self.up(low)], 1))

    def classify(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)[1].flatten(1))


Run = Callable[[Network, Tensor, Tensor], object]


def dice(scores: Tensor, target: Tensor) -> Tensor:
    chance = scores.softmax(1)
    true = torch.stack([(target == c).to(chance.dtype) for c in range(3)], 1)
    overlap = (chance * true).sum((0, 2, 3, 4))
    return 1 - (2 * overlap / (chance.sum((0, 2, 3, 4)) + true.sum((0, 2, 3, 4)) + 1e-3)).mean()


def penalty(model: Network, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + (slope.square().sum((1, 2, 3, 4)).sqrt() - 1).square().mean()


def weight_penalty(model: Network, x: Tensor, y: Tensor) -> Tensor:
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), [model.deep.weight, model.up.bias], create_graph=True)
    return sum(g.square().sum() for g in gradients).sqrt()


def accumulate(model: Network, x: Tensor, y: Tensor) -> Tensor:
    for part in range(3):
        loss = F.cross_entropy(model(x * (1 + part)), y) / 3
        loss.backward(retain_graph=False)
    return loss.detach()


def accumulate_unsynced(model: Network, x: Tensor, y: Tensor) -> Tensor:
    if "_halocline_average" not in model.__dict__:
        return accumulate(model, x, y)
    with hc.no_sync(model):
        for part in range(2):
            (F.cross_entropy(model(x * (1 + part)), y) / 3).backward()
    loss = F.cross_entropy(model(x * 3), y) / 3
    loss.backward()
    return loss.detach()


def frozen(model: Network, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        still = model.features(x)[0]
    return (model(x) * still.mean(1, keepdim=True)).pow(2).mean()


def checkpointed(model: Network, x: Tensor, y: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    model.eval()  # a norm in training mode would count its statistics twice, with or without a cut
    return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


def unused(model: Network, x: Tensor, y: Tensor) -> Tensor:
    return model.features(x)[1].abs().mean()


PATTERNS: dict[str, Run] = {
    "cross entropy": lambda m, x, y: F.cross_entropy(m(x), y),
    "class weights and ignored": lambda m, x, y: F.cross_entropy(
        m(x), y, torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), ignore_index=1
    ),
    "dice": lambda m, x, y: dice(m(x), y),
    "dice plus cross entropy": lambda m, x, y: 0.5 * dice(m(x), y) + F.cross_entropy(m(x), y),
    "0.5 * a + b": lambda m, x, y: 0.5 * m(x).square().mean() + m(x).abs().sum(),
    "loss / n": lambda m, x, y: m(x).square().sum() / x.shape[0] / x.numel(),
    "dense head": lambda m, x, y: F.mse_loss(m.classify(x), torch.ones(x.shape[0], 2, dtype=torch.float64)),
    "dense head and volume": lambda m, x, y: m.classify(x).square().sum() + F.cross_entropy(m(x), y),
    "weight decay by hand": lambda m, x, y: (
        F.cross_entropy(m(x), y) + 1e-2 * sum(p.square().sum() for p in m.parameters())
    ),
    "ratio of sums": lambda m, x, y: m(x).exp().sum() / m(x).square().sum(),
    "log of a mean": lambda m, x, y: m(x).square().mean().log() * 3,
    "max": lambda m, x, y: m(x).amax((2, 3, 4)).square().sum(),
    "global mean fed back": lambda m, x, y: m(x - m(x).mean(1, keepdim=True).mean()).square().mean(),
    "per-sample scale": lambda m, x, y: (
        (m(x) / (1 + torch.linalg.vector_norm(m(x), dim=(1, 2, 3, 4), keepdim=True))).pow(3).sum()
    ),
    "two losses, one graph": lambda m, x, y: (lambda out: F.cross_entropy(out, y) * out.square().mean())(m(x)),
    "branch on the loss": lambda m, x, y: (lambda loss: loss * 2 if loss.item() > 0 else -loss)(
        F.cross_entropy(m(x), y)
    ),
    "scaled and unscaled": lambda m, x, y: F.cross_entropy(m(x), y) * 1024.0 / 1024.0,
    "gradient penalty": penalty,
    "penalty on weight gradients": weight_penalty,
    "accumulation": accumulate,
    "accumulation without sync": accumulate_unsynced,
    "frozen features": frozen,
    "checkpointing": checkpointed,
    "unused parameters": unused,
    "input gradient": lambda m, x, y: F.cross_entropy(m(x.requires_grad_() * 1.5), y),
    "flips and slices": lambda m, x, y: (
        m(x)[:, :, 2:9:2, 1:, :-1].square().mean() + m(x).permute(0, 2, 3, 4, 1)[..., 0].sum()
    ),
    "crop by half": lambda m, x, y: F.cross_entropy(m(x)[:, :, :5], y[:, :5]),
    "sum of chunks": lambda m, x, y: sum(c.square().mean() for c in m(x).chunk(3, 1)),
}


def sample() -> tuple[Network, Tensor, Tensor]:
    torch.manual_seed(11)
    x = torch.randn(2, 2, 10, 4, 6, dtype=torch.float64)
    return Network().double(), x, torch.randint(0, 3, (2, 10, 4, 6))


def outcome(model: Network, x: Tensor, y: Tensor, run: Run) -> tuple[Tensor, dict[str, Tensor | None]]:
    loss = run(model, x, y)
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if x.requires_grad:
        gradients["input"] = x.grad
    gradients |= {name: b.double() for name, b in model.named_buffers()}
    return loss.detach(), gradients


def placed(layout: hc.Mesh, dims: dict[int, str]) -> dict[int, str]:
    return {dim: axis for dim, axis in dims.items() if axis in layout.sizes}


def on_meshes() -> Iterator[Any]:
    """Each pattern on the first mesh and on another, in turn."""
    for number, pattern in enumerate(PATTERNS):
        for place, mesh in enumerate(MESHES):
            soon = place in (0, 1 + number % 3)
            yield pytest.param(pattern, mesh, id=f"{pattern}-{mesh}", marks=[] if soon else pytest.mark.long)


@cache
def on_one_rank(pattern: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    return outcome(*sample(), PATTERNS[pattern])


@pytest.mark.parametrize(("pattern", "mesh"), list(on_meshes()))
def test_pattern_equals_one_rank(pattern: str, mesh: dict[str, int]) -> None:
    model, x, y = sample()
    true_loss, true = on_one_rank(pattern)

    def body():
        layout = hc.Mesh(**mesh)
        mine = hc.distribute(copy.deepcopy(model), layout)
        cut = hc.shard(x, layout, placed(layout, INPUT)), hc.shard(y, layout, placed(layout, TARGET))
        loss, gradients = outcome(mine, *cut, PATTERNS[pattern])
        return loss, {name: None if g is None else hc.gather(g) for name, g in gradients.items()}

    ranks = 1
    for size in mesh.values():
        ranks *= size
    scale = max(g.abs().max().item() for g in true.values() if g is not None)
    for loss, gradients in run_local(ranks, body):
        assert relative_error(loss, true_loss) < 1e-10
        assert gradients.keys() == true.keys()
        for name, gradient in true.items():
            if gradient is None:
                assert gradients[name] is None, name
            else:
                assert relative_error(gradients[name], gradient, scale) < 1e-8, name
