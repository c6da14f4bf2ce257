"""A dim that must be whole and is cut: gathered, or the cut shuffled to another dim and back. Exact either way."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.testing import check_rule
from halocline.world import run_local

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort(2).values,
    "topk": lambda x: x.topk(3, 2).values,
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x, dim=2)),
    "rfft": lambda x: torch.fft.rfft(x, dim=2).abs().square(),
}
CUTS: list[tuple[dict[int, str], dict[str, int]]] = [
    ({2: "a"}, {"a": 2}),
    ({2: "a"}, {"a": 3}),
    ({2: "a", 3: "b"}, {"a": 2, "b": 2}),
    ({0: "b", 2: "a"}, {"a": 2, "b": 2}),
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("remedy", ["gather", "shuffle"])
def test_exact_to_the_second_derivative(name: str, cut: tuple[dict[int, str], dict[str, int]], remedy: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 6, dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        with hc.remedy(remedy):
            return CALLS[name](x)

    found = check_rule(call, x, cuts=[cut[0]], mesh=cut[1], second_order=True)
    assert found.verdict == "exact", found
    assert (found.gathered_bytes > 0) == (remedy == "gather")


def on_two_ranks(call: Callable[[Tensor], Any], shape: tuple[int, ...]) -> tuple[Any, dict[str, int], dict[str, int]]:
    """The result on rank 0, and how often something was shuffled and gathered."""

    def on_rank() -> tuple[Any, dict[str, int], dict[str, int]]:
        mesh = hc.Mesh(a=2)
        result = call(hc.shard(torch.ones(shape), mesh, {2: "a"}))
        return result, dict(mesh.world.traffic.shuffles), dict(mesh.world.traffic.gathers)

    return run_local(2, on_rank)[0]


def test_the_cheaper_is_taken_and_the_cut_comes_back() -> None:
    result, shuffles, gathers = on_two_ranks(lambda x: x.sort(2).values, (2, 4, 10, 6))
    assert result.sharding.cuts[2].axis == "a"
    assert list(shuffles.values()) == [1] and not gathers


def test_a_gather_where_no_other_dim_can_be_cut() -> None:
    result, shuffles, gathers = on_two_ranks(lambda x: x.sort(2).values, (1, 1, 10, 1))
    assert type(result) is Tensor
    assert list(gathers.values()) == [1] and not shuffles


def test_a_dim_that_changes_its_size_is_cut_evenly() -> None:
    result, _, _ = on_two_ranks(lambda x: x.topk(3, 2).values, (2, 4, 10, 6))
    assert result.sharding.cuts[2].partition.points == (0, 2, 3)


def test_an_unknown_remedy_is_named() -> None:
    with pytest.raises(hc.MeshError, match="it is gather, shuffle, ring"), hc.remedy("scatter"):
        pass


def attend(remedy: str, causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with hc.remedy(remedy):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


ATTENTION_CUTS: list[tuple[dict[int, str], dict[str, int]]] = [
    ({2: "a"}, {"a": 2}),
    ({2: "a"}, {"a": 3}),
    ({0: "b", 2: "a"}, {"a": 2, "b": 2}),
]


@pytest.mark.parametrize("cut", ATTENTION_CUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("remedy", ["gather", "shuffle", "ring"])
def test_attention_over_cut_tokens(remedy: str, causal: bool, cut: tuple[dict[int, str], dict[str, int]]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 11, size, dtype=torch.float64) for size in (5, 5, 3))
    found = check_rule(attend(remedy, causal), q, k, v, cuts=[cut[0]] * 3, mesh=cut[1], second_order=True)
    assert found.verdict == "exact", found
    assert (found.gathered_bytes > 0) == (remedy == "gather")


def test_cross_attention_in_a_ring_with_uneven_and_empty_tiles() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (9, 5, 5))
    points = [{2: (0, 4, 4, 9)}, {2: (0, 1, 5, 5)}, {2: (0, 1, 5, 5)}]
    found = check_rule(attend("ring", False), q, k, v, cuts=[{2: "a"}] * 3, points=points, mesh={"a": 3})
    assert found.verdict == "exact", found
    assert not found.gathered_bytes


def test_scores_of_hundreds_do_not_overflow() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) * scale for scale in (40, 40, 1))
    found = check_rule(attend("ring", False), q, k, v, cuts=[{2: "a"}] * 3, mesh={"a": 2})
    assert found.verdict == "exact", found


def test_attention_chooses_heads_then_a_ring_for_much_then_a_gather() -> None:
    def on_rank(heads: int, tokens: int) -> tuple[bool, bool, bool]:
        mesh = hc.Mesh(a=2)
        x = hc.shard(torch.ones(1, heads, tokens, 64), mesh, {2: "a"})
        F.scaled_dot_product_attention(x, x, x)
        traffic = mesh.world.traffic
        return bool(traffic.shuffles), bool(traffic.rings), bool(traffic.gathers)

    assert run_local(2, lambda: on_rank(4, 16))[0] == (True, False, False)
    assert run_local(2, lambda: on_rank(3, 4096))[0] == (False, True, False)
    assert run_local(2, lambda: on_rank(1, 16))[0] == (False, False, True)


def test_choices_of_a_mesh_hold_for_a_part_of_a_model() -> None:
    """Of two layers alike, the one that has choices of its own gathers."""
    network, x = nn.Sequential(OrderedDict(free=Sorted(), own=Sorted())), torch.randn(4, 6, 8)

    def run(choices: hc.Choices | None) -> tuple[Tensor, list[str], list[str]]:
        mesh = hc.Mesh(choices, a=2)
        model = hc.distribute(copy.deepcopy(network), mesh)
        y = model(hc.shard(x, mesh, {1: "a"}))
        traffic = mesh.world.traffic
        return hc.gather(y), sorted(traffic.shuffles), sorted(traffic.gathers)

    own = hc.Choices(at={"own": hc.Choices(remedy="gather")})
    assert repr(own) == "Choices(at={'own': Choices(remedy='gather')})"
    for choices, gathers in ((None, []), (own, ["sort in own"])):
        for y, shuffled, gathered in run_local(2, lambda choices=choices: run(choices)):
            assert torch.equal(y, network(x))
            assert gathered == gathers and "sort in free" in shuffled


def test_a_module_may_have_the_name_of_a_remedy() -> None:
    """What was planned under ``hc.remedy("gather")`` is not taken for the plan of a module called "gather"."""
    network, values = nn.Sequential(OrderedDict(gather=Sorted())), torch.randn(4, 6, 8)

    def run() -> tuple[list[str], list[str]]:
        mesh = hc.Mesh(hc.Choices(at={"gather": hc.Choices(remedy="shuffle")}), a=2)
        x = hc.shard(values, mesh, {1: "a"})
        with hc.remedy("gather"):
            torch.sort(x, 1)
        mesh.world.traffic.clear()
        hc.distribute(copy.deepcopy(network), mesh)(x)
        return sorted(mesh.world.traffic.shuffles), sorted(mesh.world.traffic.gathers)

    assert run_local(2, run) == [(["sort in gather"], [])] * 2


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, 1).values
