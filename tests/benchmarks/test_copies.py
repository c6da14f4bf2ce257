"""`halocline bench copies`: an unknown case is refused, and what comes back from memory has the same bits."""

import sys

import pytest
from typer.testing import CliRunner

from benchmarks.copies import CASES, NODES, measure_copies
from halocline.cli.app import app


def test_an_unknown_case_is_one_line() -> None:
    told = CliRunner().invoke(app, ["bench", "copies", "--case", "flood"])
    assert told.exit_code == 2 and all(name in told.output for name in CASES)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="copies in memory need Linux")
def test_a_lost_node_comes_back_with_the_same_bits() -> None:
    made = measure_copies(["cut weights"], every=2, rounds=2, deadline=120.0)
    case = made["cases"]["cut weights"]
    assert case["same_bits"] and 0 <= made["repeated"] <= 2
    assert case["bytes"] > 4 * 2 * 512 * 2048 * 3 and NODES == 4  # weights and two moments
