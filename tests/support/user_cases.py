"""What users write around a model, as cases: each runs on one rank (mesh None) and on two, and returns tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.testing import relative_error
from halocline.world import run_local

Case = Callable[[hc.Mesh | None], list[Tensor]]


class Cases:
    """Those that must be right, and those that must be refused, each with a part of the message."""

    def __init__(self) -> None:
        self.right: dict[str, Case] = {}
        self.refusals: dict[str, tuple[str, Case]] = {}

    def case(self, function: Case) -> Case:
        self.right[function.__name__] = function
        return function

    def refused(self, match: str) -> Callable[[Case], Case]:
        def keep(function: Case) -> Case:
            self.refusals[function.__name__] = match, function
            return function

        return keep

    def check(self, name: str) -> None:
        true = plain(self.right[name](None))
        scale = max(float(value.abs().max()) for value in true)  # a bias before a norm has a gradient of rounding alone
        for rank in run_local(2, lambda: plain(self.right[name](hc.Mesh(a=2)))):
            assert len(rank) == len(true)
            assert max(relative_error(a, b, scale) for a, b in zip(rank, true, strict=True)) < 1e-9

    def check_refused(self, name: str) -> None:
        match, run = self.refusals[name]

        def on_rank() -> None:
            with pytest.raises(hc.Refused, match=match):
                run(hc.Mesh(a=2))

        run_local(2, on_rank)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(x: Tensor, mesh: hc.Mesh | None, dim: int = 2) -> Tensor:
    return x if mesh is None else hc.shard(x, mesh, {dim: "a"})


def distributed(model: nn.Module, mesh: hc.Mesh | None, **options: Any) -> Any:
    model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=5 + number))
    return model if mesh is None else hc.distribute(model, mesh, **options)


def plain(values: list[Tensor]) -> list[Tensor]:
    return [hc.gather(value.detach()) for value in values]
