"""``bench model-axes``: DTensor, every layout by hand and the chosen one train alike. No timing is judged."""

from __future__ import annotations

import pytest

from benchmarks.model_axes import measure_model_axes
from benchmarks.model_axes_ranks import AUTO, BY_HAND, IN_ONE_PIECE, TORCH, Sizes


@pytest.mark.long
def test_every_way_trains_alike() -> None:
    """It raises where losses differ."""
    result = measure_model_axes([2], None, Sizes(16, 2, 8), 2)
    (case,) = result["cases"]
    assert set(case["seconds"]) == {TORCH, *BY_HAND, IN_ONE_PIECE, AUTO} and case["best_by_hand"] in BY_HAND
    assert result["over_torch"] == case["over_torch"] > 0
