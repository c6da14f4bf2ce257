"""``place_by_cost``: parts of a model on kinds of ranks, chosen by time or price among those that fit, and exact."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from test_tables_in_stages import MICROBATCHES, alone, batches, loss, network
from torch import Tensor, nn

import halocline as hc
from halocline.errors import MeshError
from halocline.parts import RankKind, kinds, place_by_cost
from halocline.parts.cutting import CallCosts
from halocline.parts.record import ModelRecord
from halocline.world import World, run_local

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

TABLE_BYTES = 33 * 5 * 8  # of the table of the test's network
TOLD = {"loss": loss, "microbatches": MICROBATCHES, "cuts": [{0: "data"}] * 2,
        "layout": {"table.weight": {0: "data"}}}  # fmt: skip


def costs_by_kind(slow: float) -> object:
    """In place of measured times: dense calls take ``slow`` times as long on the ranks before the last."""

    def costs(
        record: ModelRecord,
        model: nn.Module,
        inputs: list[Tensor],
        world: World,
        ranks: int = 1,
        root: int = 0,
        sustained: bool = False,
    ) -> CallCosts:
        factor = 1.0 if root == world.size - 1 else slow
        return CallCosts(tuple((factor if "deep" in str(call) else 1.0) / ranks for call in record.calls))

    return costs


def placed(by: str, memory: int | None, prices: tuple[float, float], slow: float, only: tuple[str, ...] | None = None
           ) -> list[tuple[tuple[str, ...], list[float], dict[str, Tensor], str]]:  # fmt: skip
    """The kinds that were taken, losses and weights, and the explanation, of each of three ranks."""

    def body() -> tuple[tuple[str, ...], list[float], dict[str, Tensor], str]:
        mesh = hc.Mesh(data=3)
        given = {"cpu": RankKind(mesh["data", 0:2], None, prices[0]),
                 "fast": RankKind(mesh["data", 2:3], memory, prices[1])}  # fmt: skip
        pipe = place_by_cost(network(), given, example=batches()[0], by=by, only=only, **TOLD)  # type: ignore[arg-type]
        optimizer = torch.optim.Adagrad(list(pipe.parameters()) or [torch.zeros(1, requires_grad=True)], lr=0.1)
        losses = []
        for x, y in batches():
            optimizer.zero_grad()
            losses.append(float(pipe.step(x, y)))
            optimizer.step()
        return pipe.choices[0].names, losses, pipe.state_dict(), pipe.explain()

    with mock.patch.object(kinds, "measured_costs", costs_by_kind(slow)):
        return run_local(3, body)


@pytest.mark.parametrize(
    ("by", "memory", "prices", "slow", "expected"),
    [
        ("time", None, (1.0, 1.0), 0.4, ("cpu", "fast")),  # all three ranks are at work
        ("time", 2 * TABLE_BYTES, (1.0, 1.0), 9.0, ("cpu", "fast")),  # the table does not fit there
        ("price", None, (1.0, 5.0), 1.0, ("cpu",)),
        ("price", None, (5.0, 0.1), 1.0, ("fast",)),
        ("price", 2 * TABLE_BYTES, (1.0, 5.0), 1.0, ("cpu",)),
    ],
)
def test_the_choice_follows_times_prices_and_memory(
    by: str, memory: int | None, prices: tuple[float, float], slow: float, expected: tuple[str, ...]
) -> None:
    losses, weights = alone()
    for names, found, state, told in placed(by, memory, prices, slow):
        assert names == expected
        assert found == pytest.approx(losses, rel=1e-9)
        assert max(float((state[name] - weights[name]).abs().max()) for name in weights) <= 1e-8
        assert len(told.splitlines()) == 4  # each kind alone, and both in each order
        assert ("does not fit" in told) == (memory is not None)


def test_a_kind_by_name_and_measured_times() -> None:
    """Without made-up times: whatever is chosen is exact."""
    losses, _ = alone()

    def body() -> tuple[list[float], int]:
        mesh = hc.Mesh(data=2)
        given = {"a": RankKind(mesh["data", 0:1]), "b": RankKind(mesh["data", 1:2])}
        pipe = place_by_cost(network(), given, example=batches()[0], only=("b", "a"), **TOLD)  # type: ignore[arg-type]
        return [float(pipe.step(*batches()[0]))], len(pipe.choices)

    for found, count in run_local(2, body):
        assert found == pytest.approx(losses[:1], rel=1e-9)
        assert count == 1


def test_refusals() -> None:
    def body() -> None:
        mesh = hc.Mesh(data=2)
        small = {"a": RankKind(mesh["data", 0:1], 100), "b": RankKind(mesh["data", 1:2], 100)}
        told = {**TOLD, "example": batches()[0]}
        with pytest.raises(MeshError, match="no kind of ranks has the memory"):
            place_by_cost(network(), small, **told)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="by is time or price"):
            place_by_cost(network(), small, by="speed", **told)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="no kind of ranks is called 'c'"):
            place_by_cost(network(), small, only=("c",), **told)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match=r"takes \{name: RankKind"):
            place_by_cost(network(), {}, **told)  # type: ignore[arg-type]

    run_local(2, body)
