"""``overlap="next-forward"``: sums that go on into the next forward, and steps made when they are needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaging import batch, check_equal, drawn, part, small_model
from next_forward import STEPS, MakeOptimizer, adam, check, plain, sgd
from torch import Tensor, nn

import halocline as hc
from halocline.reduction import DeferredParameter, engine_of
from halocline.reduction.schedule.deferred import PendingGradient
from halocline.world import Mesh, run_local


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_steps_equal_one_rank_s(ranks: int) -> None:
    def train(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(place(batch(step, 12))).square().mean().backward()
            optimizer.step()

    check(train, ranks=ranks)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": adam,
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1),
    "foreach": lambda m: torch.optim.Adam(m.parameters(), 0.01, foreach=True),
    "fused": lambda m: torch.optim.Adam(m.parameters(), 0.01, fused=True),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "tensor rate": lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.01), foreach=False),
    **{
        name: lambda m, name=name: getattr(torch.optim, name)(m.parameters(), 0.01)  # type: ignore[misc]
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "groups": lambda m: torch.optim.Adam(
        [{"params": m[0].parameters(), "lr": 0.02}, {"params": [*m[2].parameters(), *m[4].parameters()]}], 0.001
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_goes_one_by_one(name: str) -> None:
    check(plain, optimizer=OPTIMIZERS[name])


def test_gradients_are_late_and_parameters_due_until_somebody_looks() -> None:
    """With a group for each layer: forward waits for one after the other, and not for all."""

    def run() -> list[Any]:
        mesh = Mesh(data=2)
        model = small_model()
        optimizer = sgd(model)
        names = [name for name, _ in model.named_parameters()]
        groups = [names[4:], names[2:4], names[:2]]
        hc.distribute(model, mesh, overlap="next-forward", optimizer=optimizer, buckets=groups)
        plain(model, optimizer, lambda x: part(x, mesh))
        seen: list[Any] = []
        layers = [model[0], model[2], model[4]]

        def due() -> list[bool]:
            waiting = engine_of(model).overlap._left  # type: ignore[union-attr]
            return [number in waiting for number in (2, 1, 0)]

        hc.flush(model)
        optimizer.zero_grad()
        model(part(batch(9), mesh)).sum().backward()
        seen.append([type(layer.weight.grad) is PendingGradient for layer in layers])
        optimizer.step()
        seen.append([type(layer.weight) is DeferredParameter for layer in layers])
        optimizer.zero_grad()
        seen.append(due())
        hooks = [layer.register_forward_hook(lambda *_: seen.append(due())) for layer in layers]
        model(part(batch(10), mesh))
        for hook in hooks:
            hook.remove()
        hc.flush(model)
        seen.append([type(layer.weight) is nn.Parameter for layer in layers])
        return seen

    yes, no = True, False
    expected = [[yes] * 3, [yes] * 3, [yes] * 3, [no, yes, yes], [no, no, yes], [no] * 3, [yes] * 3]
    assert run_local(2, run) == [expected] * 2


def test_schedulers_change_the_next_step_and_not_the_last() -> None:
    def train(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)  # changes momentum too
        for step in range(STEPS):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            optimizer.step()
            scheduler.step()

    check(train)


def test_a_scheduler_made_before() -> None:
    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = small_model()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        hc.distribute(model, mesh, overlap="next-forward", optimizer=optimizer)
        return steps(model, optimizer, scheduler, lambda x: part(x, mesh))

    def steps(model: nn.Module, optimizer: Any, scheduler: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return [p.detach().clone() for p in model.parameters()]

    model = small_model()
    optimizer = sgd(model)
    true = steps(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), lambda x: x)
    check_equal(run_local(2, run), true)


def test_a_moving_average_of_weights_sees_them_after_the_step() -> None:
    def train(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        )
        by_hand = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(STEPS):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            for mine, p in zip(by_hand, model.parameters(), strict=True):
                mine.lerp_(p.data, 0.3)
        return [*(p.detach().clone() for p in averaged.module.parameters()), *by_hand]

    check(train)


LOOKS: dict[str, Callable[[Any, Any], list[Tensor]]] = {
    "parameters": lambda m, o: [p.detach().clone() for p in m.parameters()],
    "state_dict": lambda m, o: [v.clone() for v in m.state_dict().values()],
    "optimizer's": lambda m, o: [s["momentum_buffer"].clone() for _, s in sorted(o.state_dict()["state"].items())],
    "evaluation": lambda m, o: [m.eval()(batch(50)).detach(), m.train()(batch(51)).detach()],
    "inference": lambda m, o: [_inference(m)],
    "flush": lambda m, o: [hc.flush(m), m[0].weight.data.clone()][1:] if engine_of(m) else [m[0].weight.data.clone()],
    "gradients": lambda m, o: [p.grad.clone() for p in m.parameters()],
    "norm": lambda m, o: [torch.stack(torch._foreach_norm(list(m.parameters()))).detach()],
    "a copy": lambda m, o: [p.detach() for p in copy.deepcopy(m).parameters()],
    "numpy": lambda m, o: [torch.tensor(m[2].weight.detach().numpy().sum())],
    "in place": lambda m, o: _halved(m),
    "part": lambda m, o: [m[2](torch.ones(1, 16, dtype=torch.float64)).detach()],
    "functional": lambda m, o: [torch.func.functional_call(m, {"0.bias": m[0].bias * 2}, (batch(52),)).detach()],
    "vector": lambda m, o: [torch.nn.utils.parameters_to_vector(m.parameters()).detach()],
    "one": lambda m, o: [m[0].weight[0].detach().clone()],
    "loaded": lambda m, o: [m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}) and torch.ones(1)],
}


def _inference(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(batch(53)).clone()


def _halved(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    return []


@pytest.mark.parametrize("zeroed", [False, True], ids=["with gradients", "zeroed"])
@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_between_two_steps_sees_the_step_made(name: str, zeroed: bool) -> None:
    if zeroed and name == "gradients":
        return

    def train(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            optimizer.step()
            if zeroed:
                optimizer.zero_grad()
            seen += LOOKS[name](model, optimizer)
        return seen

    check(train)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return nn.functional.linear(x, self.third.weight).square() + self.third.bias.sum()


def test_tied_weights_weights_used_past_their_module_and_unused_ones() -> None:
    check(plain, drawn(lambda: Tied().double()), adam)


def test_recurrent_and_attention_networks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6)
            self.attention = nn.MultiheadAttention(6, 2)
            self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.lstm(x.unsqueeze(0))
            return self.norm(self.attention(y, y, y)[0])

    check(plain, drawn(lambda: Net().double()))


def test_ranks_that_go_different_ways() -> None:
    """They fall back to agreement, and to waiting, and stay exact."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = [self.c(self.a(row) if row[0] > 0 else self.b(row)) for row in x]
            return torch.stack(rows)

    check(plain, drawn(lambda: Branch().double()))


