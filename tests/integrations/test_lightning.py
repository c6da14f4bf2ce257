"""PyTorch Lightning trains on cut batches, and what it finds is what plain Lightning finds on one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "lightning_program.py"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")


def found_by(folder, name, *words, **environment):
    out = folder / f"{name}.json"
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    done = subprocess.run([sys.executable, str(PROGRAM), str(out), *words], cwd=folder, text=True, timeout=240,
                          capture_output=True, env={**kept, "OMP_NUM_THREADS": "1", **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def apart(found, true):
    """The largest difference, relative to the largest value."""
    return max(abs(a - b) for a, b in zip(found, true, strict=True)) / max(map(abs, true))


@pytest.fixture(scope="module")
def both(tmp_path_factory, package):
    """What two ranks found, and one process without Halocline."""
    package("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    # mpi4py without an MPI library, as `halocline[all]` may leave it: Lightning asks it about the process.
    cut = found_by(folder, "cut", "cut", MPI4PY_LIBMPI="/none/libmpi.so")
    return cut, found_by(folder, "plain", "plain", str(folder / "cut" / "best-epoch=0.ckpt"))


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["depth", "data", "accumulate", "resume"])
def test_training_is_that_of_one_process(both, kind):
    cut, plain = both[0][kind], both[1][kind]
    assert cut["ranks"] == 2 and plain["ranks"] == 1
    assert len(cut["losses"]) == len(plain["losses"]) == (3 if kind == "resume" else 6)
    for name in ("losses", "validation", "weight"):
        assert cut[name] == pytest.approx(plain[name], rel=1e-8)
    assert cut["keys"] == plain["keys"]


@pytest.mark.integration
def test_a_resumed_run_goes_on_where_it_was(both):
    for run, resumed in ((both[0], "resume"), (both[1], "resume"), (both[1], "resume from cut")):
        assert run[resumed]["losses"] == pytest.approx(run["depth"]["losses"][3:], rel=1e-8)
        assert run[resumed]["weight"] == pytest.approx(run["depth"]["weight"], rel=1e-8)


@pytest.mark.integration
def test_validation_test_and_prediction(both):
    cut, plain = both[0]["depth"], both[1]["depth"]
    assert cut["checkpoints"] == plain["checkpoints"] == ["best-epoch=0.ckpt", "best-epoch=1.ckpt"]
    assert cut["validated"] == pytest.approx(plain["validated"], rel=1e-8) and "validation" in cut["validated"]
    assert cut["tested"] == pytest.approx(plain["tested"], rel=1e-8) and "test" in cut["tested"]
    assert len(cut["predicted"]) == 8 * 2 * 6 * 5 * 4
    assert apart(cut["predicted"], plain["predicted"]) <= 1e-8
    assert apart(both[0]["alone"], both[1]["alone"]) <= 1e-8
    assert apart(both[0]["alone"], cut["predicted"]) > 1e-3  # from another epoch


@pytest.mark.integration
def test_what_is_refused(both):
    assert "differs between ranks" in both[0]["differ"]
    assert "distributed over {'depth': 2}, and the strategy has {'data': 2}" in both[0]["other mesh"]
