"""``halocline sweep``: trials in processes of their own, resumed after kills, and one page about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from halocline.errors import ConfigError
from halocline.train.log import read_log
from halocline.train.reporting.sweep_page import best, sweep_page
from halocline.train.sweeps import SweepSpec, TrialRecord, read_spec

SPEC = """
target = "disruption"
trials = {trials}
ranks = 2
metric = "auc"
direction = "maximize"
settings = ["steps={steps}", "data.validation=8", "data.samples=64", "data.arguments={{length = 8}}",
            "checkpoint_every=1", "batch=4"]
[space]
"optimizer.lr" = {{ low = 1e-4, high = 1e-2, log = true }}
"network.width" = {{ choices = [2, 4] }}
"""


def test_a_spec_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(SPEC.format(trials=3, steps=5))
    spec = read_spec(path)
    settings = spec.settings_of({"optimizer.lr": 5e-3, "network.width": 4})
    assert (settings.steps, settings.optimizer.lr, settings.network["width"]) == (5, 5e-3, 4)
    assert [spec.ranks_for(left) for left in (8, 1)] == [1, 1]
    assert [SweepSpec("unet3d", {}, ranks=8, mode="auto").ranks_for(left) for left in (9, 4, 1)] == [1, 2, 8]
    for wrong, words in (
        ('trails = 3\ntarget = "unet3d"', "trails is no setting"),
        ('target = "unet3d"', r"\[space\]"),
        ('target = "unet3d"\nmode = "both"\n[space]\nsteps = {low = 1, high = 2}', "mode = 'both'"),
        ('target = "unet3d"\n[space]\nsteps = {low = 1}', "space.steps"),
        ('target = "unet3d"\n[space]\n"optimizer.rate" = {low = 0.1, high = 0.2}', "rate"),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=words):
            read_spec(path)


def test_the_page_shows_every_trial() -> None:
    spec = SweepSpec("unet3d", {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "kind": {"choices": ["a", "b"]}})
    records = [
        TrialRecord(0, {"lr": 1e-3, "kind": "a"}, "complete", 0.5, 3.0, 1),
        TrialRecord(1, {"lr": 1e-1, "kind": "b"}, "complete", 0.25, 4.0, 1),
        TrialRecord(2, {"lr": 1e-2, "kind": "a"}, "failed", None, 1.0, 1),
    ]
    page = sweep_page(spec, records, {"experiment-parallel": 1.9, "data-parallel": 1.4})
    found = best(spec, records)
    assert found is not None and found.number == 1
    for words in ("best: trial 1", "experiment-parallel: 1.90 times", "data-parallel: 1.40 times", "1 failed"):
        assert words in page
    assert page.count('class="curve faint loss"') == 1 and page.count('class="curve validation"') == 1


def ranks_of(folder: Path) -> list[int]:
    """The processes that train in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"halocline.cli.train_rank" in words and str(folder).encode() in words:
            found.append(int(place.parent.name))
    return found


def wait_for(what: Any, seconds: float = 240.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come")


def steps_of(folder: Path) -> list[int]:
    return [entry["step"] for entry in read_log(folder, "step")] if (folder / "log.jsonl").exists() else []


@pytest.mark.long
def test_killed_trials_and_sweeps_go_on(tmp_path: Path) -> None:
    spec, out = tmp_path / "sweep.toml", tmp_path / "out"
    spec.write_text(SPEC.format(trials=3, steps=40))
    command = [sys.executable, "-m", "halocline.cli", "sweep", str(spec), "--out", str(out), "--json"]
    first, last = (out / "trials" / name for name in ("0000", "0002"))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
        try:
            wait_for(lambda: len(steps_of(first)) > 4)
            os.kill(wait_for(lambda: ranks_of(first))[0], signal.SIGKILL)  # a trial: it resumes from its checkpoint
            wait_for(lambda: (first / "result.json").exists())
            wait_for(lambda: len(steps_of(last)) > 4)
        finally:
            sweep.kill()  # the sweep: nothing is lost
    wait_for(lambda: not ranks_of(last))
    before = (first / "log.jsonl").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [trial["state"] for trial in result["trials"]] == ["complete"] * 3
    assert (first / "log.jsonl").read_bytes() == before  # a trial that had ended is not touched
    for folder in (first, last):
        steps = steps_of(folder)
        assert sorted(set(steps)) == list(range(40))
        assert len(steps) <= 40 + 3  # a checkpoint a step: no more is repeated than was under way
    assert "best: trial" in (out / "report.html").read_text()


@pytest.mark.long
def test_a_trial_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    spec, out = tmp_path / "sweep.toml", tmp_path / "out"
    text = SPEC.format(trials=3, steps=3).replace("choices = [2, 4]", "choices = [2, -1]")
    spec.write_text(text)
    command = [sys.executable, "-m", "halocline.cli", "sweep", str(spec), "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    states = {t["values"]["network.width"]: t["state"] for t in json.loads(done.stdout.splitlines()[-1])["trials"]}
    assert all(state == ("failed" if width < 0 else "complete") for width, state in states.items())
