"""Gradients of inputs are the true ones on every rank, also where an input is whole on some axis of the mesh."""

import pytest
import torch

import halocline as hc
from halocline.world import run_local

SIZES = {"data": 2, "depth": 2}


def reference() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))


def energy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * x * y).sum() + (x * y).sin().mean()


def test_a_plain_leaf_cut_by_its_owner() -> None:
    x, y = reference()
    leaf = x.clone().requires_grad_()
    energy(leaf, y).backward()

    def body() -> torch.Tensor:
        mesh = hc.Mesh(**SIZES)
        mine = x.clone().requires_grad_()
        energy(hc.shard(mine, mesh, {0: "data", 1: "depth"}), hc.shard(y, mesh, {1: "depth"})).backward()
        return mine.grad

    for found in run_local(4, body):
        torch.testing.assert_close(found, leaf.grad)


def test_a_leaf_of_ones_own_is_averaged_or_refused() -> None:
    x, y = reference()
    scale = torch.full((6,), 2.0, dtype=torch.float64, requires_grad=True)
    energy(x * scale, y).backward()

    def body() -> torch.Tensor:
        mesh = hc.Mesh(**SIZES)
        part, other = (hc.shard(t, mesh, {0: "data", 1: "depth"}) for t in (x, y))
        mine = scale.detach().clone().requires_grad_()
        with pytest.raises(hc.Refused, match="nobody averages"):
            part * mine
        hc.average_gradients([mine], mesh)
        energy(part * mine, other).backward()
        return mine.grad

    for found in run_local(4, body):
        torch.testing.assert_close(found, scale.grad)


def test_a_model_left_out_is_refused() -> None:
    def body() -> None:
        x = hc.shard(torch.zeros(1, 1, 8), hc.Mesh(depth=2), {2: "depth"})
        torch.nn.Conv1d(1, 1, 3)(x)

    with pytest.raises(hc.Refused, match="distribute"):
        run_local(2, body)


def test_an_input_whole_on_one_axis() -> None:
    """x is cut over data alone, and meets a y cut over depth: each rank holds a share of x's gradient."""
    x, y = reference()
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(leaf, y), leaf, create_graph=True)
    penalty = (slope.square().sum() - 1).square()
    (second,) = torch.autograd.grad(penalty, leaf)

    def body() -> list[torch.Tensor]:
        mesh = hc.Mesh(**SIZES)
        part = hc.shard(x, mesh, {0: "data"}).requires_grad_()
        other = hc.shard(y, mesh, {1: "depth"})
        (slope,) = torch.autograd.grad(energy(part, other), part, create_graph=True)
        (second,) = torch.autograd.grad((slope.square().sum() - 1).square(), part)
        seen: list[torch.Tensor] = []
        middle = part * 1.0
        middle.register_hook(lambda g: seen.append(hc.gather(g)))
        energy(middle, other).backward()
        (inner,) = torch.autograd.grad(energy(middle := part * 1.0, other), middle)
        return [hc.gather(slope), hc.gather(part.grad), seen[0], hc.gather(inner), hc.gather(second)]

    for *firsts, found_second in run_local(4, body):
        for found in firsts:
            torch.testing.assert_close(found.detach(), slope.detach())
        torch.testing.assert_close(found_second, second)
