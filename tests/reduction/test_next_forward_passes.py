"""``overlap="next-forward"`` under passes that fail, nest, are differentiated, transformed, traced and compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, small_model
from next_forward import Place, ahead, check, plain, sgd, step_of, weights
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from halocline.world import Mesh


def test_a_graph_older_than_the_step_is_refused_as_after_any_step() -> None:
    def train(model: Any, optimizer: Any, place: Place) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss = model[2:](place(torch.tanh(batch(step)).repeat(1, 3)[:, :16])).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="inplace"):
                loss.backward()

    check(train)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("broken")


def _broken(model: Any, optimizer: Any, place: Place) -> None:
    for step in range(7):
        optimizer.zero_grad()
        if step in (3, 5):
            with pytest.raises(RuntimeError):
                model(torch.ones(3, 5, dtype=torch.float64))
            with pytest.raises(ValueError, match="broken"):
                model[2:](Breaks.apply(model[:2](place(batch(step))))).sum().backward()
            optimizer.zero_grad()
        model(place(batch(step))).square().mean().backward()
        optimizer.step()


def _derived(model: Any, optimizer: Any, place: Place) -> None:
    for step in range(7):
        optimizer.zero_grad()
        x = place(batch(step))
        loss = model(x).square().mean()
        if step % 3 == 1:
            torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
        if step % 3 == 2:
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = model(x).square().mean() + sum(slope.square().sum() for slope in slopes)
        loss.backward()
        optimizer.step()


def _checkpointed(model: Any, optimizer: Any, place: Place) -> None:
    for step in range(20):
        optimizer.zero_grad()
        x = place(batch(step)).requires_grad_()
        hidden = checkpoint(model[:2], x, use_reentrant=step < 2) if step % 3 else model[:2](x)
        model[2:](hidden).square().mean().backward()
        optimizer.step()


def _transformed(model: Any, optimizer: Any, place: Place) -> list[Tensor]:
    seen = []
    for step in range(4):
        step_of(model, optimizer, place(batch(step)))
        if step % 2:
            seen.append(torch.func.grad(lambda x: model(x).square().mean())(batch(40)).detach())
        seen.append(torch.func.vmap(model)(batch(41)).detach())
    return seen


def _hooked(model: Any, optimizer: Any, place: Place) -> None:
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    for step in range(6):
        if step == 3:
            model[2].weight.register_post_accumulate_grad_hook(lambda leaf: None)
        step_of(model, optimizer, place(batch(step)))


@pytest.mark.parametrize("loop", [_broken, _derived, _checkpointed, _transformed, _hooked])
def test_passes_of_all_kinds(loop: Any) -> None:
    check(loop)


def test_a_trace_holds_the_model_and_not_the_step() -> None:
    model = small_model()
    optimizer = sgd(model)
    ahead(Mesh(data=1))(model, optimizer)
    plain(model, optimizer, lambda x: x)
    before = [id(p) for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (batch(7),), check_trace=False)
    alone = small_model()
    plain(alone, sgd(alone), lambda x: x)
    assert "sub_" not in str(traced.inlined_graph) and "add_" not in str(traced.inlined_graph)
    assert before == [id(p) for p in model.parameters()]
    check_equal([[traced(batch(8)).detach()]], [alone(batch(8)).detach()])


def test_compiled_models() -> None:
    model = small_model()
    optimizer = sgd(model)
    ahead(Mesh(data=1))(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain(torch.compile(model, backend="eager"), optimizer, lambda x: x)  # type: ignore[arg-type]
    alone = small_model()
    plain(alone, sgd(alone), lambda x: x)
    check_equal([weights(model)], weights(alone))
    torch.compiler.reset()
