"""What the record of a model carries, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halocline as hc
from halocline.errors import HaloclineError, MeshError, Refused
from halocline.parts.record import ModelRecord, meta_copy, record_model
from halocline.parts.stages import cut_before, divide


class Own(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between
        self.register_buffer("count", torch.zeros(4))
        self.scale = torch.full((4,), 2.0)  # a constant that is no buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(x)))


def recorded(between: Callable[[Any, Tensor], Tensor]) -> ModelRecord:
    model, x = Own(between), torch.randn(3, 4)
    return record_model(meta_copy(model), F.mse_loss, (x,), (x,), torch.device("cpu"))


def names(record: ModelRecord) -> list[str]:
    return [str(call) for call in record.calls]


def test_calls_are_told_with_their_modules() -> None:
    record = recorded(lambda own, x: x * own.scale)
    assert names(record) == ["linear in first", "mul in Own", "linear in second", "mse_loss in code outside the model"]
    kinds = [value.kind for value in record.values]
    assert kinds.count("parameter") == 4
    assert kinds.count("constant") == 1
    assert kinds.count("input") == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def _hooked(own: Own, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


def _counts_itself(own: Own, x: Tensor) -> Tensor:
    own.calls = getattr(own, "calls", 0) + 1
    return x


def _into_parameter(own: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        own.first.weight.mul_(0.5)
    return x


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (lambda own, x: Doubled.apply(x), "DoubledBackward"),
        (lambda own, x: checkpoint(lambda y: y * 2, x, use_reentrant=True), "CheckpointFunctionBackward"),
        (lambda own, x: x if x.sum() > 0 else -x, "needs the values of a tensor"),
        (lambda own, x: x * x.sum().item(), "needs the values of a tensor"),
        (_hooked, "register_hook"),
        (_counts_itself, "forward changes an attribute"),
        (_into_parameter, "writes into first.weight, a parameter"),
        (lambda own, x: x * torch.autograd.grad(x.sum(), x, create_graph=True)[0], "forward calls alone"),
    ],
)
def test_what_the_record_cannot_carry_is_refused(between: Callable[[Any, Tensor], Tensor], said: str) -> None:
    with pytest.raises(Refused, match=said):
        recorded(between)


def test_a_checkpoint_that_is_not_reentrant_is_recorded_through() -> None:
    record = recorded(lambda own, x: checkpoint(lambda y: (y * 2).relu(), x, use_reentrant=False))
    assert [name for name in names(record) if name.startswith(("mul", "relu"))] == ["mul in Own", "relu in Own"]


def _view_then_write(own: Own, x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    own.second(x)  # a border may lie here
    row.add_(1)
    return y


def test_memory_that_is_written_to_stays_in_one_stage() -> None:
    record = recorded(_view_then_write)
    with pytest.raises(Refused, match="shares memory that is written to"):
        divide(record, cut_before(record, ["second"]))


def _counted(own: Own, x: Tensor) -> Tensor:
    own.count += 1
    y = own.second(x)
    return y * own.count


def test_a_buffer_that_is_written_to_stays_in_one_stage() -> None:
    record = recorded(_counted)
    with pytest.raises(Refused, match="shares memory"):
        divide(record, cut_before(record, ["second"]))


def test_stages_that_do_not_exist_are_refused() -> None:
    record = recorded(lambda own, x: x)
    with pytest.raises(MeshError, match="did you mean second"):
        cut_before(record, ["seconds"])
    with pytest.raises(MeshError, match="not at its first"):
        cut_before(record, ["first"])


def one_rank(**options: Any) -> Any:
    told = {"loss": F.mse_loss, "example": (torch.zeros(4, 4), torch.zeros(4, 4))} | options
    model = told.pop("model", nn.Linear(4, 4))
    return lambda: hc.pipeline(model, told.pop("mesh", None) or hc.Mesh(stage=1), **told)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: one_rank(example=(torch.zeros(4, 4), "y"))(), "takes tensors"),
        (lambda: one_rank(microbatches=3)(), "does not divide into 3"),
        (lambda: one_rank(model=nn.Linear(4, 4, device="meta"))(), "meta device"),
        (lambda: one_rank(model=hc.distribute(nn.Linear(4, 4), hc.Mesh(data=1)))(), "distributed already"),
        (lambda: one_rank(layout={"weights": {0: "stage"}})(), "no parameter is called 'weights'"),
        (lambda: one_rank(loss=lambda y, t: y)(), "no tensor of one element"),
        (lambda: one_rank(axis="part")(), "no axis 'part'"),
        (lambda: hc.pipeline(nn.Linear(1, 1), loss=F.mse_loss, example=(0, 0)), "takes a mesh"),
        (
            lambda: hc.pipeline(nn.Linear(1, 1), loss=F.mse_loss, example=(0, 0), strategy="hybrid"),
            "number of partitions",
        ),
        (lambda: hc.pipeline(nn.Linear(1, 1), loss=F.mse_loss, example=(0, 0), strategy="some"), "one of data"),
        (lambda: hc.pipeline(nn.Linear(1, 1), loss=F.mse_loss, example=(0, 0), replicas=2), "belong to strategy"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(HaloclineError, match=said):
        call()
