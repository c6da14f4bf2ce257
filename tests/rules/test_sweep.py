"""The random sweep: thousands of set-ups against one rank, exact or refused, none wrong."""

from collections import Counter
from collections.abc import Iterator

import pytest
import ranges
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from setups import FAMILIES, Setup

import halocline as hc
from halocline.rules import executor
from halocline.testing import check_rule
from halocline.world import mesh as mesh_module

#: Families whose halo may lie beside the tile or be glued to it.
HALOS = {family: st.booleans() for family in ("convolution", "transposed", "pool")}
COUNTS: dict[str, Counter[str]] = {}


@pytest.fixture
def _sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the sweep changes is put back."""
    monkeypatch.setattr(mesh_module, "DEFAULT_CHOICES", mesh_module.DEFAULT_CHOICES)
    yield
    executor._plans.clear()


@pytest.mark.sweep
@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("family", FAMILIES)
def test_sweep(family: str) -> None:
    counts = COUNTS[family] = Counter()
    refusals: Counter[str] = Counter()

    @given(
        FAMILIES[family](), st.sampled_from(["float64", "float32"]), HALOS.get(family, st.just(False)), st.booleans()
    )
    @settings(
        max_examples=ranges.EXAMPLES[family],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    def one(setup: Setup, precision: str, apart: bool, last: bool) -> None:
        # Halos beside the tile, or glued to it.
        mesh_module.DEFAULT_CHOICES = hc.Choices(halo_beside=0 if apart else 1 << 40)
        executor._plans.clear()
        found = check_rule(
            setup.function,
            *setup.tensors(getattr(torch, precision), last and not setup.torch_is_wrong),
            cuts=[setup.cuts],
            points=[setup.points, *[None] * (len(setup.shapes) - 1)],
            mesh=setup.mesh,
            tolerance=ranges.TOLERANCE[precision],
        )
        counts[found.verdict] += 1
        if found.verdict == "refused":
            refusals[found.why] += 1
        assert found.verdict != "wrong", f"{setup.words} in {precision}, last={last}: error {found.error:.2e}"

    one()
    accepted = counts["exact"] + counts["refused"]
    share = counts["exact"] / accepted
    assert share >= ranges.EXACT_SHARE[family], f"{share:.1%} exact of {accepted}; refused: {refusals.most_common(3)}"
