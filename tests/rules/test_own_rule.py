"""A user's own rule, proved with the library's own tests; the worked example of docs/adding-a-rule.md."""

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import halocline as hc
from halocline.geometry import Window
from halocline.rules import forget_rule
from halocline.testing import check_rule
from halocline.world import mesh as mesh_module


def slope(x: Tensor) -> Tensor:
    """Central differences along the last dim, one shorter at each end."""
    if has_torch_function((x,)):
        return handle_torch_function(slope, (x,), x)
    return (x[..., 2:] - x[..., :-2]) / 2


def slope_rule(x: hc.Operand) -> hc.Recipe:
    """Output i needs inputs i..i+2: a window of three with no padding."""
    *lead, length = x.shape
    space = (*lead, length - 2)
    dims = tuple(range(x.ndim))
    return hc.Recipe(
        space=space,
        reads=(hc.Read(x, (*map(hc.Link, dims[:-1]), hc.Link(dims[-1], Window(kernel=3)))),),
        outputs=(hc.Output(space, dims),),
        local=lambda work, tile: slope(tile),
        box_local=True,
    )


def wrong_rule(x: hc.Operand) -> hc.Recipe:
    """As if no neighbour were needed: each rank pads its own tile."""
    dims = tuple(range(x.ndim))
    return hc.Recipe(
        space=x.shape,
        reads=(hc.follow(x, *dims),),
        outputs=(hc.Output(x.shape, dims),),
        local=lambda work, tile: slope(torch.nn.functional.pad(tile, (1, 1))),
    )


@pytest.fixture
def no_rule_left():
    yield
    forget_rule(slope)


SETUP = {"cuts": [{0: "rows", 1: "columns"}], "mesh": {"rows": 2, "columns": 3}}


def test_without_a_rule_it_is_refused() -> None:
    found = check_rule(slope, torch.randn(4, 20, dtype=torch.float64), **SETUP)
    assert found.verdict == "refused"
    assert "slope" in found.why


@pytest.mark.parametrize("small", [0, 1 << 40])
def test_a_right_rule_is_exact(no_rule_left: None, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """With the halo glued to the tile, and box by box."""
    monkeypatch.setattr(mesh_module, "DEFAULT_CHOICES", hc.Choices(halo_beside=small))
    hc.rule(slope)(slope_rule)
    for length in (3, 4, 7, 20):
        found = check_rule(slope, torch.randn(4, length, dtype=torch.float64), second_order=True, **SETUP)
        assert found.verdict == "exact", found


def test_nan_is_no_match(no_rule_left: None) -> None:
    hc.composite(slope)(lambda x: x * float("nan"))
    found = check_rule(slope, torch.randn(4, 20, dtype=torch.float64), **SETUP)
    assert found.verdict == "wrong"


def test_a_wrong_rule_is_found_out(no_rule_left: None) -> None:
    hc.rule(slope)(wrong_rule)
    padded = check_rule(slope, torch.randn(4, 20, dtype=torch.float64), **SETUP)
    assert padded.verdict == "wrong"
