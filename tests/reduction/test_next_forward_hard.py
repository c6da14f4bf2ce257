"""What was found to break ``overlap="next-forward"``, and must not again: gradients, parameters, optimizers."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, drawn, part, small_model
from next_forward import Place, adam, ahead, alike, check, plain, sgd, step_of, weights
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import engine_of
from halocline.reduction.schedule.deferred import PendingGradient
from halocline.world import Mesh, run_local

# Gradients ------------------------------------------------------------------------------------------------------------


class Turns(nn.Module):
    """Every other call takes another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(torch.tanh((self.a if self.calls % 2 else self.b)(x)))


turns = drawn(lambda: Turns().double())
judge = drawn(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double())


@pytest.mark.parametrize("zero", [True, False], ids=["zeros", "never zeroed"])
def test_a_gradient_that_a_pass_did_not_add_to_stays_and_is_stepped_by(zero: bool) -> None:
    def train(model: nn.Module, optimizer: Any, place: Place) -> list[Tensor]:
        kept = []
        for step in range(6):
            if zero:
                optimizer.zero_grad(set_to_none=False)
            (0.1 * model(place(batch(step))).square().mean()).backward()
            optimizer.step()
            kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return kept

    check(train, turns)


@pytest.mark.parametrize("made", ["late", "due", "zeroed"])
def test_a_change_of_dtype_while_gradients_are_under_way(made: str) -> None:
    def train(model: nn.Module, optimizer: Any, place: Place) -> None:
        for step in range(5):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            if made == "late" and step == 3:
                model.float().double()
            optimizer.step()
            if made == "zeroed":
                optimizer.zero_grad()
            if made != "late" and step == 3:
                model.float().double()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(train)


def test_kept_gradients_are_never_written_over_and_become_plain() -> None:
    def train(model: nn.Module, optimizer: Any, place: Place) -> list[Tensor]:
        kept = []
        for step in range(6):
            step_of(model, optimizer, place(batch(step)))
            kept += [p.grad for p in model.parameters()]
        model(place(batch(9))).square().mean().backward()  # is added to the last
        found = [gradient.clone() for gradient in kept]
        assert not any(type(gradient) is PendingGradient for gradient in kept)
        return found

    check(train)


def test_a_gradient_as_another_class() -> None:
    def train(model: Any, optimizer: Any, place: Place) -> list[Tensor]:
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            seen.append(model[2].weight.grad.as_subclass(Tensor).clone())
            optimizer.step()
        return seen

    check(train)


def test_one_rank_may_look_and_the_others_not() -> None:
    """Nobody needs another for it: all sums have begun."""

    def train(model: Any, optimizer: Any, place: Place) -> None:
        for step in range(6):
            step_of(model, optimizer, place(batch(step)))
            if len(place(batch(0))) < 8 and Mesh(data=2).rank == 0:
                copy.deepcopy(model.state_dict())
                model.eval()(batch(8))
                model.train()

    check(train)


# Parameters -----------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "as_subclass": lambda w: w.as_subclass(Tensor),
    "Parameter": lambda w: nn.Parameter(w),
    "copy": copy.copy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_due_parameter_made_into_another(name: str) -> None:
    def train(model: Any, optimizer: Any, place: Place) -> list[Tensor]:
        seen = []
        for step in range(4):
            step_of(model, optimizer, place(batch(step)))
            found = COPIES[name](model[2].weight)
            assert type(found) is (Tensor if name == "as_subclass" else nn.Parameter)
            seen.append(found.detach().clone())
        return seen

    check(train)


def test_parameters_replaced_and_added_between_two_steps() -> None:
    def train(model: Any, optimizer: Any, place: Place) -> None:
        for step in range(9):
            step_of(model, optimizer, place(batch(step)))
            if step == 3:
                model[2].weight = nn.Parameter(model[2].weight * 0.5)
                optimizer.add_param_group({"params": [model[2].weight], "lr": 0.02})
            if step == 5:
                model.append(nn.Linear(2, 2).double().requires_grad_(False).requires_grad_(True))
                nn.init.constant_(model[5].weight, 0.3)
                nn.init.constant_(model[5].bias, 0.1)
                optimizer.add_param_group({"params": list(model[5].parameters())})
            if step == 6:
                optimizer.param_groups[0]["lr"] = 0.001
            if step == 7:
                model[0].weight.data = model[0].weight.data * 0.9

    check(train)


