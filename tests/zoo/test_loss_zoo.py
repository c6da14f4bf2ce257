"""The losses and metrics of the zoo that need no package but torch, on every kind of cut."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.testing import check_rule
from halocline.zoo import ZooEntry, draw
from halocline.zoo.losses import MONAI, SEGMENTATION, TORCH, ZOO

CUTS: list[tuple[dict[str, int], dict[int, str]]] = [
    ({"depth": 2}, {2: "depth"}),
    ({"data": 2, "depth": 3}, {0: "data", 2: "depth"}),
]


def inputs(entry: ZooEntry) -> list[Tensor]:
    drawn = draw(entry.inputs, torch.Generator().manual_seed(0))
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in drawn]


def cut_of(tensor: Tensor, cut: dict[int, str]) -> dict[int, str]:
    """Targets without channels are cut along the same space."""
    return {dim if dim == 0 else dim - (5 - tensor.ndim): axis for dim, axis in cut.items()}


@pytest.mark.parametrize("entry", [*TORCH, *SEGMENTATION], ids=lambda entry: entry.name)
@pytest.mark.parametrize(("mesh", "cut"), CUTS)
def test_losses_are_those_of_one_rank(entry: ZooEntry, mesh: dict[str, int], cut: dict[int, str]) -> None:
    loss, tensors = entry.build(None), inputs(entry)

    def values(*given: Tensor) -> list[Tensor]:
        found: Any = loss(*given)
        return list(found.values()) if isinstance(found, dict) else [found]

    found = check_rule(values, *tensors, cuts=[cut_of(tensor, cut) for tensor in tensors], mesh=mesh)
    assert found.verdict == "exact", (found.why, found.error)


def test_the_zoo_has_each_name_once() -> None:
    assert len(set(ZOO.names)) == len(ZOO.entries) == len(TORCH) + len(SEGMENTATION) + len(MONAI)