def test_samples_cut_over_ranks() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()

    made = drawn(net)

    def steps(model: nn.Module, optimizer: Any, place: Callable[[Tensor], Any]) -> list[Tensor]:
        for step in range(STEPS):
            x = torch.randn(2, 2, 8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            model(place(x)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def run() -> list[Tensor]:
        mesh = Mesh(data=1, height=2)
        model = made()
        optimizer = sgd(model)
        hc.distribute(model, mesh, overlap="next-forward", optimizer=optimizer)
        return steps(model, optimizer, lambda x: hc.shard(x, mesh, {0: "data", 2: "height"}))

    model = made()
    check_equal(run_local(2, run), steps(model, sgd(model), lambda x: x))


def test_two_optimizers() -> None:
    class Both:
        """As one, for the check."""

        def __init__(self, model: Any) -> None:
            self.parts = [torch.optim.SGD(model[0].parameters(), 0.05), adam(nn.ModuleList([model[2], model[4]]))]

        def state_dict(self) -> Any:
            return {"state": dict(enumerate(self.parts[1].state_dict()["state"].values()))}

    def run() -> list[Tensor]:
        mesh = Mesh(data=2)
        model = small_model()
        both = Both(model)
        hc.distribute(model, mesh, overlap="next-forward", optimizer=both.parts)
        return steps(model, both, lambda x: part(x, mesh))

    def steps(model: nn.Module, both: Both, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for step in range(STEPS):
            for optimizer in both.parts:
                optimizer.zero_grad()
            model(place(batch(step))).square().mean().backward()
            both.parts[0].step()
            if step % 2:
                both.parts[1].step()
        return [p.detach().clone() for p in model.parameters()]

    model = small_model()
    check_equal(run_local(2, run), steps(model, Both(model), lambda x: x))


def test_what_it_refuses() -> None:
    mesh, model = Mesh(data=1), small_model()
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        model = small_model()
        with pytest.raises(hc.MeshError, match="one_by_one"):
            hc.distribute(model, mesh, overlap="next-forward", optimizer=kind(model.parameters()))
    for arguments, words in (
        ({"overlap": "next-forward"}, "hand it in"),
        ({"optimizer": sgd(model)}, "next-forward"),
        ({"overlap": "never"}, "backward"),
        ({"lag": 2}, "0 or 1"),
        ({"lag": 1, "overlap": "next-forward", "optimizer": sgd(model)}, "leave overlap"),
    ):
        with pytest.raises(hc.MeshError, match=words):
            hc.distribute(small_model(), mesh, **arguments)  # type: ignore[arg-type]