class Many(nn.Module):
    """Lists, dicts, complex, empty and scalar parameters, two dtypes, parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        wide = {"dtype": torch.float64}
        self.some = nn.ParameterList([nn.Parameter(torch.randn(6, 6, **wide)), nn.Parameter(torch.randn(0, 6, **wide))])
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.randn(6, **wide))})
        self.complex = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.ones(6))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, **wide))
        self.scalar = nn.Parameter(torch.tensor(1.5, **wide))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.some[0] + self.named["x"] + self.some[1].sum()
        return self.norm((x * self.complex).abs()) * self.scalar + 0 * self.narrow


def test_parameters_of_all_kinds() -> None:
    check(plain, drawn(Many), adam)


# Optimizers -----------------------------------------------------------------------------------------------------------


def test_a_parameter_of_two_optimizers_is_stepped_by_both() -> None:
    def steps(place: Place, wrap: Any) -> list[Tensor]:
        model = small_model()
        both = [sgd(model), torch.optim.SGD(model[0].parameters(), 0.01)]
        wrap(model, both)
        for step in range(5):
            model.zero_grad()
            model(place(batch(step))).square().mean().backward()
            for optimizer in both:
                optimizer.step()
        return weights(model)

    alike(steps)


def test_one_optimizer_of_two_models() -> None:
    def steps(place: Place, wrap: Any) -> list[Tensor]:
        first, second = small_model(), turns()
        head = nn.Linear(2, 6).double()
        nn.init.constant_(head.weight, 0.2)
        nn.init.constant_(head.bias, 0.1)
        second.add_module("head", head)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05, momentum=0.9)
        wrap(first, optimizer)
        wrap(second, optimizer)
        for step in range(6):
            optimizer.zero_grad()
            second(second.head(first(place(batch(step))))).square().mean().backward()
            optimizer.step()
        return weights(first, second)

    alike(steps)


def test_models_trained_in_turn_one_frozen_in_the_other_s_step() -> None:
    def steps(place: Place, wrap: Any) -> list[Tensor]:
        maker, critic = small_model(), judge()
        ours, theirs = adam(maker), sgd(critic)
        wrap(maker, ours)
        wrap(critic, theirs)
        for step in range(8):
            x = place(batch(step))
            critic.requires_grad_(True)
            theirs.zero_grad()
            (critic(maker(x).detach()).square().mean() + critic(x[:, :2]).mean()).backward()
            theirs.step()
            critic.requires_grad_(step % 3 == 0)
            ours.zero_grad()
            critic(maker(x)).mean().backward()
            ours.step()
        return weights(maker, critic)

    alike(steps)


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, _saved], ids=["deepcopy", "save"])
def test_a_copy_of_an_optimizer_has_its_state_and_goes_its_own_way(how: Callable[[Any], Any]) -> None:
    """Its first step too, before which there was no state to copy."""

    def train(model: nn.Module, optimizer: Any, place: Place) -> list[Tensor]:
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            if step >= 2:
                optimizer.step()
                copied, theirs = how((model, optimizer))
                assert len(theirs.state) == len(list(model.parameters()))
                alone = how(optimizer)
                assert len(alone.state) == len(list(model.parameters()))
                step_of(copied, theirs, batch(20 + step))
                seen += weights(copied)
        return seen

    check(train)


def test_a_step_that_somebody_replaced_is_refused() -> None:
    model = small_model()
    optimizer = sgd(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(hc.MeshError, match="replaced"):
        hc.distribute(model, Mesh(data=1), overlap="next-forward", optimizer=optimizer)


def test_a_step_that_fails_fails_where_it_is_made_and_leaves_no_parameter_due_for_ever() -> None:
    class Odd(torch.optim.SGD):
        one_by_one = True
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                raise ValueError("odd")
            return super().step(closure)

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = small_model()
        optimizer = Odd(model.parameters(), 0.1)
        ahead(mesh)(model, optimizer)
        plain(model, optimizer, lambda x: part(x, mesh))
        optimizer.fails = True
        with pytest.raises(ValueError, match="odd"):
            model(part(batch(8), mesh))
        step_of(model, optimizer, part(batch(9), mesh))
        return weights(model)

    first, second = run_local(2, run)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_whoever_is_interrupted_while_he_waits_finds_the_step_still_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    optimizer = sgd(model)
    ahead(Mesh(data=1))(model, optimizer)
    plain(model, optimizer, lambda x: x)
    engine = engine_of(model)
    assert engine is not None
    under_way = engine.overlap._under_way  # type: ignore[union-attr]

    def interrupted(number: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(under_way, "take", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model[0].weight.sum()
    alone = small_model()
    plain(alone, sgd(alone), lambda x: x)
    check_equal([weights(model)], weights(alone))
