"""Batch norms of each replica by itself that keep no running statistics: torch's own kernel, and no communication."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.tensor import unwrap
from halocline.world import run_local

SHAPE = (5, 3, 4, 6)
PARTS = {"even": None, "uneven": (0, 4, 5)}


def data() -> tuple[Tensor, Tensor, Tensor]:
    own = torch.Generator().manual_seed(2)
    return tuple(torch.randn(shape, generator=own, dtype=torch.float64) for shape in (SHAPE, (3,), (3,)))  # type: ignore[return-value]


def loss_of(y: Tensor) -> Tensor:
    return (y * y.tanh()).sum()


def expected(points: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result and all gradients, by hand: each part of the batch by itself."""
    x, weight, bias = (t.clone().requires_grad_() for t in data())
    parts = [x[a:b] for a, b in pairwise(points)]
    y = torch.cat([F.batch_norm(part, None, None, weight, bias, True) for part in parts])
    return (y.detach(), *torch.autograd.grad(loss_of(y), (x, weight, bias)))


@pytest.mark.parametrize("kind", list(PARTS))
@pytest.mark.parametrize("depth", [1, 2])
def test_values_gradients_and_bytes(kind: str, depth: int) -> None:
    def body() -> tuple[float, int, tuple[int, ...]]:
        mesh = hc.Mesh(data=2, depth=depth)
        x, weight, bias = data()
        norm = nn.BatchNorm2d(3, track_running_stats=False).double()
        with torch.no_grad():
            norm.weight.copy_(weight)
            norm.bias.copy_(bias)
        model = hc.distribute(norm, mesh, batch_statistics="replica")
        leaf = x.clone().requires_grad_()
        dims = {0: "data", 2: "depth"} if depth > 1 else {0: "data"}
        at = PARTS[kind]
        cut = hc.shard(leaf, mesh, dims, points={0: at} if at else None)
        before = mesh.world.traffic.transport_bytes
        y = model(cut)
        sent = mesh.world.traffic.transport_bytes - before
        loss_of(y).backward()
        points = cut.sharding.cuts[0].partition.points  # type: ignore[union-attr]
        wanted = expected(points)
        assert leaf.grad is not None
        found = (hc.gather(y).detach(), _whole(leaf.grad, mesh), norm.weight.grad, norm.bias.grad)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))  # type: ignore[operator]
        return worst, sent, tuple(unwrap(y).shape)

    for worst, sent, _ in run_local(2 * depth, body):
        assert worst <= 1e-10
        assert (sent == 0) == (depth == 1)


def _whole(gradient: Tensor, mesh: hc.Mesh) -> Tensor:
    """Of an input that every rank has whole: the mean over the ranks (law 3)."""
    return mesh.world.sum(gradient, tuple(range(mesh.size)), hc.world.Label("sum", "test")) / mesh.size
