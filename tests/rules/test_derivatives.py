"""Second derivatives where operands depend on each other or have hooks, and other forms that were wrong once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_halo import apart as apart  # the fixture: small tiles go the way of large ones
from torch import Tensor

import halocline as hc
from halocline.testing import check_rule
from halocline.world import run_local

CUT = {"cuts": [{2: "a"}], "mesh": {"a": 2}}


def _volume(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _doubled(x: Tensor) -> Tensor:
    """A hook belongs to the backward that is under way, however that is computed."""
    y = x * 1.5
    y.register_hook(lambda gradient: gradient * 2)
    return y


WEIGHT = _volume(4, 4, 3)
SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "a weight made of the input": lambda x: F.conv1d(x, WEIGHT * (1 + x.mean()), padding=1),
    "a weight that is the input's": lambda x: F.conv1d(x, WEIGHT * x.mean(), padding=1),
    "one weight twice": lambda x: F.conv1d(F.conv1d(x, WEIGHT * x.mean(), padding=1), WEIGHT * x.mean(), padding=1),
    "a norm whose weight is made of the input": lambda x: F.group_norm(x, 2, 1 + x.mean((0, 2)), x.mean((0, 2))),
    "a hook before a convolution": lambda x: F.conv1d(_doubled(x), WEIGHT, padding=1).tanh(),
    "a hook before a pool": lambda x: F.max_pool1d(_doubled(x), 3, 2, 1).square(),
    "a hook before a norm": lambda x: F.instance_norm(_doubled(x)).tanh(),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivative(apart: list[int], name: str) -> None:
    found = check_rule(SECOND[name], _volume(2, 4, 12), **CUT, second_order=True)
    assert found.verdict == "exact", found


def _ringed(x: Tensor) -> Tensor:
    with hc.remedy("ring"):
        return F.scaled_dot_product_attention(x, x.tanh(), x[..., :3] * 0.5)


def test_a_ring_whose_keys_are_made_of_its_queries() -> None:
    found = check_rule(_ringed, _volume(2, 2, 8, 4), **CUT, second_order=True)
    assert found.verdict == "exact", found


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.batch_norm": lambda x: torch.batch_norm(
        x, torch.arange(4.0).double(), torch.ones(4).double(), None, None, True, 0.1, 1e-5, False
    ),
    "torch.instance_norm": lambda x: torch.instance_norm(
        x, torch.arange(4.0).double(), torch.ones(4).double(), None, None, True, 0.1, 1e-5, False
    ),
    "a mean of a million": lambda x: F.batch_norm(x + 1e6, None, None, training=True),
    "a power below one of zero": lambda x: torch.linalg.vector_norm(x.relu(), 0.5, 2),
    "a negative power": lambda x: torch.linalg.vector_norm(x.relu(), -1, 1),
    "lengths below eps": lambda x: F.cosine_similarity(x, x.flip(1), 2, 100.0),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(x),
    "linalg.cross": lambda x: torch.linalg.cross(x[..., :3], x[..., 3:6]),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, ranks: int) -> None:
    found = check_rule(FORMS[name], _volume(3, 4, 12), cuts=[{2: "a"}], mesh={"a": ranks}, tolerance=1e-7)
    assert found.verdict == "exact", found


DTYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter": lambda x: x.int().scatter(2, torch.zeros(3, 4, 1, dtype=torch.long), 7),
    "cumsum": lambda x: x.int().cumsum(2, dtype=torch.int32),
    "any": lambda x: x.byte().any(2),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x, 1),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_is_torchs(name: str) -> None:
    x = _volume(3, 4, 12).abs()
    true = DTYPES[name](x)

    def on_rank() -> torch.dtype:
        return DTYPES[name](hc.shard(x, hc.Mesh(a=2), {2: "a"})).dtype

    assert run_local(2, on_rank) == [true.dtype] * 2


def test_a_pool_under_autocast_has_a_backward_outside_of_it(apart: list[int]) -> None:
    """Autocast pools in float32, and so must the backward, which computes each box again."""
    x = _volume(1, 2, 12, 4, 4).bfloat16()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.avg_pool3d(x, 3, 1, 1)

    found = check_rule(step, x, **CUT, tolerance=2e-2)
    assert found.verdict == "exact", found
