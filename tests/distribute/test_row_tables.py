"""Tables of sparse lookups cut by rows: values, gradients and steps of one rank, bytes of the rows touched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.rules.sparse_rows import OPERATION
from halocline.tensor import unwrap
from halocline.testing import shared_pool
from halocline.world import run_local

ROWS, WIDTH, FIELDS, BATCH = 53, 4, 3, 10


class Recommender(nn.Module):
    def __init__(self, padding: int | None = None, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=padding, sparse=sparse)
        self.top = nn.Sequential(nn.Linear(WIDTH * FIELDS, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, fields: Tensor) -> Tensor:
        return self.top(self.table(fields).flatten(1)).squeeze(1)


def model_and_data(padding: int | None = None) -> tuple[Recommender, Tensor, Tensor]:
    own = torch.Generator().manual_seed(5)  # ranks are threads, which share torch's
    model = Recommender(padding).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=own, dtype=torch.float64))
    fields = torch.randint(0, ROWS, (4, BATCH, FIELDS), generator=own) ** 2 // ROWS  # small rows are often named
    return model, fields, torch.rand(4, BATCH, dtype=torch.float64, generator=own)


# torch's own optimizers make sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def optimizers(name: str, model: Recommender) -> list[torch.optim.Optimizer]:
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.5)]
    if name == "adagrad":
        return [torch.optim.Adagrad(model.parameters(), lr=0.3, lr_decay=0.01, initial_accumulator_value=0.1)]
    return [torch.optim.SparseAdam(model.table.parameters(), lr=0.1), torch.optim.Adam(model.top.parameters(), lr=0.1)]


def train(model: nn.Module, steps: Any, fields: Any, target: Any) -> list[float]:
    losses = []
    for each, wanted in zip(fields, target, strict=True):
        loss = ((model(each) - wanted) ** 2).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def difference(
    name: str, sizes: dict[str, int], points: tuple[int, ...] | None, padding: int | None = None, cut_table: bool = True
) -> float:
    """Of losses, parameters and the optimizer's state, to the untouched model on one rank."""
    plain, fields, target = model_and_data(padding)
    reference = optimizers(name, plain)
    expected = train(plain, reference, fields, target)
    mesh = hc.Mesh(**sizes)
    layout = {"table.weight": {0: "data"}} if cut_table else None
    model = hc.distribute(model_and_data(padding)[0], mesh, layout=layout)
    at = {0: points} if points else None
    cut = [hc.shard(each, mesh, {0: "data"}, points=at) for each in fields]
    wanted = [hc.shard(each, mesh, {0: "data"}, points=at) for each in target]
    steps = optimizers(name, model)
    losses = train(model, steps, cut, wanted)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        worst = max(worst, float((hc.gather(ours) - theirs).detach().abs().max()))
    for ours, theirs in zip(steps, reference, strict=True):
        for mine, plain_one in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            state, known = ours.state[mine], theirs.state[plain_one]
            for key, value in known.items():
                if isinstance(value, Tensor) and value.ndim:
                    worst = max(worst, float((hc.gather(state[key]) - value).abs().max()))
                else:
                    assert state[key] == value
    return worst


@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparseadam"])
@pytest.mark.parametrize("points", [None, (0, 7, 7, 10), (0, 0, 0, 10)])
def test_optimizers_step_at_the_owner_as_on_one_rank(name: str, points: tuple[int, ...] | None) -> None:
    assert max(run_local(3, lambda: difference(name, {"data": 3}, points))) <= 1e-10


@pytest.mark.parametrize("sizes", [{"data": 2, "other": 2}, {"data": 4}, {"other": 2, "data": 2}])
def test_beside_another_axis_and_with_padding(sizes: dict[str, int]) -> None:
    assert max(run_local(4, lambda: difference("sparseadam", sizes, None, padding=2))) <= 1e-10


def test_a_whole_table_takes_cut_lookups() -> None:
    assert max(run_local(3, lambda: difference("sparseadam", {"data": 3}, (0, 7, 7, 10), 2, cut_table=False))) <= 1e-10


def test_processes() -> None:
    assert max(shared_pool(2).run(difference, "adagrad", {"data": 2}, None)) <= 1e-10


