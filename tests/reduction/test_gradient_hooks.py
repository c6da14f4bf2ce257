"""Users' hooks on parameters see the mean over all ranks, as they would see the gradient on one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, loss_of, part, small_model
from torch import Tensor, nn

import halocline as hc
from halocline.testing import shared_pool
from halocline.world import run_local

STEPS = 5
Train = Callable[[nn.Module, Callable[[Tensor], Tensor]], list[Tensor]]


def clip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def clear(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def steps_of(model: nn.Module, place: Callable[[Tensor], Tensor], optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, place(batch(step)), step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def clipped_after_accumulation(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return steps_of(model, place)


def clipped_before(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return steps_of(model, place)


def normalized_layer_by_layer(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.norm()) or gradient / (1 + gradient.norm()))
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    return [*steps_of(model, place), torch.stack(sorted(seen)).detach()]


def optimizer_in_backward(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """As torch's tutorial has it: each parameter steps as soon as its gradient is there, which is then let go of."""
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        loss_of(model, place(batch(number)), number).backward()
        assert all(p.grad is None for p in model.parameters())
    return [p.detach().clone() for p in model.parameters()]


def removed_again(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    weight = next(model.parameters())
    after, before = (
        weight.register_post_accumulate_grad_hook(clear),
        weight.register_hook(lambda gradient: gradient * 0),
    )
    after.remove()
    before.remove()
    return steps_of(model, place)


def one_of_them_unused(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    calls: list[int] = []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, number=number: calls.append(number))
    for step in range(STEPS):
        (model[:3] if step % 2 else model)(place(batch(step))).square().mean().backward()
    return [torch.tensor([calls.count(number) for number in range(len(list(model.parameters())))])]


def gradients_that_pile_up(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """A hook on the gradient sees that of its own pass alone."""
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.abs().sum()) or gradient.clamp(-0.01, 0.01))
    for step in range(STEPS):
        loss_of(model, place(batch(step)), step).backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), torch.stack(sorted(seen))]


def derived_by_the_user(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    weight = next(model.parameters())
    weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return [torch.autograd.grad(loss_of(model, place(batch(0)), 0), weight)[0]]


TRAININGS: dict[str, Train] = {
    f.__name__: f
    for f in (
        clipped_after_accumulation, clipped_before, normalized_layer_by_layer, optimizer_in_backward, removed_again,
        one_of_them_unused, gradients_that_pile_up, derived_by_the_user,
    )
}  # fmt: skip


def check_close(found: list[Tensor], true: list[Tensor]) -> None:
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hooks_do_what_they_do_on_one_rank(name: str, ranks: int) -> None:
    def run() -> list[Tensor]:
        mesh = hc.Mesh(data=ranks)
        return TRAININGS[name](hc.distribute(small_model(), mesh), lambda x: part(x, mesh))

    true = TRAININGS[name](small_model(), lambda x: x)
    for found in run_local(ranks, run):
        check_close(found, true)


def in_processes(name: str, mode: str) -> list[Tensor]:
    mesh, model = hc.Mesh(data=-1), small_model()
    if mode == "next-forward":
        how: dict[str, Any] = {"overlap": mode, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        return steps_hooked(name, hc.distribute(model, mesh, **how), lambda x: part(x, mesh), how["optimizer"])
    hc.distribute(model, mesh, rings="levels" if mode == "rings" else "usual")
    return steps_hooked(name, model, lambda x: part(x, mesh), None)


def steps_hooked(name: str, model: nn.Module, place: Callable[[Tensor], Tensor], optimizer: Any) -> list[Tensor]:
    for parameter in model.parameters():
        if name == "after":
            parameter.register_post_accumulate_grad_hook(clip)
        else:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return steps_of(model, place, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["backward", "next-forward", "rings"])
def test_hooks_in_processes(mode: str) -> None:
    for name in ("after", "before"):
        true = steps_hooked(name, small_model(), lambda x: x, None)
        for found in shared_pool(2).run(in_processes, name, mode):
            check_close(found, true)


def test_hooks_that_were_there_before() -> None:
    def run() -> list[Tensor]:
        mesh, model = hc.Mesh(data=2), small_model()
        weight = model[0].weight
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        after = weight.register_post_accumulate_grad_hook(clear)
        model[2].weight.register_post_accumulate_grad_hook(clip)
        hc.distribute(model, mesh)
        after.remove()
        loss_of(model, part(batch(0), mesh), 0).backward()
        return [model[0].weight.grad, model[2].weight.grad]

    alone = small_model()
    loss_of(alone, batch(0), 0).backward()
    for found in run_local(2, run):
        check_close(found, [alone[0].weight.grad.clamp(-0.01, 0.01), alone[2].weight.grad.clamp(-0.01, 0.01)])


def test_hooks_of_one_rank_alone() -> None:
    """As a logger on rank 0 registers them."""

    def run() -> list[Tensor]:
        mesh, seen = hc.Mesh(data=2), []
        model = hc.distribute(small_model(), mesh)
        if mesh.rank == 0:
            model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        loss_of(model, part(batch(0), mesh), 0).backward()
        return [*seen, model[0].weight.grad]

    first, second = run_local(2, run)
    assert len(first) == 2 and len(second) == 1
    check_close(first, [second[0], second[0]])


def test_a_share_is_not_shown() -> None:
    def run() -> None:
        mesh = hc.Mesh(data=2)
        model = hc.distribute(small_model(), mesh)
        model[0].weight.register_post_accumulate_grad_hook(clear)
        with (
            pytest.raises(hc.Refused, match=r"a hook on 0\.weight in hc\.no_sync"),
            hc.no_sync(model),
        ):
            loss_of(model, part(batch(0), mesh), 0).backward()

    run_local(2, run)


def test_a_parameter_that_outlives_its_model_keeps_its_hooks() -> None:
    def run() -> list[str]:
        model, seen = hc.distribute(small_model(), hc.Mesh(data=2)), []
        weight = model[0].weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append("called"))
        del model
        weight.square().sum().backward()
        return seen

    assert run_local(2, run) == [["called"]] * 2
