"""Operands without values beside operands with values are refused: kernels would compute with whatever lies there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import halocline as hc
from halocline.errors import Refused
from halocline.world import run_local

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + torch.ones(2, 4, 8, device="meta"),
    "conv1d": lambda x: F.conv1d(x, torch.ones(3, 4, 3, device="meta"), padding=1),
    "__getitem__": lambda x: x[:, torch.tensor([0, 1], device="meta")],
    "where": lambda x: torch.where(torch.ones(8, dtype=torch.bool, device="meta"), x, x),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.ones(5, 3, device="meta")),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_without_values_are_refused(name: str) -> None:
    def body() -> None:
        mesh = hc.Mesh(depth=2)
        x = hc.shard(torch.arange(64.0).view(2, 4, 8), mesh, {2: "depth"})
        CALLS[name](x)

    with pytest.raises(Refused, match=f"{name} in code outside the model: one of its operands is on the device meta"):
        run_local(2, body)


def test_a_plan_made_with_values_is_not_used_without() -> None:
    def body() -> None:
        mesh = hc.Mesh(depth=2)
        x = hc.shard(torch.arange(64.0).view(2, 4, 8), mesh, {2: "depth"})
        assert torch.equal(hc.gather(x * torch.full((8,), 2.0)), 2 * hc.gather(x))
        with pytest.raises(Refused, match="device meta"):
            x * torch.full((8,), 2.0, device="meta")

    run_local(2, body)
