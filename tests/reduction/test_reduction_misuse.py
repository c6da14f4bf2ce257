"""What users do to gradients, and to models, between one backward and the next: right, or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, drawn, loss_of, part, small_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.reduction import engine_of
from halocline.world import Mesh, run_local

Between = Callable[[nn.Module, int], None]


def steps(model: Any, place: Callable[[Tensor], Tensor], between: Between, count: int = 8) -> list[Tensor]:
    for step in range(count):
        loss_of(model, place(batch(step)), step).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        between(model, step)
    return [p.detach().clone() for p in model.parameters()]


def check_between(between: Between, make: Callable[[], Any] = small_model) -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return steps(hc.distribute(make(), mesh), lambda x: part(x, mesh), between)

    check_equal(run_local(2, run), steps(make(), lambda x: x, between))


def zero(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=step % 2 == 0)


def converted(model: nn.Module, step: int) -> None:
    """``Module.to`` does this: every ``.grad`` is pointed elsewhere."""
    model._apply(torch.clone)
    zero(model, step)


def repointed(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * 0.5  # type: ignore[union-attr]


def accumulated(model: nn.Module, step: int) -> None:
    if step % 3 == 2:
        zero(model, step)


@pytest.mark.parametrize("between", [zero, converted, repointed, accumulated])
def test_gradients_that_were_handled(between: Between) -> None:
    check_between(between)


def test_memory_is_kept_where_nobody_else_looks_into_it() -> None:
    def run() -> int:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh, buckets=[["4.weight", "4.bias"]])
        places = set()
        for step in range(6):
            loss_of(model, part(batch(step), mesh), step).backward()
            model.zero_grad(set_to_none=False)
            places |= {p.grad.data_ptr() for p in model[4].parameters() if step}
        return len(places)

    assert run_local(2, run) == [2, 2]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.now:
            raise RuntimeError("no")
        return gradient, None


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(6, 5).double(), nn.Linear(5, 2).double(), False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Fails.apply(torch.tanh(self.first(x)), self.fails))


fragile = drawn(Fragile)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_backward_that_failed_on_all_ranks_leaves_no_trace(to_none: bool) -> None:
    def between(model: nn.Module, step: int) -> None:
        model.zero_grad(set_to_none=to_none)
        if step in (3, 4):
            model.fails = True
            with pytest.raises(RuntimeError, match="no"):
                loss_of(model, batch(50)[:2], step).backward()
            model.fails = False
            model.zero_grad(set_to_none=to_none)

    check_between(between, fragile)


class Tied(nn.Module):
    """A weight used inside a checkpoint and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.again = nn.Linear(6, 6).double(), nn.Linear(6, 2).double(), False

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * x.detach().requires_grad_()
        if self.again:
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return self.last(self.layer(x))


tied = drawn(Tied)


def test_a_pass_inside_another_after_the_plan_was_made() -> None:
    def between(model: nn.Module, step: int) -> None:
        model.again = step in (4, 6)
        model.zero_grad()

    check_between(between, tied)


