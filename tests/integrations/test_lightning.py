"""PyTorch Lightning trains on cut batches, and its losses are those of plain Lightning on one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "lightning_program.py"


def losses(tmp_path, name, *words):
    out = tmp_path / f"{name}.json"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run([sys.executable, str(PROGRAM), str(out), *words], cwd=tmp_path, text=True, timeout=180,
                          capture_output=True, env={**environment, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.long
def test_losses_and_weights_are_those_of_one_process(tmp_path):
    pytest.importorskip("lightning")
    one = losses(tmp_path, "one", "plain")
    for name in ("depth", "data", "accumulate"):
        cut = losses(tmp_path, name, name)
        true = losses(tmp_path, "one-accumulate", "plain-accumulate") if name == "accumulate" else one
        assert cut["ranks"] == 2 and len(cut["losses"]) == len(true["losses"]) == 6
        assert cut["losses"] == pytest.approx(true["losses"], rel=1e-8)
        assert cut["validation"] == pytest.approx(true["validation"], rel=1e-8)
        assert cut["weight"] == pytest.approx(true["weight"], rel=1e-8)
        assert cut["keys"] == true["keys"]


@pytest.mark.long
def test_a_value_that_differs_between_ranks_is_refused(tmp_path):
    pytest.importorskip("lightning")
    assert "differs between ranks" in losses(tmp_path, "differ", "differ")["error"]
