"""A rank killed in mid-run: the run comes back from its last checkpoint by itself, and ends as if undisturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_train import _train, place  # noqa: F401  the worked example
from typer.testing import CliRunner

from halocline.cli.app import app
from halocline.train.log import read_log

pytestmark = pytest.mark.long

DEADLINE = 120.0


def _command(place, out, *more):  # noqa: F811
    settings = ("precision=fp64", f"data={place / 'rings.h5'}", "steps=30", "checkpoint_every=5")
    told = [word for each in settings for word in ("--set", each)]
    return [sys.executable, "-m", "halocline.cli", "train", str(place / "run.toml"), "--out", str(out), *told, *more]


def _children(parent):
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return sorted(found)


def _steps(out):
    return max((entry["step"] for entry in read_log(out, "step")), default=-1) if (out / "log.jsonl").exists() else -1


def test_a_killed_rank_is_started_again(place, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    command = _command(place, out, "--ranks", "2", "--restarts", "2", "--json")
    run = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + DEADLINE
    while _steps(out) < 11:
        assert time.monotonic() < end and run.poll() is None, run.communicate()[1].decode()
        time.sleep(0.05)
    os.kill(_children(run.pid)[1], signal.SIGKILL)
    stdout, stderr = run.communicate(timeout=DEADLINE)
    assert run.returncode == 0, stderr.decode()
    found = json.loads(stdout.splitlines()[-1])
    assert found["restarts"] == 1
    assert "killed by SIGKILL; starting again" in stderr.decode()
    expected = _train(place, tmp_path / "one", "steps=30")
    assert np.allclose(found["losses"], expected.losses, rtol=1e-8, atol=0)
    assert np.isclose(found["metrics"]["loss"], expected.metrics["loss"], rtol=1e-8)


def test_one_clear_line_and_a_status(place, tmp_path):  # noqa: F811
    command = _command(place, tmp_path / "run", "--ranks", "2", "--set", "mesh.D=3")
    done = subprocess.run(command, cwd=place, capture_output=True, check=False, timeout=DEADLINE)
    assert done.returncode == 2
    assert "are 3 ranks, and there are 2" in done.stderr.decode() and "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize(
    ("change", "text"),
    [("optimizer.lrr=1", "optimizer.lrr is unknown; did you mean optimizer.lr?"), ("data=missing.h5", "missing.h5")],
)
def test_mistakes_are_one_line(place, tmp_path, change, text, monkeypatch):  # noqa: F811
    monkeypatch.chdir(place)
    told = CliRunner().invoke(app, ["train", "run.toml", "--out", str(tmp_path / "run"), "--set", change])
    assert told.exit_code == 2
    assert text in told.stderr and len(told.stderr.strip().splitlines()) == 1
