"""``overlap="next-forward"`` under loops of all kinds: each computes what one rank would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch
from next_forward import STEPS, check, plain
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of


def _clipped(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(place(batch(step))).square().mean().backward()
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).detach())
        optimizer.step()
    return seen


def _scaled(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(place(batch(step))).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def _closure(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(place(batch(step))).square().mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        optimizer.step(lambda step=step: closure(step))
    return []


def _hooked(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    plain(model, optimizer, place)


def _twice(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(place(batch(step))).square().mean().backward()
        optimizer.step()
        optimizer.step()


def _skipped(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(place(batch(step))).square().mean().backward()
        if step % 2:
            optimizer.step()


def _in_place(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(place(batch(step))).square().mean().backward()
        optimizer.step()


def _never_zeroed(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        (0.1 * model(place(batch(step))).square().mean()).backward()
        optimizer.step()


def _accumulated(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        if engine_of(model) is None:
            model(place(batch(2 * step))).square().mean().backward()
        else:
            with hc.no_sync(model):
                model(place(batch(2 * step))).square().mean().backward()
        model(place(batch(2 * step + 1))).square().mean().backward()
        optimizer.step()


def _two_backwards(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(place(batch(2 * step))).square().mean().backward()
        model(place(batch(2 * step + 1))).square().mean().backward()
        optimizer.step()


def _let_go(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    """Gradients taken from some parameters, replaced for another."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(place(batch(step))).square().mean().backward()
        model[0].weight.grad = None  # type: ignore[index]
        model[2].weight.grad = torch.ones_like(model[2].weight)  # type: ignore[index]
        optimizer.step()


def _frozen(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model[0].requires_grad_(step % 3 != 1)  # type: ignore[index]
        model(place(batch(step))).square().mean().backward()
        optimizer.step()


LOOPS = {f.__name__[1:]: f for f in (
    _clipped, _scaled, _closure, _hooked, _twice, _skipped, _in_place, _never_zeroed, _accumulated, _two_backwards,
    _let_go, _frozen,
)}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_other_loops(name: str) -> None:
    check(LOOPS[name])
