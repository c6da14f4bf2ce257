"""A table of sparse lookups in one stage, cut by rows over its ranks, and dense layers in another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.tensor import unwrap
from halocline.workloads.ctr import ClickNet
from halocline.world import run_local

FIELDS, CATEGORIES, BATCH, MICROBATCHES, STEPS = 3, 11, 12, 3, 3

# torch's own optimizers make sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def network() -> nn.Module:
    model, own = ClickNet(FIELDS, CATEGORIES, width=4, hidden=8).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():  # ranks are threads, which share torch's generator
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=own, dtype=torch.float64))
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    own = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(CATEGORIES, (BATCH, FIELDS), generator=own),
            torch.rand(BATCH, dtype=torch.float64, generator=own),
        )
        for _ in range(STEPS)
    ]


loss = F.binary_cross_entropy_with_logits


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """Losses of one rank, and its weights after them."""
    model, losses = network(), []
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        total = 0.0
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            share = loss(model(a), b) / MICROBATCHES
            share.backward()
            total += float(share.detach())
        optimizer.step()
        losses.append(total)
    return losses, dict(model.state_dict())


def staged(schedule: str, table_ranks: int, dense_ranks: int) -> tuple[list[float], dict[str, Tensor], int]:
    """The same with the table on ranks of its own; also the most elements that a gradient of the table had."""
    mesh = hc.Mesh(data=table_ranks + dense_ranks)
    first, second = mesh["data", 0:table_ranks], mesh["data", table_ranks : table_ranks + dense_ranks]
    pipe = hc.place(network(), {"table": first, "deep": second}, loss=loss, example=batches()[0],
                    microbatches=MICROBATCHES, schedule=schedule, cuts=[{0: "data"}] * 2,
                    layout={"table.weight": {0: "data"}})  # fmt: skip
    optimizer = torch.optim.Adagrad(pipe.parameters(), lr=0.1)
    losses, most = [], 0
    for x, y in batches():
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, y)))
        for name, parameter in pipe.named_parameters():
            gradient = unwrap(parameter).grad if name == "table.weight" else None
            if gradient is not None:
                assert gradient.is_sparse
                most = max(most, gradient.coalesce().values().numel())
        optimizer.step()
    return losses, pipe.state_dict(), most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("table_ranks", "dense_ranks"), [(1, 1), (2, 1), (3, 2)])
def test_losses_and_weights_are_those_of_one_rank(schedule: str, table_ranks: int, dense_ranks: int) -> None:
    losses, weights = alone()
    for found, state, _ in run_local(table_ranks + dense_ranks, lambda: staged(schedule, table_ranks, dense_ranks)):
        assert found == pytest.approx(losses, rel=1e-9)
        assert max(float((state[name] - weights[name]).abs().max()) for name in weights) <= 1e-8
