"""Gradients that travel while backward runs: always the mean over ranks, whatever comes, in whatever order."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from math import ceil, log2
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.reduction import Coordinator, Doubling, GradientAverage, Tree, engine_of
from halocline.reduction.control import packed, unpacked
from halocline.reduction.grouping import Link, best_cut, finish_time, robust_cut
from halocline.testing import RankPool, shared_pool
from halocline.world import Mesh, run_local, this_world

STEPS = 20


# ---- what goes together ----


def every_cut(count: int) -> list[list[int]]:
    cuts = [[0]]
    for place in range(1, count):
        cuts += [[*cut, place] for cut in cuts]
    return cuts


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 1000)), min_size=1, max_size=8),
    st.floats(1e-4, 0.5),
    st.floats(1e-5, 1e-2),
)
def test_no_cut_is_better_than_the_planned_one(gradients: list[tuple[float, int]], latency: float, rate: float) -> None:
    gradients.sort()
    ready, sizes = [r for r, _ in gradients], [s for _, s in gradients]
    link = Link(latency, rate)
    best = min(finish_time(cut, ready, sizes, link) for cut in every_cut(len(sizes)))
    assert finish_time(best_cut(ready, sizes, link), ready, sizes, link) == pytest.approx(best, rel=1e-9)


def test_small_messages_are_preferred_where_they_cost_little() -> None:
    """A wire that is busy all the time: fewer, larger messages would gain nothing."""
    ready, sizes = [0.01 * i for i in range(60)], [1 << 18] * 60
    link = Link(1e-5, 1e-7)
    robust, best = robust_cut(ready, sizes, link), best_cut(ready, sizes, link)
    assert len(robust) > len(best)
    assert finish_time(robust, ready, sizes, link) <= 1.01 * finish_time(best, ready, sizes, link)


def test_many_small_ones_that_come_together_go_together() -> None:
    assert best_cut([1.0] * 50, [10] * 50, Link(0.1, 0.001)) == [0]
    assert len(best_cut([float(i) for i in range(50)], [10] * 50, Link(1e-3, 1e-3))) == 50


# ---- equality ----


def drawn(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    """Drawn once, and copied: ranks in one process share torch's random stream."""

    @cache
    def once() -> nn.Module:
        torch.manual_seed(3)
        return make()

    once()
    return lambda: copy.deepcopy(once())


small_model = drawn(
    lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 2)).double()
)


def batch(step: int, size: int = 8) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)


def part(x: Tensor, mesh: Mesh) -> Tensor:
    return x.chunk(mesh.size)[mesh.rank]


Body = Callable[[nn.Module, Tensor, int], Tensor]


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return model(x).square().mean()


def trained(
    model: nn.Module, place: Callable[[Tensor], Tensor], body: Body = loss_of, steps: int = STEPS
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        body(model, place(batch(step)), step).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_equal(found: Sequence[Sequence[Tensor]], true: Sequence[Tensor]) -> None:
    """Same bits on every rank, and what one rank would have."""
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    for a, b in zip(found[0], true, strict=True):
        assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


def on_ranks(ranks: int, make: Callable[[], nn.Module], body: Body = loss_of, steps: int = STEPS) -> list[list[Tensor]]:
    def run() -> list[Tensor]:
        mesh = Mesh(data=ranks)
        return trained(hc.distribute(make(), mesh), lambda x: part(x, mesh), body, steps)

    return run_local(ranks, run)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_twenty_steps_equal_one_rank_s(ranks: int) -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=ranks)
        return trained(hc.distribute(small_model(), mesh), lambda x: x[2 * mesh.rank : 2 * mesh.rank + 2])

    check_equal(run_local(ranks, run), trained(small_model(), lambda x: x[: 2 * ranks]))


