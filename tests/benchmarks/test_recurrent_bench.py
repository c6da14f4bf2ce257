"""``bench recurrent``: both ways give the same loss. No timing is judged."""

from __future__ import annotations

import pytest

from benchmarks.recurrent import WAYS, Sizes, measure_recurrent


@pytest.mark.long
def test_both_ways_train_alike() -> None:
    """It raises where losses differ; by units a step takes less memory, since no weight is gathered."""
    result = measure_recurrent(2, Sizes(64, 2, 2), 1)
    assert set(result["seconds"]) == set(WAYS)
    assert 0 < result["peak_bytes"]["by units"] < result["peak_bytes"]["gathered"]
