"""What a record of calls cannot know is noticed: changes after it, and writes to what other stages have read."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.errors import MeshError
from halocline.parts import PipelineSchedule
from halocline.world import run_local

EXACT = 1e-8


class Overwriting(nn.Module):
    """The encoder's first result is read by the head, and written to by the encoder's second part."""

    def __init__(self, through_a_view: bool = False) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(4, 4), "second": Writer(through_a_view)})
        self.head, self.last = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder["first"](x)
        aside = self.head(y)
        return aside + self.last(self.encoder["second"](y))


class Writer(nn.Module):
    """Adds to its input in place."""

    def __init__(self, through_a_view: bool) -> None:
        super().__init__()
        self.through_a_view = through_a_view

    def forward(self, x: Tensor) -> Tensor:
        if self.through_a_view:
            half = x[:, 2:]
            half.add_(3.0)
            return half.repeat(1, 2)
        return x.add_(3.0)


class Stages(nn.Module):
    """Two linear layers, one a stage, and a size that its forward depends on."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.size = (2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(F.relu(self.a(x))).view(-1, *self.size).flatten(1)) * self.size[1]


class Weighted(nn.Module):
    """A loss with a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, output: Tensor, truth: Tensor) -> Tensor:
        return self.weight * F.mse_loss(output, truth)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (4, 2))
    return x, y


def on_one_rank(model: nn.Module, loss: Callable[..., Tensor] = F.mse_loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of two micro-batches."""
    model, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    for x, y in zip(*(tensor.chunk(2) for tensor in batch()), strict=True):
        share = loss(model(x), y) / 2
        share.backward()
        total += share.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(found: list[tuple[Tensor, dict[str, Tensor]]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    gradients = {name: gradient for _, own in found for name, gradient in own.items()}
    assert gradients.keys() == expected[1].keys()
    for loss, _ in found:
        assert abs(float(loss - expected[0])) <= EXACT
    for name, gradient in gradients.items():
        assert float((gradient - expected[1][name]).abs().max()) <= EXACT, name


def gradients_of(pipe: hc.PipelinedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_value_is_sent_as_it_was_before_a_later_write(through_a_view: bool) -> None:
    torch.manual_seed(0)
    model = Overwriting(through_a_view).double()

    class Copied(Overwriting):
        """The same without writes to what has been read, for autograd on one rank."""

        def forward(self, x: Tensor) -> Tensor:
            y = self.encoder["first"](x)
            return self.head(y) + self.last(self.encoder["second"](y.clone()))

    alone = Copied(through_a_view).double()
    alone.load_state_dict(model.state_dict())
    models = [copy.deepcopy(model) for _ in range(2)]

    def body() -> tuple[Tensor, dict[str, Tensor]]:
        mesh = hc.Mesh(stage=2)
        parts = {"encoder": mesh["stage", 0], "head": mesh["stage", 1], "last": mesh["stage", 1]}
        pipe = hc.place(models[mesh.rank], parts, loss=F.mse_loss, example=batch(), microbatches=2)
        return pipe.step(*batch()).detach(), gradients_of(pipe)

    check(run_local(2, body), on_one_rank(alone))


def test_a_changed_size_and_a_changed_loss_are_recorded_again() -> None:
    torch.manual_seed(0)
    model, loss = Stages().double(), Weighted()
    models, losses = [copy.deepcopy(model) for _ in range(2)], [Weighted() for _ in range(2)]
    model.size, loss.weight = (1, 4), 0.5
    expected = on_one_rank(model, loss)

    def body() -> tuple[Tensor, dict[str, Tensor]]:
        mesh = hc.Mesh(stage=2)
        own, criterion = models[mesh.rank], losses[mesh.rank]
        pipe = hc.pipeline(own, mesh, loss=criterion, example=batch(), microbatches=2, stages=["b"])
        pipe.step(*batch())
        for parameter in pipe.parameters():
            parameter.grad = None
        own.size, criterion.weight = (1, 4), 0.5
        return pipe.step(*batch()).detach(), gradients_of(pipe)

    check(run_local(2, body), expected)


def refusal(change: Callable[[hc.PipelinedModel], object], norm: bool = False, **options: object) -> list[str]:
    """What each of two ranks says after a change of its pipeline."""
    torch.manual_seed(0)
    model = Stages(norm).double()
    model.a.requires_grad_(False)
    models = [copy.deepcopy(model) for _ in range(2)]

    def step() -> None:
        mesh = hc.Mesh(stage=2)
        told = {"microbatches": 2, "stages": ["b"]} | options
        pipe = hc.pipeline(models[mesh.rank], mesh, loss=F.mse_loss, example=batch(), **told)
        given = change(pipe)
        pipe.step(given if isinstance(given, Tensor) else batch()[0], batch()[1])

    def body() -> str:
        with pytest.raises(MeshError) as raised:
            step()
        return str(raised.value)

    return run_local(2, body)


def test_an_input_that_requires_a_gradient_is_refused() -> None:
    for said in refusal(lambda pipe: batch()[0].requires_grad_()):
        assert "x.detach()" in said


def test_a_new_hook_is_refused() -> None:
    for said in refusal(lambda pipe: pipe.model.b.register_forward_hook(lambda *_: None) and None):
        assert "register them before hc.pipeline" in said


def test_forwards_that_write_to_a_buffer_run_in_order() -> None:
    schedule = PipelineSchedule.parse("0F1 0F0 0B0 0B1\n1F0 1F1 1B0 1B1")
    for said in refusal(lambda pipe: None, norm=True, schedule=schedule):
        assert "writes to a buffer" in said and "order" in said


def test_a_parameter_that_was_frozen_is_refused() -> None:
    """A gradient would end at the border to its stage."""
    torch.manual_seed(0)
    model = Stages().double()
    model.a.requires_grad_(False)
    models = [copy.deepcopy(model)]

    def body() -> str:
        pipe = hc.pipeline(models[0], hc.Mesh(stage=1), loss=F.mse_loss, example=batch(), microbatches=2)
        pipe.step(*batch())
        for parameter in pipe.parameters():
            parameter.requires_grad_()
        with pytest.raises(MeshError) as raised:
            pipe.step(*batch())
        return str(raised.value)

    assert "a.weight required no gradient" in run_local(1, body)[0]


def test_ranks_outside_the_losss_stage_get_the_loss_as_it_is() -> None:
    """A step under autocast does not round the losses of steps without."""
    torch.manual_seed(0)
    model = Stages()
    models = [copy.deepcopy(model) for _ in range(2)]

    def loss(output: Tensor, truth: Tensor) -> Tensor:
        return (output - truth).square().mean()

    def body() -> Tensor:
        mesh = hc.Mesh(stage=2)
        x, y = (tensor.float() for tensor in batch())
        pipe = hc.pipeline(models[mesh.rank], mesh, loss=loss, example=(x, y), microbatches=2, stages=["b"])
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, y.bfloat16())
        return pipe.step(x, y).detach()

    one, other = run_local(2, body)
    assert one.dtype == other.dtype == torch.float32
    assert float(one) == float(other)


class Tied(nn.Module):
    """Two layers of one weight, on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(F.relu(self.a(x))))


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_a_shared_weight_that_are_dropped_do_not_come_back(keep: bool) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    models = [copy.deepcopy(model) for _ in range(2)]
    once = on_one_rank(model)
    times = 3 if keep else 1

    def body() -> tuple[Tensor, dict[str, Tensor]]:
        mesh = hc.Mesh(stage=2)
        pipe = hc.pipeline(models[mesh.rank], mesh, loss=F.mse_loss, example=batch(), microbatches=2, stages=["b"])
        pipe.step(*batch())
        pipe.step(*batch(), average=False)
        if not keep:
            for parameter in pipe.parameters():
                parameter.grad = None
        return pipe.step(*batch()).detach(), gradients_of(pipe)

    check(run_local(2, body), (once[0], {name: times * gradient for name, gradient in once[1].items()}))
