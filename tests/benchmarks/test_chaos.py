"""`halocline bench chaos`: the stream of faults is seeded, trials are counted and resumed, a strike comes once."""

import contextlib
import json
import os
import signal
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import chaos
from benchmarks.chaos import INSIDE, Stage, Trial, cases, make_trial, measure_chaos, summary
from benchmarks.chaos_faults import Fault, Strike
from halocline.cli.app import app

KEYS = {"trials", "recovered", "reported", "hung", "orphans", "lost", "different", "cases", "seed"}


def fake(monkeypatch, outcomes):
    made = []

    def trial(number, seed, stage, case=None):
        made.append(number)
        return Trial(
            number, case or f"fault {number % 2}", 2, outcome=outcomes[number], seconds=1.0, again=float(number)
        )

    monkeypatch.setattr(chaos, "make_trial", trial)
    monkeypatch.setattr(chaos, "Stage", lambda limit: contextlib.nullcontext("a stage"))
    return made


def test_there_are_more_than_ten_kinds_of_fault():
    assert len(cases()) >= 15 and {"exchange", "optimizer", "rename"} <= {place for place, _, _ in INSIDE.values()}


def test_trials_are_counted_and_those_in_the_journal_not_repeated(monkeypatch, tmp_path):
    made, told = fake(monkeypatch, ["recovered", "reported", "hung", "recovered"]), []
    journal = tmp_path / "chaos.jsonl"
    measure_chaos(2, 7, 5.0, journal, told.append)
    found = measure_chaos(4, 7, 5.0, journal, told.append)
    assert made == [0, 1, 2, 3] == [trial.trial for trial in told]
    assert (found["trials"], found["recovered"], found["reported"], found["hung"]) == (4, 2, 1, 1)
    assert found["cases"] == {"fault 0": {"recovered": 1, "hung": 1}, "fault 1": {"reported": 1, "recovered": 1}}
    assert found["seconds_to_training"] == 1.5 and [each["trial"] for each in found["defects"]] == [2]
    measure_chaos(1, 8, 5.0, journal, told.append)  # another seed is another stream
    assert made == [0, 1, 2, 3, 0]


def test_the_command_prints_counts_and_fails_for_defects(monkeypatch):
    for outcome, status in (("recovered", 0), ("orphans", 1)):
        fake(monkeypatch, [outcome] * 3)
        found = CliRunner().invoke(app, ["bench", "chaos", "--trials", "3", "--json"])
        assert found.exit_code == status and set(json.loads(found.stdout.splitlines()[-1])) >= KEYS
    assert CliRunner().invoke(app, ["bench", "chaos", "--case", "flood"]).exit_code == 2
    assert set(summary([], 0)) >= KEYS


def test_a_strike_comes_once_at_its_count(monkeypatch, tmp_path):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    strike = Strike(0, "exchange", 3, "kill", str(tmp_path / "mark"))
    monkeypatch.setenv(*next(iter(strike.variables().items())))
    for _ in range(2):  # the second one as after a restart
        world = SimpleNamespace(post=lambda: "posted", post_sum=lambda: "summed")
        Fault().on_start(SimpleNamespace(mesh=SimpleNamespace(rank=0, world=world)))
        assert [world.post() for _ in range(5)] == ["posted"] * 5
    assert sent == [signal.SIGKILL]
    other = SimpleNamespace(post=len, post_sum=len)
    Fault().on_start(SimpleNamespace(mesh=SimpleNamespace(rank=1, world=other)))
    assert other.post is len


@pytest.mark.trial
@pytest.mark.parametrize("case", ["kill a rank", "kill in a rename", "remove a file", "SIGUSR1", "link comes back"])
def test_a_fault_is_survived(case):
    if case not in cases():
        pytest.skip("it takes root and iproute2")
    with Stage(90.0) as stage:
        trial = make_trial(0, 5, stage, case)
    assert trial.outcome in ("recovered", "reported"), trial
