"""``halocline sweep``: trials in processes of their own, resumed after kills, and one page about them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halocline.cli.sweep import speedups_of
from halocline.errors import ConfigError
from halocline.train.reporting.sweep_page import best, sweep_page
from halocline.train.sweeps import SweepRunner, SweepSpec, TrialRecord, read_spec
from halocline.train.sweeps.mix import TrialMix, planned_mix
from halocline.train.sweeps.runner import _Clock

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
    for wrong, words in (
        ('trails = 3\ntarget = "unet3d"', "trails is no setting"),
        ('target = "unet3d"', r"\[space\]"),
        ('target = "unet3d"\nmode = "both"\n[space]\nsteps = {low = 1, high = 2}', "mode = 'both'"),
        ('target = "unet3d"\n[space]\nsteps = {low = 1}', "space.steps"),
        ('target = "unet3d"\nbackend = "dask"\n[space]\nsteps = {low = 1, high = 2}', "backend = 'dask'"),
        ('target = "unet3d"\n[space]\n"optimizer.rate" = {low = 0.1, high = 0.2}', "rate"),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=words):
            read_spec(path)


def shortest(left: int, ranks: int, seconds: dict[int, float]) -> float:
    """The shortest time of all ways to put trials into waves."""
    if not left:
        return 0.0
    waves = [(k, seconds[ranks // k]) for k in range(1, min(left, ranks) + 1) if ranks // k in seconds]
    return min(took + shortest(left - k, ranks, seconds) for k, took in waves)


def test_the_mix_of_trials_is_over_first() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        ranks, trials = numbers.randint(1, 6), numbers.randint(1, 7)
        seconds = {each: numbers.random() for each in range(1, ranks + 1)}
        mix = TrialMix(ranks, trials, seconds)
        waves = mix.waves(trials)
        assert sum(count for count, _ in waves) == trials and all(count * each <= ranks for count, each in waves)
        assert mix.seconds(trials) == pytest.approx(shortest(trials, ranks, seconds))
        assert sum(seconds[each] for _, each in waves) == pytest.approx(mix.seconds(trials))
        left, begun = trials, []
        while left:
            begun.append(mix.next_ranks(left))
            mix.begun()
            left -= 1
        assert begun == [each for count, each in waves for _ in range(count)]
    odd = TrialMix(2, 3, {1: 1.0, 2: 0.6})
    assert odd.text(3) == "planned mix: 2 on 1 rank each, then 1 on 2 ranks each: 1.6 s (a trial: 1 s on 1, 0.6 s on 2)"


@pytest.mark.long
def test_the_planner_chooses_the_mix(tmp_path: Path) -> None:
    space = {"optimizer.lr": {"low": 1e-4, "high": 1e-2}}
    spec = SweepSpec("unet3d", space, 3, 2, "auto", machine="minsky", settings=["steps=50", "batch=2"])
    mix = planned_mix(spec, tmp_path)
    assert set(mix.predicted) == {1, 2} and min(mix.predicted.values()) > 0
    assert mix.seconds(3) == pytest.approx(shortest(3, 2, mix.predicted))
    with pytest.raises(ConfigError, match=r"on which machine\?"):
        planned_mix(replace(spec, machine=None), tmp_path)
    with pytest.raises(ConfigError, match=r'x has dims NCT.*mode = "experiment"'):
        planned_mix(replace(spec, target="disruption"), tmp_path)


def test_a_sweep_goes_on_only_with_the_trials_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(SPEC.format(trials=3, steps=5))
    spec = read_spec(path)

    def runner(**changes: Any) -> SweepRunner:
        return SweepRunner(replace(spec, **changes), tmp_path / "out", [], lambda words: None)

    runner()
    runner(trials=5, ranks=3, mode="data")  # how they share ranks may change
    with pytest.raises(ConfigError, match="another settings"):
        runner(settings=["steps=6"])
    with pytest.raises(ConfigError, match="another seed"):
        runner(seed=1)


def test_the_seconds_of_a_sweep_end_with_its_last_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the run on one rank, which comes first, would seem to last as long as the whole comparison."""
    now = [100.0]
    monkeypatch.setattr("halocline.train.sweeps.runner.time.monotonic", lambda: now[0])
    clock = _Clock(tmp_path / "seconds")
    now[0] = 130.0
    clock.note()
    now[0] = 500.0
    assert clock.seconds == 30.0 == json.loads((tmp_path / "seconds").read_text())["seconds"]
    again = _Clock(tmp_path / "seconds")
    assert again.seconds == 30.0
    now[0] = 510.0
    again.note()
    now[0] = 900.0
    assert again.seconds == 40.0