def processes_body(steps: int) -> tuple[list[Tensor], list[int], int, int]:
    """On real processes: parameters, messages other than sums after the first step, groups, sums a step."""
    mesh = Mesh(data=-1)
    model = hc.distribute(small_model(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    control, sums = [], 0
    for step in range(steps):
        mesh.world.traffic.clear()
        optimizer.zero_grad()
        loss_of(model, part(batch(step), mesh), step).backward()
        optimizer.step()
        control.append(mesh.world.traffic.messages)
        sums = mesh.world.traffic.sums
    engine = engine_of(model)
    assert engine is not None and engine.plan is not None
    return [p.detach().clone() for p in model.parameters()], control, len(engine.plan.groups), sums


def test_a_static_graph_sends_its_groups_and_nothing_else() -> None:
    """Between processes, over gloo: one message a group, no control message after the first step on any rank."""
    true = trained(small_model(), lambda x: x, steps=3)
    found = shared_pool(4).run(processes_body, 3)
    check_equal([parameters for parameters, *_ in found], true)
    for _, control, groups, sums in found:
        assert control[0] > 0 and control[2] == 0
        assert sums == groups


def test_no_rank_is_special() -> None:
    """In the first step too, every rank sends as many messages as any other."""
    found = shared_pool(4).run(processes_body, 2)
    assert len({control[0] for _, control, *_ in found}) == 1


# ---- ways through the model that differ ----


class Branches(nn.Module):
    """Which of its layers are used is up to the caller."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))
        self.last = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        x = self.first(x)
        for index in used:
            x = x + torch.tanh(self.layers[index](x))
        return self.last(x)


branches = drawn(Branches)


def ways(step: int, ranks: int) -> list[list[int]]:
    """Of each rank; in some steps the same for all, in some all different, some layers by nobody."""
    rng = random.Random(step)
    if step % 3 == 0:
        return [[0, 1, 2]] * ranks
    return [sorted(rng.sample(range(4), rng.randrange(0, 4))) for _ in range(ranks)]  # the fifth by nobody, ever


def one_rank_of_branches(ranks: int, steps: int) -> list[Tensor]:
    model = branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        parts = batch(step).chunk(ranks)
        losses = [model(x, used).square().mean() for x, used in zip(parts, ways(step, ranks), strict=True)]
        (sum(losses) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def branches_on_rank(
    steps: int, control: Callable[..., Any] = Doubling, delays: bool = False
) -> tuple[list[Tensor], bool]:
    mesh = Mesh(data=-1) if this_world().size > 1 else Mesh(data=1)
    model = hc.distribute(branches(), mesh)
    engine = engine_of(model)
    assert engine is not None
    engine._make_control = control
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rng = random.Random(mesh.rank)
    for step in range(steps):
        optimizer.zero_grad()
        if delays and rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        model(part(batch(step), mesh), ways(step, mesh.size)[mesh.rank]).square().mean().backward()
        optimizer.step()
    unused = [p.grad is None for p in model.layers[4].parameters()]
    return [p.detach().clone() for p in model.parameters()], all(unused)


@pytest.mark.parametrize(
    "control",
    [Doubling, Tree, partial(Tree, radix=2), Coordinator],
    ids=["doubling", "tree", "tree of 2", "coordinator"],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_take_different_ways(ranks: int, control: Callable[..., Any]) -> None:
    found = run_local(ranks, lambda: branches_on_rank(12, control))
    check_equal([parameters for parameters, _ in found], one_rank_of_branches(ranks, 12))
    assert all(unused for _, unused in found)  # what nobody uses has no gradient


def test_hundreds_of_random_steps_between_processes() -> None:
    """Random branches and delays: no hang, and the weights of one rank."""
    found = shared_pool(4).run(branches_on_rank, 200, Doubling, True, deadline=120)
    check_equal([parameters for parameters, _ in found], one_rank_of_branches(4, 200))


def test_ranks_that_go_one_way_again_stop_asking() -> None:
    def run() -> tuple[bool, bool, list[Tensor]]:
        mesh = Mesh(data=2)
        model = hc.distribute(branches(), mesh)
        engine = engine_of(model)
        assert engine is not None
        was = False
        for step in range(80):
            used = [0, mesh.rank] if step < 3 else [0, 1]
            model(part(batch(step), mesh), used).square().mean().backward()
            was |= engine.plan is not None and engine.plan.dynamic
        return was, engine.plan is not None and engine.plan.dynamic, [p.grad.clone() for p in model.first.parameters()]  # type: ignore[union-attr]

    found = run_local(2, run)
    assert [(was, still) for was, still, _ in found] == [(True, False)] * 2


# ---- agreement ----


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", [Doubling, Tree, partial(Tree, radix=2), Coordinator])
def test_agreement_is_right_and_costs_what_it_may(kind: Callable[..., Any], ranks: int) -> None:
    def run() -> tuple[list[bool], list[bool], int]:
        world = this_world()
        control = kind(world, "test")
        mine = [(place * 7 + world.rank) % 3 != 0 for place in range(100)]
        world.traffic.clear()
        both = unpacked(control.agree(packed(mine), torch.bitwise_and), 100)
        sent = world.traffic.messages
        either = unpacked(control.agree(packed(mine), torch.bitwise_or), 100)
        return both, either, sent

    found = run_local(ranks, run)
    every = [[(place * 7 + rank) % 3 != 0 for place in range(100)] for rank in range(ranks)]
    for both, either, sent in found:
        assert both == [all(column) for column in zip(*every, strict=True)]
        assert either == [any(column) for column in zip(*every, strict=True)]
        if kind is Doubling:
            assert sent <= ceil(log2(ranks)) + (0 if log2(ranks).is_integer() else 1)
        elif kind is not Coordinator:
            assert sent <= kind(this_world_of(ranks), "x").radix + 1
    if kind is Coordinator:
        assert found[0][2] == ranks - 1 and all(sent == 1 for *_, sent in found[1:])


def this_world_of(ranks: int) -> Any:
    return run_local(ranks, this_world)[0]


# ---- what users do ----


def test_gradients_are_views_of_their_group_and_are_left_to_whoever_keeps_them() -> None:
    def run() -> tuple[bool, bool, bool]:
        mesh = Mesh(data=2)
        names = [["4.weight", "4.bias"], ["2.weight", "2.bias", "0.weight", "0.bias"]]  # not planned anew in between
        model = hc.distribute(small_model(), mesh, groups=names)
        engine = engine_of(model)
        assert engine is not None
        kept: list[Tensor] = []
        for step in range(4):
            model.zero_grad()
            loss_of(model, part(batch(step), mesh), step).backward()
            if step == 2:
                kept = [p.grad for p in model.parameters()]  # type: ignore[misc]
                values = [g.clone() for g in kept]
        assert engine.plan is not None
        memories = {group.memory.untyped_storage().data_ptr() for group in engine.plan.groups}
        inside = all(p.grad.untyped_storage().data_ptr() in memories for p in model.parameters())  # type: ignore[union-attr]
        return inside, all(torch.equal(a, b) for a, b in zip(kept, values, strict=True)), engine.plan.dynamic

    assert run_local(2, run) == [(True, True, False)] * 2


def test_accumulation_and_no_sync() -> None:
    def accumulate(model: nn.Module, place: Callable[[Tensor], Tensor], cut: bool) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                if cut and micro < 2 and step % 3:
                    with hc.no_sync(model):
                        loss_of(model, place(batch(10 * step + micro)), step).backward()
                else:
                    loss_of(model, place(batch(10 * step + micro)), step).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return accumulate(hc.distribute(small_model(), mesh), lambda x: part(x, mesh), True)

    check_equal(run_local(2, run), accumulate(small_model(), lambda x: x, False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    def body(model: nn.Sequential, x: Tensor, step: int) -> Tensor:
        x = x.requires_grad_()
        x = checkpoint(model[:2], x, use_reentrant=reentrant)
        return checkpoint(model[2:], x, use_reentrant=reentrant).square().mean()

    check_equal(on_ranks(2, small_model, body, 8), trained(small_model(), lambda x: x, body, 8))  # type: ignore[arg-type]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.complex = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.double()
        self.half_way = nn.Linear(6, 2).float()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(self.second(torch.tanh(self.first(x)))))
        return self.half_way((x * (self.complex * self.complex.conj()).real).float()).double()


tied = drawn(Tied)


def test_tied_frozen_complex_and_mixed_parameters() -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return trained(hc.distribute(tied(), mesh), lambda x: part(x, mesh), steps=6)

    found, true = run_local(2, run), trained(tied(), lambda x: x, steps=6)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for a, b in zip(found[0], true, strict=True):
        tolerance = 1e-6 if b.dtype == torch.float32 else 1e-7  # the float32 layer stands between
        assert float((a - b).abs().max()) <= tolerance


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 4, sparse=True)
        self.dense = nn.Linear(4, 1)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return self.dense(self.rows(words).mean(1))


words_model = drawn(Words)


def test_sparse_gradients_stay_sparse() -> None:
    words = torch.randint(0, 50, (6, 8, 3), generator=torch.Generator().manual_seed(0))

    def steps(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for some in words:
            optimizer.zero_grad()
            model(place(some)).square().mean().backward()
            assert model.rows.weight.grad.is_sparse
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return steps(hc.distribute(words_model(), mesh), lambda x: part(x, mesh))

    check_equal(run_local(2, run), steps(words_model(), lambda x: x))


def test_few_rows_are_few_bytes() -> None:
    def run() -> list[int]:
        mesh = Mesh(data=2)
        model = hc.distribute(nn.Embedding(10_000, 16, sparse=True).double(), mesh)
        sizes = []
        for rows in (2, 40):
            for _ in range(2):
                model.zero_grad()
                seen: list[object] = []
                mesh.world.journal = seen
                model(torch.arange(rows) + 100 * mesh.rank).square().mean().backward()
                mesh.world.journal = None
            sizes.append(sum(size for event in seen if hasattr(event, "sends") for _, size in event.sends))
        return sizes

    for few, many in run_local(2, run):
        assert few < 1000 and 40 * 16 * 8 <= many < 40 * 16 * 8 + 2000


added = drawn(lambda: nn.Linear(2, 2).double())
wider = drawn(lambda: nn.Linear(12, 7).double())


def test_parameters_added_between_steps() -> None:
    def steps(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for step in range(6):
            if step == 3:
                model.append(added())
            loss_of(model, place(batch(step)), step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return steps(hc.distribute(small_model(), mesh), lambda x: part(x, mesh))

    check_equal(run_local(2, run), steps(small_model(), lambda x: x))


def test_parameters_unfrozen_between_steps() -> None:
    def steps(model: nn.Sequential, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for step in range(6):
            model[0].requires_grad_(step >= 3)
            loss_of(model, place(batch(step)), step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
                        parameter.grad = None
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = small_model()
        model[0].requires_grad_(False)
        return steps(hc.distribute(model, mesh), lambda x: part(x, mesh))

    check_equal(run_local(2, run), steps(small_model(), lambda x: x))


def test_an_explicit_grouping_is_kept() -> None:
    def run() -> list[list[str]]:
        mesh = Mesh(data=2)
        model = small_model()
        hc.distribute(model, mesh, groups=[["4.weight", "4.bias"], ["2.weight", "2.bias", "0.weight", "0.bias"]])
        for step in range(3):
            loss_of(model, part(batch(step), mesh), step).backward()
        engine = engine_of(model)
        assert engine is not None and engine.plan is not None
        return [[engine.names[index] for index in group.indices] for group in engine.plan.groups]

    for found in run_local(2, run):
        assert found == [["4.weight", "4.bias"], ["2.weight", "2.bias", "0.weight", "0.bias"]]
    with pytest.raises(hc.MeshError, match="nothing"):
        run_local(1, lambda: hc.distribute(small_model(), Mesh(data=1), groups=[["nothing"]]))


def test_a_penalty_on_gradients_and_then_an_ordinary_step() -> None:
    def body(model: nn.Module, x: Tensor, step: int) -> Tensor:
        loss = loss_of(model, x, step)
        if step % 2:
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + 0.1 * sum(g.square().sum() for g in grads)
        return loss

    check_equal(on_ranks(2, small_model, body, 6), trained(small_model(), lambda x: x, body, 6))


def test_clipping_and_scaling_see_the_mean() -> None:
    def steps(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=128.0)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, place(batch(step)), step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return steps(hc.distribute(small_model(), mesh), lambda x: part(x, mesh))

    check_equal(run_local(2, run), steps(small_model(), lambda x: x))


def test_a_changed_shape_is_planned_anew() -> None:
    def steps(model: nn.Sequential, place: Callable[[Tensor], Tensor], widen: bool = True) -> list[Tensor]:
        for step in range(6):
            if step == 3:
                last = wider()
                model[4].weight.data, model[4].bias.data = last.weight.data, last.bias.data
            model.zero_grad()
            loss_of(model, place(batch(step)), step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return steps(hc.distribute(small_model(), mesh), lambda x: part(x, mesh))

    check_equal(run_local(2, run), steps(small_model(), lambda x: x))


def test_the_journal_tells_what_went_when() -> None:
    def run() -> list[dict[str, Any]]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        engine = engine_of(model)
        assert engine is not None
        for step in range(3):
            engine.journal = []
            loss_of(model, part(batch(step), mesh), step).backward()
        return engine.journal

    for journal in run_local(2, run):
        assert [entry["group"] for entry in journal] == list(range(len(journal)))
        assert all(entry["ready_s"] <= entry["sent_s"] <= entry["done_s"] for entry in journal)
        assert all(a["sent_s"] <= b["sent_s"] for a, b in pairwise(journal))


# ---- faults ----


def fails_in_the_middle(kind: str) -> str:
    """Rank 1 stops in the middle of the third backward."""
    mesh = Mesh(data=-1)
    mesh.world.set_deadline(2.0)
    model = hc.distribute(small_model(), mesh)

    def stop(gradient: Tensor) -> None:
        if mesh.rank == 1 and step == 2:
            if kind == "dies":
                os._exit(3)
            time.sleep(7)

    model[2].weight.register_hook(stop)
    step = 0
    for step in range(4):
        loss_of(model, part(batch(step), mesh), step).backward()
    return "no error"


@pytest.mark.parametrize("kind", ["dies", "stalls"])
def test_a_rank_that_stops_in_the_middle_of_a_sum_is_named(kind: str) -> None:
    with RankPool(3, collective_timeout=2.0) as pool:
        outcomes = pool.outcomes(fails_in_the_middle, kind, deadline=15, grace=8)
    texts = [str(outcome) for outcome in outcomes if outcome.rank != 1]
    assert len(texts) == 2
    assert all("RankFailure" in text and "rank 1" in text for text in texts), texts


@given(st.lists(st.booleans(), max_size=200))
def test_bits_are_packed_and_unpacked(flags: list[bool]) -> None:
    assert unpacked(packed(flags), len(flags)) == flags


def test_an_engine_is_left_behind_by_copies() -> None:
    def run() -> bool:
        model = hc.distribute(small_model(), Mesh(data=1))
        return engine_of(copy.deepcopy(model)) is None and isinstance(engine_of(model), GradientAverage)

    assert run_local(1, run) == [True]


def test_images_with_channels_last_keep_their_layout() -> None:
    def run() -> bool:
        mesh = Mesh(data=2)
        model = hc.distribute(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), mesh)
        for _ in range(3):
            model.zero_grad()
            F.relu(model(torch.randn(2, 3, 8, 8))).sum().backward()
        return model.weight.grad.stride() == model.weight.stride()  # type: ignore[union-attr]

    assert run_local(2, run) == [True, True]


def test_control_messages_are_counted() -> None:
    def run() -> list[int]:
        mesh = Mesh(data=4)
        model = hc.distribute(small_model(), mesh, groups=[["0.weight"]])  # given ones are never planned anew
        engine, found = engine_of(model), []
        assert engine is not None
        for step in range(3):
            loss_of(model, part(batch(step), mesh), step).backward()
            found.append(engine.control_messages)
        return found

    assert run_local(4, run) == [[2, 2, 2]] * 4  # ceil(log2 4) in the first step, by every rank
