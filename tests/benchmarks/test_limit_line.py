"""The two ends of strong scaling, from figures whose ends are known, and the replayed step."""

import pytest

from benchmarks.limit_line import crossing, ends
from benchmarks.limit_line_ranks import UNetCase, replay
from halocline.testing.pool import shared_pool


def test_ends_of_a_step_with_a_constant_loss() -> None:
    # 100 exchanges of 0.5 ms: METG is 1 ms, and 0.8 s of work is half of a step on 16 ranks.
    points = [
        {"ranks": ranks, "step_s": 0.8 / ranks + 0.05 * (ranks > 1), "exchanges": 100.0, "metg_s": 1e-3}
        for ranks in (1, 2, 4, 8, 16)
    ]
    del points[0]["metg_s"]
    found = ends(points)
    assert found["measured_end"] == pytest.approx(16, rel=0.03)
    assert found["predicted_end"] == pytest.approx(8, rel=0.01)  # METG x exchanges meets 0.8 / ranks
    assert found["predicted_over_measured"] == pytest.approx(0.5, rel=0.03)


def test_crossings_are_not_invented() -> None:
    assert crossing([(1, 1.0), (2, 0.8), (4, 0.4)], 0.8) == 2.0
    assert crossing([(2, 1.5), (4, 3.0)], 1.0) == 1.33
    assert crossing([(1, 1.0), (16, 0.95)], 0.5) is None
    assert crossing([(1, 1.0)], 0.5) is None


def test_the_replayed_step_sleeps_its_compute_and_exchanges() -> None:
    figures = shared_pool(2).run(replay, UNetCase(16, 8, 2, 1e9), 1)
    assert all(one.exchanges > 20 and one.message_bytes > 0 for one in figures)
    assert all(min(one.seconds) >= 0.9 * one.compute > 0 for one in figures)
