"""Layouts chosen by cost: the best of all there are, exact, the same on every rank, saved with a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.arrangement import Arrangement
from halocline.errors import MeshError, PlanError
from halocline.layout import cut_share
from halocline.plan.api import make_subject
from halocline.plan.auto_layout import as_patterns, best_layout
from halocline.plan.calls import Calls, record_calls
from halocline.plan.cost import Prices
from halocline.plan.folding import Run, runs_of
from halocline.plan.layout_cost import LayoutCosts
from halocline.plan.layout_search import LayoutSearch
from halocline.plan.machine import load_machine
from halocline.plan.recording import record_step
from halocline.program import dry
from halocline.testing import shared_pool
from halocline.workloads.transformer import Decoder

MACHINE = load_machine("dgx-a100")
PRICES = Prices(MACHINE.device)


class Perceptron(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.rise, self.fall, self.head = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x + self.fall(self.rise(x).relu()))
        return scores


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep, self.groups = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(self.deep(self.norm(self.first(x)).relu())).relu()
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


@lru_cache
def positions(count: int, device: torch.device) -> Tensor:
    """Kept by the process, as some libraries keep their index tables."""
    return torch.arange(count, device=device, dtype=torch.float64)


class Cached(nn.Module):
    """Draws numbers, and reads a table that outlives the forward that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(()) > -1  # a branch on a draw
        x = x + positions(x.shape[-1], x.device) / 64 if keep else x
        out: Tensor = self.fall(self.rise(x).relu())
        return out


