"""What was found to break late gradients, lag and the wire, and must not again: memory, ways that part, NaN."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, drawn, part, small_model
from next_forward import Place, ahead, check, plain, sgd, step_of, weights
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.reduction.buckets.bucket import Bucket
from halocline.world import Mesh, run_local

# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["late", "due", "zeroed", "forward", "lag"])
def test_a_model_that_is_let_go_of_is_gone(state: str) -> None:
    def run() -> list[Any]:
        mesh = Mesh(data=2)
        model = small_model()
        optimizer = sgd(model)
        if state == "lag":
            hc.distribute(model, mesh, lag=1)
        else:
            ahead(mesh)(model, optimizer)
        plain(model, optimizer, lambda x: part(x, mesh))
        if state != "due":
            optimizer.zero_grad()
        if state != "zeroed":
            loss = model(part(batch(7), mesh)).sum()
            if state == "late":
                loss.backward()
        return [weakref.ref(each) for each in (model, optimizer, engine_of(model), model[0].weight)]

    found = run_local(2, run)
    until = time.monotonic() + 5  # that what was under way is done
    while any(reference() is not None for references in found for reference in references):
        assert time.monotonic() < until
        gc.collect()


def test_a_layer_and_a_gradient_that_outlive_their_model() -> None:
    def train(wrap: Callable[[nn.Module, Any], Any], place: Place) -> tuple[Any, Tensor]:
        model = small_model()
        optimizer = sgd(model)
        wrap(model, optimizer)
        plain(model, optimizer, place)
        return model[0], model[2].weight.grad

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        layer, gradient = train(ahead(mesh), lambda x: part(x, mesh))
        gc.collect()
        return [gradient.clone(), layer.weight.detach().clone(), layer.weight.grad.clone()]

    def only_gradient() -> list[Tensor]:
        mesh = Mesh(data=2)
        gradient = train(ahead(mesh), lambda x: part(x, mesh))[1]
        gc.collect()
        return [gradient.clone(), gradient * 2]

    layer, gradient = train(lambda model, optimizer: model, lambda x: x)
    check_equal(run_local(2, run), [gradient, layer.weight.detach(), layer.weight.grad])
    check_equal(run_local(2, only_gradient), [gradient, gradient * 2])


@pytest.mark.parametrize("lag", [0, 1])
def test_a_group_s_memory_is_found_once(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lag's two plans too: what was applied is let go of before the next step wants its memory."""
    found: list[Bucket] = []
    allocate = Bucket._allocate
    monkeypatch.setattr(Bucket, "_allocate", lambda self: (found.append(self), allocate(self))[1])

    def run() -> None:
        mesh = Mesh(data=2)
        model = small_model()
        optimizer = sgd(model)
        if lag:
            hc.distribute(model, mesh, lag=1)
        else:
            ahead(mesh)(model, optimizer)
        for step in range(12):
            step_of(model, optimizer, part(batch(step), mesh))

    run_local(2, run)
    assert max(Counter(map(id, found)).values()) == 1


# Lag and wire ---------------------------------------------------------------------------------------------------------


def lagged(model: nn.Module, place: Place, loop: Callable[[nn.Module, Any, Place], Any]) -> list[Tensor]:
    loop(model, sgd(model), place)
    return weights(model)


def test_with_lag_gradients_may_be_asked_for_in_between() -> None:
    """``autograd.grad`` adds nothing to what a parameter holds."""

    def loop(model: nn.Module, optimizer: Any, place: Place) -> None:
        for step in range(5):
            step_of(model, optimizer, place(batch(step)))
            if asks:
                torch.autograd.grad(model(place(batch(9))).square().mean(), list(model.parameters()))

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return lagged(hc.distribute(small_model(), mesh, lag=1), lambda x: part(x, mesh), loop)

    asks = True
    found = run_local(2, run)
    asks = False
    check_equal(found, run_local(2, run)[0])


class Ways(nn.Module):
    """Rows go different ways, except where all take both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        if both:
            return self.c(torch.tanh(self.a(x) + self.b(x)))
        return self.c(torch.stack([(self.a if row[0] > 0 else self.b)(row) for row in x]))


ways = drawn(lambda: Ways().double())


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_that_part_agree_and_part_again(lag: int) -> None:
    """Over 64 passes in which all went one way, after which they stop asking."""

    def train(model: nn.Module, optimizer: Any, place: Place, late: bool = False) -> None:
        before: list[Tensor | None] = [None] * 8
        for step in range(84):
            optimizer.zero_grad()
            model(place(batch(step, 4)), 3 < step < 76).square().mean().backward()
            if late:
                found = [p.grad for p in model.parameters()]
                for p, gradient in zip(model.parameters(), before, strict=True):
                    p.grad = gradient
                before = found
            optimizer.step()

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return lagged(hc.distribute(ways(), mesh, lag=1), lambda x: part(x, mesh), train)

    if lag:
        check_equal(run_local(2, run), lagged(ways(), lambda x: x, lambda m, o, place: train(m, o, place, True)))
    else:
        check(train, ways)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rows((x[:, 0] * 3).long().abs()))


@pytest.mark.parametrize("lag", [0, 1])
def test_sparse_gradients(lag: int) -> None:
    make = drawn(lambda: Rows().double())

    def late(model: nn.Module, optimizer: Any, place: Place) -> None:
        before: list[Tensor | None] = [None] * 3
        for step in range(6):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            found = [p.grad for p in model.parameters()]
            for p, gradient in zip(model.parameters(), before, strict=True):
                p.grad = gradient
            optimizer.step()
            before = found

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        return lagged(hc.distribute(make(), mesh, lag=1), lambda x: part(x, mesh), plain)

    if lag:
        check_equal(run_local(2, run), lagged(make(), lambda x: x, late))
    else:
        check(plain, make, lambda model: torch.optim.SGD(model.parameters(), 0.1))


def test_after_what_is_not_a_number_half_precision_finds_its_scale_anew() -> None:
    """A first sum with a NaN in it tells nothing of how large the next will be."""

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = hc.distribute(small_model(), mesh, wire="fp16")
        for step in range(3):
            model.zero_grad()
            (model(part(batch(step), mesh)).square().mean() * (float("nan") if step == 1 else 1e-4)).backward()
        return [1e4 * p.grad for p in model.parameters() if p.grad is not None]

    model = small_model()
    model(batch(2)).square().mean().backward()
    for found, true in zip(run_local(2, run)[0], [p.grad for p in model.parameters()], strict=True):
        assert true is not None
        assert float((found - true).abs().max()) < 8 * 2.0**-11 * float(true.abs().max())
