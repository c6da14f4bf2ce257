"""Gradients that travel while backward runs: always the mean over ranks, whatever comes, in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from averaging import batch, check_equal, drawn, loss_of, on_ranks, part, small_model, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.reduction import GradientAverage, engine_of
from halocline.testing import shared_pool
from halocline.world import Averaged, Begun, Event, Mesh, run_local


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
    return [p.detach().clone() for p in model.parameters()], control, len(engine.plan.buckets), sums


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


def test_gradients_are_views_of_their_group_and_are_left_to_whoever_keeps_them() -> None:
    def run() -> tuple[bool, bool, bool]:
        mesh = Mesh(data=2)
        names = [["4.weight", "4.bias"], ["2.weight", "2.bias", "0.weight", "0.bias"]]  # not planned anew in between
        model = hc.distribute(small_model(), mesh, buckets=names)
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
        memories = {bucket.memory.untyped_storage().data_ptr() for bucket in engine.plan.buckets}
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
                seen: list[Event] = []
                with mesh.world.events.listening(seen.append):
                    model(torch.arange(rows) + 100 * mesh.rank).square().mean().backward()
            sizes.append(sum(size for event in seen if isinstance(event, Begun) for _, size in event.sends))
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
        hc.distribute(model, mesh, buckets=[["4.weight", "4.bias"], ["2.weight", "2.bias", "0.weight", "0.bias"]])
        for step in range(3):
            loss_of(model, part(batch(step), mesh), step).backward()
        engine = engine_of(model)
        assert engine is not None and engine.plan is not None
        return [[engine.names[index] for index in bucket.indices] for bucket in engine.plan.buckets]

    for found in run_local(2, run):
        assert found == [["4.weight", "4.bias"], ["2.weight", "2.bias", "0.weight", "0.bias"]]
    with pytest.raises(hc.MeshError, match="nothing"):
        run_local(1, lambda: hc.distribute(small_model(), Mesh(data=1), buckets=[["nothing"]]))


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


def test_events_tell_which_bucket_was_averaged_when() -> None:
    def run() -> list[Averaged]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        for step in range(3):
            events: list[Event] = []
            with mesh.world.events.listening(events.append):
                loss_of(model, part(batch(step), mesh), step).backward()
        return [event for event in events if isinstance(event, Averaged)]

    for buckets in run_local(2, run):
        assert buckets and [event.bucket for event in buckets] == list(range(len(buckets)))
        assert all(event.ready <= event.sent <= event.time for event in buckets)
        assert all(a.sent <= b.sent for a, b in pairwise(buckets))


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
        model = hc.distribute(small_model(), mesh, buckets=[["0.weight"]])  # given ones are never planned anew
        engine, found = engine_of(model), []
        assert engine is not None
        for step in range(3):
            loss_of(model, part(batch(step), mesh), step).backward()
            found.append(engine.control_messages)
        return found

    assert run_local(4, run) == [[2, 2, 2]] * 4  # ceil(log2 4) in the first step, by every rank