def test_what_piled_up_for_parameters_outside_the_plan() -> None:
    def passes(model: Any, place: Callable[[Tensor], Tensor], cut: bool) -> list[Tensor]:
        for step in range(4):
            loss_of(model[:3], place(batch(step)), step).backward()
        model.zero_grad()
        with hc.no_sync(model) if cut else torch.enable_grad():
            loss_of(model, place(batch(7)), 7).backward()
        loss_of(model[:3], place(batch(8)), 8).backward()
        return [p.grad.clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return passes(hc.distribute(small_model(), mesh), lambda x: part(x, mesh), True)

    check_equal(run_local(2, run), passes(small_model(), lambda x: x, False))


def test_a_pile_that_was_dropped_is_forgotten() -> None:
    def run() -> list[bool]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        with hc.no_sync(model):
            loss_of(model, part(batch(0), mesh), 0).backward()
        model.zero_grad()
        loss_of(model[:3], part(batch(1), mesh), 1).backward()
        return [p.grad is None for p in model.parameters()]

    assert run_local(2, run) == [[False] * 4 + [True] * 2] * 2


def test_two_models_in_one_backward_that_arrive_in_other_orders() -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        first, second = (hc.distribute(small_model(), mesh) for _ in range(2))
        for step in range(4):
            x = part(batch(step), mesh)
            losses = [loss_of(first, x, step), loss_of(second, 2 * x, step)]
            (losses[mesh.rank] + losses[1 - mesh.rank]).backward()
        return [p.grad.clone() for model in (first, second) for p in model.parameters()]

    found = run_local(2, run)
    one, two = small_model(), small_model()
    for step in range(4):
        (loss_of(one, batch(step), step) + loss_of(two, 2 * batch(step), step)).backward()
    check_equal(found, [p.grad for model in (one, two) for p in model.parameters()])


def test_constant_gradients_do_not_hide_a_graph() -> None:
    """The last bias of a mean has a constant gradient; the others' are to be differentiated all the same."""

    def run() -> bool:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        for step in range(3):
            loss_of(model, part(batch(step), mesh), step).backward()
        model.zero_grad()
        model(part(batch(4), mesh)).mean().backward(create_graph=True)
        kept = bool(model[0].weight.grad.requires_grad)
        model.zero_grad()
        return kept

    torch.set_warn_always(True)  # else once a process, and another test may have had it
    try:
        with pytest.warns(UserWarning, match="create_graph"):
            assert run_local(2, run) == [True, True]
    finally:
        torch.set_warn_always(False)


def test_one_parameter_has_one_engine() -> None:
    def run() -> None:
        mesh = Mesh(data=1)
        model = hc.distribute(small_model(), mesh)
        with pytest.raises(hc.MeshError, match="averaged already"):
            hc.distribute(nn.Sequential(model[0]), mesh)
        with pytest.raises(hc.MeshError, match="averaged already"):
            hc.average_gradients([model[0].weight], mesh)

    run_local(1, run)


def test_a_loaded_module_is_new() -> None:
    def run() -> bool:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        head = pickle.loads(pickle.dumps(model))[4]
        model.append(nn.Linear(2, 12).double())
        model.append(copy.deepcopy(head))
        model[6] = head
        model(batch(0))
        engine = engine_of(model)
        assert engine is not None
        return any(parameter is head.weight for parameter in engine.parameters)

    assert run_local(2, run) == [True, True]


def test_a_new_part_that_is_called_by_itself_is_refused() -> None:
    def run() -> None:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        model[4] = nn.Linear(12, 2).double()
        with pytest.raises(hc.MeshError, match="call it, not its parts"):
            loss_of(model[:], part(batch(0), mesh), 0).backward()

    run_local(2, run)


def test_sparse_ones_alone_at_first_and_without_rows() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.dense = nn.Embedding(9, 4, padding_idx=0, sparse=True).double(), nn.Linear(4, 1).double()

    make = drawn(Words)

    def passes(model: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        words = torch.arange(16).view(4, 4) % 9
        for step in range(4):
            model.zero_grad()
            found = model.rows(place(words if step != 1 else torch.zeros_like(words))).mean(1)
            (model.dense(found) if step >= 2 else found).square().mean().backward()
        return [model.rows.weight.grad.to_dense(), *(p.grad.clone() for p in model.dense.parameters())]

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return passes(hc.distribute(make(), mesh), lambda x: part(x, mesh))

    check_equal(run_local(2, run), passes(make(), lambda x: x))


def test_complex_parameters_after_an_odd_number_of_real_ones() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.complex = nn.Parameter(torch.randn(2, dtype=torch.complex128))
            self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1) * (self.real.sum() + (self.complex * self.complex.conj()).real.sum() + self.empty.sum())

    check_between(zero, drawn(Odd))
