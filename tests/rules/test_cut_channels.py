"""Norms over channels that are cut, as they are after a permute."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import halocline as hc
from halocline.testing import check_rule
from halocline.world import run_local

KIND = {"dtype": torch.float64}
WEIGHT = torch.linspace(1, 2, 8, **KIND)


def tracked(x: Tensor) -> list[Tensor]:
    mean, var = torch.zeros(8, **KIND), torch.ones(8, **KIND)
    return [F.batch_norm(x, mean, var, WEIGHT, None, True), mean, var]


NORMS: dict[str, Callable[[Tensor], Tensor | list[Tensor]]] = {
    "batch norm": tracked,
    "instance norm": lambda x: F.instance_norm(x, weight=WEIGHT) if x.ndim > 2 else x,
    "group norm": lambda x: F.group_norm(x, 4, WEIGHT, WEIGHT),
    "groups across tiles": lambda x: F.group_norm(x, 1, WEIGHT),
}
CUTS = [({"rows": 2}, {2: "rows"}), ({"rows": 3}, {2: "rows"}), ({"data": 2, "rows": 2}, {0: "data", 2: "rows"})]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("mesh", "cut"), CUTS)
@pytest.mark.parametrize("shape", [(2, 4, 8, 6), (2, 2, 8)])
def test_norms_after_a_permute(name: str, mesh: dict[str, int], cut: dict[int, str], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), **KIND)
    found = check_rule(lambda x: NORMS[name](x.transpose(1, 2)), x, cuts=[cut], mesh=mesh)
    assert found.verdict == "exact", (found.why, found.error)


@pytest.mark.parametrize(("groups", "shuffles"), [(0, 0), (8, 0), (1, 0), (4, 0), (3, 1)])
def test_a_cut_moves_to_space_only_where_a_group_lies_across_it(groups: int, shuffles: int) -> None:
    """Without groups: a batch norm."""

    def body() -> tuple[int, int]:
        mesh = hc.Mesh(channels=2)
        x = torch.ones(4, 9 if groups == 3 else 8, 6, **KIND)
        cut = hc.shard(x, mesh, {1: "channels"})
        F.group_norm(cut, groups) if groups else tracked(cut)
        traffic = mesh.world.traffic
        return sum(traffic.shuffles.values()), traffic.gathered_bytes

    assert run_local(2, body) == [(shuffles, 0)] * 2
