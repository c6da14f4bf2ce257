"""``x[mask]`` with a cut mask: as many elements as on one rank, in the same order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import halocline as hc
from halocline.testing import check_rule
from halocline.world import run_local

KIND = {"dtype": torch.float64}
CUTS = [
    ({"rows": 2}, {2: "rows"}),
    ({"data": 2, "rows": 3}, {0: "data", 2: "rows"}),
    ({"rows": 2, "columns": 2}, {2: "rows", 3: "columns"}),
    ({"channels": 3}, {1: "channels"}),
]


def doubled(x: Tensor) -> Tensor:
    y = x * 1.0
    y[y > 0] *= 2
    return y


def replaced(x: Tensor) -> Tensor:
    y = x * 1.0
    y[x.mean((2, 3)) > 0] = torch.ones(7, 5, **KIND)
    y[x.mean((2, 3)) < 0] = x[x.mean((2, 3)) < 0].cos()
    return y


USES: dict[str, Callable[[Tensor], Tensor | list[Tensor]]] = {
    "all": lambda x: x[x > 0.5],
    "sum and mean": lambda x: [x[x > 0].sum(), x[x > 0].mean(), x[x > 0].std()],
    "how many": lambda x: x * x[x > 0].numel() + x[x > 0].shape[0],
    "nothing": lambda x: x[x > 9] * 2,
    "everything": lambda x: x[x < 9].sort().values,
    "leading dims": lambda x: x[x.mean((2, 3)) > 0],
    "inner dims": lambda x: x[:, :, x.mean((0, 1)) > 0],
    "beside an index": lambda x: x[1, :, x.mean((0, 1)) > 0],
    "a plane": lambda x: x[:, 0][x[:, 1] > 0],
    "rows": lambda x: x[:, :, x.mean((0, 1, 3)) > 0],
    "masked_select": lambda x: x.masked_select(x[:, :1] > 0).square().sum(),
    "of a whole tensor": lambda x: torch.linspace(0, 1, x.numel(), **KIND).reshape(x.shape)[x > 0] * 2,
    "in a loss": lambda x: torch.nn.functional.mse_loss(x[x > 0], (x[x > 0] * 2).detach()),
    "doubled": doubled,
    "replaced": replaced,
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.flatten() * 2),
    "masked_scatter of whole values": lambda x: x.masked_scatter(x > 0, torch.linspace(0, 1, x.numel(), **KIND)) * x,
    "masked_scatter of what it takes": lambda x: x.masked_scatter(x > 0, x[x > 0].cos()),
    "masked_scatter_": lambda x: x.clone().masked_scatter_(x > 0, x[x > 0].cos()),
    "masked_scatter into a whole tensor": lambda x: torch.zeros(x.shape, **KIND).masked_scatter(x > 0, x * 3),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize(("mesh", "cut"), CUTS)
def test_a_cut_mask_takes_what_it_takes_on_one_rank(name: str, mesh: dict[str, int], cut: dict[int, str]) -> None:
    x = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(3), **KIND)
    found = check_rule(USES[name], x, cuts=[cut], mesh=mesh)
    assert found.verdict == "exact", (found.why, found.error)


def test_too_many_values_for_a_mask_are_an_error() -> None:
    def body() -> None:
        x = hc.shard(torch.arange(12.0).reshape(3, 4), hc.Mesh(rows=2), {0: "rows"})
        with pytest.raises(RuntimeError, match="the mask takes 2 elements, and there are 3"):
            x[x > 9] = torch.zeros(3)

    run_local(2, body)


def test_a_sum_of_what_a_mask_takes_moves_no_tile_cut_along_its_first_dim() -> None:
    """Already in order: nothing but counts and sums travels."""
    x = torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(3), **KIND)
    found = check_rule(lambda x: x[x > 0].sum(), x, cuts=[{2: "rows"}], mesh={"rows": 2})
    assert found.verdict == "exact" and not found.gathered_bytes and found.moved_bytes < 100