def test_runs_with_failed_trials_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    def run(seconds: float, *states: str) -> Any:
        records = [TrialRecord(k, {}, state, None, 1.0, 1) for k, state in enumerate(states)]
        return SimpleNamespace(seconds=seconds, records=records)

    alone, good, bad = (
        run(90.0, "complete", "complete"),
        run(60.0, "complete", "complete"),
        run(9.0, "failed", "failed"),
    )
    assert speedups_of(alone, {"side by side": good, "on all ranks": bad}) == {"side by side": 1.5}
    assert "on all ranks: 2 trials failed" in capsys.readouterr().err
    assert speedups_of(bad, {"side by side": good}) == {}


def test_random_trials_depend_on_their_number_alone(tmp_path: Path) -> None:
    """So that the runs of --compare try the same settings, whichever of them was stopped and went on."""
    path = tmp_path / "sweep.toml"
    path.write_text(SPEC.format(trials=4, steps=5))
    spec = replace(read_spec(path), sampler="random")
    once = SweepRunner(spec, tmp_path / "once", [], lambda words: None)
    told = [dict(once._ask(number).params) for number in range(4)]
    again = []
    for number in range(4):  # a process of its own for each
        again.append(dict(SweepRunner(spec, tmp_path / "again", [], lambda words: None)._ask(number).params))
    assert told == again and len({each["optimizer.lr"] for each in told}) == 4


def test_the_page_shows_every_trial() -> None:
    spec = SweepSpec("unet3d", {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "kind": {"choices": ["a", "b"]}})
    records = [
        TrialRecord(0, {"lr": 1e-3, "kind": "a"}, "complete", 0.5, 3.0, 1),
        TrialRecord(1, {"lr": 1e-1, "kind": "b"}, "complete", 0.25, 4.0, 1),
        TrialRecord(2, {"lr": 1e-2, "kind": "a"}, "failed", None, 1.0, 1),
    ]
    page = sweep_page(
        spec, records, {"experiment-parallel": 1.9, "data-parallel": 1.4}, "planned mix: 2 on 1 rank each"
    )
    found = best(spec, records)
    assert found is not None and found.number == 1
    for words in (
        "best: trial 1",
        "experiment-parallel: 1.90 times",
        "data-parallel: 1.40 times",
        "1 failed",
        "Planned mix: 2 on",
    ):
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
    """The steps in the order in which they were made, those that were made again included."""
    if not (folder / "log.jsonl").exists():
        return []
    lines = (folder / "log.jsonl").read_text().split("\n")[:-1]
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return [entry["step"] for entry in entries if entry["kind"] == "step"]


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
    assert steps_of(out / "trials" / "0001") == list(range(40))  # never killed
    assert "best: trial" in (out / "report.html").read_text()
    took = json.loads((out / "seconds").read_text())["seconds"]
    assert took >= max(trial["seconds"] for trial in result["trials"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and (first / "log.jsonl").read_bytes() == before
    assert json.loads((out / "seconds").read_text())["seconds"] == took  # nothing was left to do


@pytest.mark.long
def test_a_trial_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    spec, out = tmp_path / "sweep.toml", tmp_path / "out"
    text = SPEC.format(trials=3, steps=3).replace("choices = [2, 4]", "choices = [2, -1]")
    spec.write_text(text)
    command = [sys.executable, "-m", "halocline.cli", "sweep", str(spec), "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    states = {t["values"]["network.width"]: t["state"] for t in json.loads(done.stdout.splitlines()[-1])["trials"]}
    assert all(state == ("failed" if width < 0 else "complete") for width, state in states.items())


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ray_runs_the_trials(tmp_path: Path) -> None:
    """Each in processes of its own on a worker of Ray, with the results of processes that the sweep starts itself."""
    spec, found = tmp_path / "sweep.toml", []
    for backend in ("processes", "ray"):
        spec.write_text(f'backend = "{backend}"\nsampler = "random"\n' + SPEC.format(trials=2, steps=3))
        command = [
            sys.executable,
            "-m",
            "halocline.cli",
            "sweep",
            str(spec),
            "--out",
            str(tmp_path / backend),
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=without_ray_address())
        assert done.returncode == 0, done.stderr
        found.append([(t["values"], t["value"]) for t in json.loads(done.stdout.splitlines()[-1])["trials"]])
    assert found[0] == found[1] and len(found[0]) == 2


def without_ray_address() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install 'halocline\\[ray\\]'"):
        SweepRunner(SweepSpec("unet3d", {}, backend="ray"), tmp_path, [], lambda words: None)