def calls_of(model: nn.Module, *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> Calls:
    return record_calls(model.to("meta"), [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes])


def decoder(layers: int) -> Calls:
    with torch.device("meta"):
        model = Decoder(vocabulary=4096, length=256, width=512, heads=8, layers=layers)
    return calls_of(model, (8, 256), dtype=torch.long)


def search(calls: Calls, sizes: Mapping[str, int], cut: Mapping[int, str]) -> LayoutSearch:
    """Inside a dry world."""
    return LayoutSearch(LayoutCosts(calls, hc.Mesh(**sizes), MACHINE, PRICES), [cut], ["model"])


@pytest.mark.parametrize("batch", [8, 65_536])
@pytest.mark.parametrize("sizes", [{"data": 2, "model": 2}, {"model": 4}])
def test_the_search_finds_the_best_of_all_layouts(sizes: dict[str, int], batch: int) -> None:
    """By the estimate itself, over every choice of rows, columns or whole for each weight: by time, and by memory."""
    calls, cut = calls_of(Perceptron(512, 2048), (batch, 512)), {0: "data"} if "data" in sizes else {}
    with dry(0, prod(sizes.values())):
        every = search(calls, sizes, cut)
        priced = [every.priced(choice) for choice in product(*(range(len(g.options)) for g in every.groups))]
    assert len(priced) == 27
    found = best_layout(calls, sizes, [cut], ["model"], MACHINE, PRICES, share=0.0)
    assert found is not None and found.chosen is not None
    assert found.chosen.seconds <= 1.001 * min(each.seconds for each in priced)
    leanest = best_layout(calls, sizes, [cut], ["model"], MACHINE, PRICES, "auto-memory", share=0.0)
    assert leanest is not None and leanest.chosen is not None
    assert leanest.chosen.memory <= min(each.memory for each in priced)


def test_a_limit_of_memory_is_respected() -> None:
    calls, sizes = calls_of(Perceptron(128, 256), (8, 128)), {"model": 4}
    free = best_layout(calls, sizes, [{}], ["model"], MACHINE, PRICES, share=0.0)
    assert free is not None and free.chosen is not None and not free.layout  # so little work is not worth a message
    tight = best_layout(calls, sizes, [{}], ["model"], MACHINE, PRICES, share=0.0, memory=free.chosen.memory / 2)
    assert tight is not None and tight.chosen is not None
    assert tight.chosen.memory <= free.chosen.memory / 2 and tight.chosen.seconds >= free.chosen.seconds
    half = best_layout(calls, sizes, [{}], ["model"], MACHINE, PRICES)
    assert half is not None and half.chosen is not None and half.chosen.share >= 0.5


def test_repeated_blocks_are_searched_once() -> None:
    """The same calls are priced for 4 blocks and for 24, and the same layout is found."""
    few, many = decoder(4), decoder(24)
    assert [run.repeats for run in runs_of(few)] == [4] and [run.repeats for run in runs_of(many)] == [24]
    with dry(0, 4):
        searches = [search(calls, {"data": 2, "model": 2}, {0: "data"}) for calls in (few, many)]
        assert len(searches[0]._once) == len(searches[1]._once) < 40
        assert len(searches[0].groups) == len(searches[1].groups)
    found = [best_layout(c, {"data": 2, "model": 2}, [{0: "data"}], ["model"], MACHINE, PRICES) for c in (few, many)]
    assert found[0] is not None and found[1] is not None
    few_cut, many_cut = ({n: d for n, d in each.layout.items() if "blocks" in n} for each in found if each)
    assert few_cut == many_cut and len(few_cut) >= 6


def test_a_run_whose_inner_values_are_read_later_is_not_folded() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for part in self.parts:
                x = part(x)
                kept.append(x)
            return torch.stack([torch.sin(each) for each in kept]).sum()

    assert Run(0, 1, 6) not in runs_of(calls_of(Skips(), (4, 8)))


def test_estimates_know_what_a_block_costs() -> None:
    """Bytes of weights, and the time of Megatron's layout against rows alone, as recorded steps have them."""
    calls, sizes = decoder(2), {"data": 1, "model": 4}
    with dry(0, 4):
        every = search(calls, sizes, {})
        named = {str(calls.values[g.values[0]].parameter): g for g in every.groups}
        rows = tuple(1 if group.options[1:] else 0 for group in every.groups)
        columns = ("attention.out.weight", "fall.weight")
        megatron = tuple(2 if name.endswith(columns) else 1 for name in named)
        assert every.cuts(megatron)["blocks.0.fall.weight"] == {1: "model"}
        assert every.priced(megatron).communication < every.priced(rows).communication


def test_patterns_name_no_other_parameter() -> None:
    names = ["blocks.0.a.weight", "blocks.1.a.weight", "blocks.0.b.0.a.weight", "head.weight"]
    cuts = {name: {0: "model"} for name in names[:2]}
    assert as_patterns(cuts, names) == cuts  # blocks.*.a.weight would match the third, too
    assert as_patterns({name: {0: "model"} for name in names[:3]}, names)["blocks.*.a.weight"] == {0: "model"}


def exact_with_automatic_layouts() -> list[tuple[float, float, str]]:
    """The share that is cut, the largest error of loss and gradients, and the layout, of some networks."""
    answers = []
    for make, shape, cut in (
        (Perceptron, (4, 64), {0: "data"}),
        (Cached, (4, 64), {0: "data"}),
        (Convolutions, (4, 3, 12, 12), {0: "data"}),
        (Convolutions, (4, 3, 12, 12), {2: "data"}),
    ):
        torch.manual_seed(0)
        plain, model, x = make().double(), make().double(), torch.rand(shape, dtype=torch.float64)  # type: ignore[operator]
        model.load_state_dict(plain.state_dict())
        mesh = hc.Mesh(data=2, model=2)
        cut_x = hc.shard(x, mesh, cut)
        before = torch.get_rng_state()
        hc.distribute(model, mesh, layout="auto", inputs=[cut_x])
        assert torch.equal(before, torch.get_rng_state())
        target = torch.rand_like(plain(x))
        loss = F.mse_loss(plain(x), target)
        loss.backward()
        output = model(cut_x)
        mine = F.mse_loss(hc.gather(output), target)
        mine.backward()
        errors = [(mine - loss).abs().item()]
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            errors.append((hc.gather(p.grad) - q.grad).abs().max().item())
        layout = {name: p.sharding.dims_by_axis() for name, p in model.named_parameters() if hasattr(p, "sharding")}
        answers.append((cut_share(model), max(errors), str(layout)))
    return answers


def test_automatic_layouts_are_exact_and_the_same_on_every_rank() -> None:
    ranks = shared_pool(4).run(exact_with_automatic_layouts, deadline=120.0)
    for answers in zip(*ranks, strict=True):
        assert len({layout for _, _, layout in answers}) == 1
        assert all(share >= 0.5 and error <= 1e-8 for share, error, _ in answers)


def refusals() -> list[str]:
    said = []
    for kwargs in ({"data": 4}, {"data": 2, "model": 2}):
        mesh = hc.Mesh(**kwargs)
        try:
            hc.distribute(Perceptron(), mesh, layout="auto" if "model" not in kwargs else "best")
        except MeshError as error:
            said.append(str(error))
    model = hc.distribute(Perceptron(), hc.Mesh(data=2, model=2), layout="auto")  # nothing is known of its inputs
    return [*said, f"{cut_share(model):.2f}"]


def test_what_cannot_be_chosen_is_refused_and_unknown_inputs_mean_rows() -> None:
    none_left, unknown, share = shared_pool(4).run(refusals, deadline=60.0)[0]
    assert "none is left to cut weights" in none_left and "auto-memory" in unknown and float(share) > 0.9


def test_plans_price_cut_weights_and_keep_the_layout(tmp_path: Path) -> None:
    """What does not fit whole is planned with cut weights; the plan's file says how."""
    device = MACHINE.device.model_copy(
        update={"memory_gb": MACHINE.device.memory_gb.model_copy(update={"value": 0.11, "low": None, "high": None})}
    )
    small = MACHINE.model_copy(update={"device": device})
    with pytest.raises(PlanError):
        hc.plan(lambda: Perceptron(512, 8192), (1, 512), machine=small, devices=4, batch=4)
    plan = hc.plan(lambda: Perceptron(512, 8192), (1, 512), machine=small, devices=4, batch=4, layout="auto")
    assert plan.mesh_sizes["model"] > 1 and plan.layout and plan.predicted.fits
    assert plan.predicted.memory_bytes <= 0.11e9
    plan.save(tmp_path / "plan.json")
    again = hc.load_plan(tmp_path / "plan.json")
    assert again.arrangement == plan.arrangement and "model=" in str(again)
    with dry(0, 4), torch.device("meta"):
        model = hc.distribute(Perceptron(512, 8192), plan=again)
        held = sum(hc.unwrap(p).numel() * 4 for p in model.parameters())
    assert plan.predicted.memory["weights"] == held
    leanest = hc.plan(lambda: Perceptron(512, 8192), (1, 512), machine=small, devices=4, batch=4, layout="auto-memory")
    assert leanest.predicted.memory_bytes == min(
        each.predicted.memory_bytes for each in (leanest, *leanest.alternatives)
    )
    with pytest.raises(PlanError, match="auto-memory"):
        hc.plan(lambda: Perceptron(), (1, 64), machine=small, devices=4, layout="rows")


def test_a_recorded_step_counts_tiles_of_weights() -> None:
    subject = make_subject(lambda: Perceptron(512, 2048), [(1, 512)])
    sizes = {"data": 1, "model": 4}
    whole = record_step(subject, sizes, 4)
    layout = {"rise.*": {0: "model"}, "fall.weight": {1: "model"}}
    cut = record_step(subject, sizes, 4, arrangement=Arrangement(sizes, layout=layout))
    assert cut.weights < 0.3 * whole.weights and cut.gradients == cut.weights
    assert cut.optimizer < 0.3 * whole.optimizer