def gradients(dims: dict[int, str], plain: bool) -> float:
    """Of the table, where its indices are cut over another axis, whole, or plain local batches."""
    reference, fields, target = model_and_data()
    mesh = hc.Mesh(data=2, other=2)
    model = hc.distribute(model_and_data()[0], mesh, layout={"table.weight": {0: "data"}})
    fields, target = fields[0], target[0]
    if plain:  # as DDP: each rank has a batch of its own
        lo = mesh.rank * 2
        ours = ((model(fields[lo : lo + 2]) - target[lo : lo + 2]) ** 2).mean()
        theirs = ((reference(fields[:8]) - target[:8]) ** 2).mean()
    else:
        cut = (hc.shard(fields, mesh, dims), hc.shard(target, mesh, dims)) if dims else (fields, target)
        ours = ((model(cut[0]) - cut[1]) ** 2).mean()
        theirs = ((reference(fields) - target) ** 2).mean()
    ours.backward()
    theirs.backward()
    tile = unwrap(model.table.weight).grad
    assert tile.is_sparse and tile._nnz() < 27
    box = model.table.weight.sharding.owned(0)
    known = reference.table.weight.grad.to_dense()[box.lo : box.hi]
    assert tile.coalesce()._nnz() == int((known != 0).any(1).sum())  # rows touched, and no others
    return float((tile.to_dense() - known).abs().max())


@pytest.mark.parametrize(("dims", "plain"), [({0: "data"}, False), ({0: "other"}, False), ({}, False), ({}, True)])
def test_gradients_however_the_lookups_are_cut(dims: dict[int, str], plain: bool) -> None:
    assert max(run_local(4, lambda: gradients(dims, plain))) <= 1e-12


# ---- bytes ----


def sent(rows: int, named: int) -> tuple[int, int]:
    """Bytes that this rank sends in a lookup and its backward, and what the rows alone would take."""
    mesh = hc.Mesh(data=3)
    model = hc.distribute(nn.Embedding(rows, 16, sparse=True), mesh, layout={"weight": {0: "data"}})
    index = torch.randint(0, rows, (named,), generator=torch.Generator().manual_seed(mesh.rank))
    counted: Counter[str] = Counter()

    def listen(event: Any) -> None:
        if getattr(getattr(event, "label", None), "operation", "") == OPERATION:
            counted["bytes"] += sum(size for _, size in getattr(event, "sends", ()))

    with mesh.world.events.listening(listen):
        model(index).sum().backward()
    sizes = [len(piece) for piece in torch.arange(rows).split([p.size for p in _pieces(model)])]
    owner = torch.bucketize(torch.unique(index), torch.tensor(sizes).cumsum(0), right=True)
    return counted["bytes"], int((owner != mesh.rank).sum())


def _pieces(model: nn.Embedding) -> Any:
    return model.weight.sharding.cuts[0].partition.pieces()


@pytest.mark.parametrize(("rows", "named"), [(3_000, 40), (300_000, 40), (300_000, 400), (30, 400)])
def test_bytes_are_those_of_the_rows_touched(rows: int, named: int) -> None:
    found = run_local(3, lambda: sent(rows, named))
    fetched = sum(foreign for _, foreign in found)
    # Each row that lies elsewhere: its number goes there, 16 floats come, 16 go back; and one count a pair of ranks.
    assert sum(size for size, _ in found) == fetched * (8 + 64 + 64) + 6 * 8
    assert fetched <= 3 * min(named, rows)


def test_a_table_larger_than_one_rank_may_hold() -> None:
    """Built on meta, each rank has memory for its rows alone; their values are those that one rank draws."""

    def body() -> bool:
        with torch.device("meta"):
            model = nn.Embedding(40_000, 8, sparse=True)
        mesh = hc.Mesh(data=4)
        hc.distribute(model, mesh, layout={"weight": {0: "data"}})
        model(hc.shard(torch.arange(8), mesh, {0: "data"})).sum().backward()
        return unwrap(model.weight).shape == (10_000, 8) and unwrap(model.weight).untyped_storage().nbytes() == 320_000

    assert run_local(4, body) == [True] * 4


def test_what_is_not_sparse_work_is_refused() -> None:
    def body() -> None:
        mesh = hc.Mesh(data=2)
        layout = {"weight": {0: "data"}}
        cut = hc.distribute(nn.Embedding(9, 2, sparse=True), mesh, layout=layout)
        with pytest.raises(IndexError):
            cut(torch.tensor([9]))
        limited = hc.distribute(nn.Embedding(9, 2, sparse=True, max_norm=1.0), mesh, layout=layout)
        with pytest.raises(hc.Refused, match="max_norm"):
            limited(torch.tensor([1]))

    run_local(2, body)
