"""Signals that ask a run to leave: it ends its step, saves, exits with a status of its own, and goes on later."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from halocline.cli.stopping import Stop
from halocline.train.batch_files import BatchJob, slurm_script
from halocline.train.log import read_log
from halocline.train.signals import PREEMPTED, StopRequest

SETS = ("network.width=2", "data.arguments.size=16", "data.samples=4", "data.validation=0", "checkpoint_every=0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_a_request_and_ctrl_c_is_no_preemption(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert stop.asked and stop.preempted == (number != signal.SIGINT)
    assert signal.getsignal(number) is before


def test_the_same_request_may_come_twice_and_a_second_one_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr("halocline.train.signals.os._exit", ended.append)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # as a batch system and a launcher send it, both at once
        assert stop.asked and not ended
        stop._since -= 2.0
        signal.raise_signal(signal.SIGTERM)
        assert ended == [128 + signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signals_that_a_launcher_forwards_stay_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGUSR1)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_launcher_knows_who_asked():
    for number, preempted in ((signal.SIGUSR1, True), (signal.SIGTERM, True), (signal.SIGINT, False)):
        with Stop() as stop:
            signal.raise_signal(number)
        assert stop.asked == 1 and stop.preempted == preempted


def test_the_slurm_script_requeues_and_makes_a_secret(tmp_path):
    """The script runs under bash, with programs of the test in place of Slurm's."""
    told = tmp_path / "told"
    for name, body in (
        (
            "srun",
            f'echo "srun ${{#HALOCLINE_SECRET}} $*" >> {told}; mkdir -p $(cat {tmp_path}/further) .; '
            f"exit $(cat {tmp_path}/status)",
        ),
        ("scontrol", f'echo "scontrol $*" >> {told}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "run.sbatch"
    script.write_text(slurm_script(BatchJob("a b.toml", "runs/a", 1, 2, 0, 2, 1)))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    saved = tmp_path / "runs" / "a" / "checkpoints"
    saved.mkdir(parents=True)
    for status, requeued in (
        (0, False),
        (PREEMPTED, True),
        (143, True),
        (2, False),
        (2, True),
        (137, False),
        (137, True),
    ):
        told.unlink(missing_ok=True)
        (tmp_path / "status").write_text(str(status))
        further = requeued and status in (2, 137)  # a start that failed, after it had written a checkpoint
        (tmp_path / "further").write_text(str(saved / f"step-{len(list(saved.iterdir())):08}") if further else "")
        done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, check=False, timeout=30)
        lines = told.read_text().splitlines()
        assert done.returncode == status
        assert lines[0] == "srun 64 halocline train a b.toml --out runs/a"
        assert (lines[1:] == ["scontrol requeue 42"]) == requeued


def command(out, steps, *more):
    base = [sys.executable, "-m", "halocline.cli", "train", "unet3d", "--out", str(out), "--json", *more]
    return base + [word for each in (*SETS, f"steps={steps}") for word in ("--set", each)]


def started(out, steps, *more):
    run = subprocess.Popen(
        command(out, steps, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    end = time.monotonic() + 100
    while run.poll() is None and not ((out / "log.jsonl").exists() and any(read_log(out, "step"))):
        assert time.monotonic() < end
        time.sleep(0.05)
    return run


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.trial)])
def test_a_preempted_run_saves_and_goes_on_to_the_same_curve(tmp_path, number):
    out = tmp_path / "run"
    run = started(out, 400, "--ranks", "2", "--restarts", "1")
    run.send_signal(number)
    text, errors = run.communicate(timeout=100)
    assert run.returncode == PREEMPTED, errors
    found = json.loads(text.splitlines()[-1])
    made = len(found["losses"])
    assert found["stopped"] and found["preempted"] and found["restarts"] == 0 and 0 < made < 400
    assert (out / "checkpoints" / f"step-{made:08d}").is_dir()
    assert any(entry["waited"] > 0 for entry in read_log(out, "checkpoint"))
    whole = tmp_path / "whole"
    for folder, more in ((out, ()), (whole, ())):
        done = subprocess.run(command(folder, made + 3, "--ranks", "2", *more), capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr
    curves = [[entry["loss"] for entry in read_log(folder, "step")] for folder in (out, whole)]
    assert curves[0] == curves[1] and len(curves[0]) == made + 3
