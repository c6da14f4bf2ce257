"""Whole tensors have the same random numbers on all ranks, or the ranks refuse, however torch is seeded."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import shared_pool
from halocline.world import run_local

F64 = torch.float64


def volume() -> Tensor:
    return torch.randn(4, 3, 8, 6, dtype=F64, generator=torch.Generator().manual_seed(1))


class DropPath(nn.Module):
    """As timm has it: one number for each sample, drawn into a tensor made of the input."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)
        kept.div_(0.5)
        return x * kept


class PlainDropPath(nn.Module):
    """As others have it: torch sees no cut tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype).round()


class Pooled(nn.Module):
    """Dropout after a global pool, on a whole tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3).mean((2, 3)), 0.5)


class Quiet(nn.Module):
    """Draws on the cut tensor alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.5), 0.1)


class Nested(nn.Module):
    """A distributed model in another: draws that the library explains stay explained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Quiet()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.5)) if x.shape[0] else x


NETWORKS = {kind.__name__: kind for kind in (DropPath, PlainDropPath, Pooled, Quiet, Nested)}


def answer(name: str, apart: bool, reproducible: bool = False) -> tuple[str, Any]:
    mesh = hc.Mesh(height=-1)
    model = NETWORKS[name]()
    if name == "Nested":
        hc.distribute(model.inner, mesh)
    hc.distribute(model, mesh)
    torch.manual_seed(100 + (mesh.rank if apart else 0))
    x = hc.shard(volume(), mesh, {2: "height"})
    try:
        if reproducible:
            with hc.random.reproducible(5):
                return "value", hc.gather(model(x)).clone()
        return "value", hc.gather(model(x)).clone()
    except hc.Refused as error:
        return "refused", str(error)


def on_two(name: str, apart: bool, reproducible: bool = False) -> list[tuple[str, Any]]:
    return shared_pool(2).run(answer, name, apart, reproducible)


def test_a_drop_path_has_rank_0s_numbers() -> None:
    torch.manual_seed(100)
    true = DropPath()(volume())
    for apart in (False, True):
        for kind, found in on_two("DropPath", apart):
            assert kind == "value" and torch.equal(found, true)


@pytest.mark.parametrize("name", ["PlainDropPath", "Pooled"])
def test_draws_from_torchs_generator_want_it_alike(name: str) -> None:
    for kind, text in on_two(name, apart=True):
        assert kind == "refused"
        assert all(word in text for word in ("a random function on whole tensors in ", "manual_seed", "reproducible"))
    for apart, reproducible in ((False, False), (True, True)):
        first, second = on_two(name, apart, reproducible)
        assert first[0] == second[0] == "value" and torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["Quiet", "Nested"])
def test_draws_on_cut_tensors_care_about_no_seed(name: str) -> None:
    first, second = on_two(name, apart=True)
    assert first[0] == second[0] == "value" and torch.equal(first[1], second[1])


def test_every_way_of_drawing_into_a_new_tensor() -> None:
    def body() -> list[Tensor]:
        torch.manual_seed(hc.Mesh(height=2).rank)
        x = hc.shard(volume(), hc.Mesh(height=2), {2: "height"})
        new = [x.new_empty(5) for _ in range(4)]
        drawn = [new[0].uniform_(), new[1].normal_(1.0, 2.0), new[2].exponential_(), new[3].random_(7)]
        (late := x.new_empty((2, 2))).log_normal_()
        filled = x.new_empty((2,)).fill_(3.0)
        assert all(type(each) is Tensor for each in (*drawn, filled, late + 0, torch.cat([late, late])))
        return [*drawn, late + 0, filled]

    first, second = run_local(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[-1], torch.full((2,), 3.0, dtype=F64))


def test_a_copied_model_is_watched_no_more() -> None:
    def body() -> None:
        model = copy.deepcopy(hc.distribute(PlainDropPath(), hc.Mesh(height=2)))
        model(volume())

    run_local(2, body)
