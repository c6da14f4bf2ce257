"""Ranks that are lost and come back: the run goes on with those that are there, on the curve of an undisturbed one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from halocline.errors import ConfigError
from halocline.train import elastic
from halocline.train.config import make_settings
from halocline.train.elastic import RankCount, for_ranks
from halocline.train.log import LOG, read_log

# ---- how many ranks ----


def test_the_file_of_slots_decides_within_the_limits(tmp_path):
    counts = RankCount(4, 2, room := tmp_path / "room")
    told = []
    for text in ("", "3", "9", "1", "half", "4"):
        room.write_text(text)
        told.append(counts.wanted())
    assert told == [4, 3, 4, 0, 0, 4]
    room.unlink()
    assert counts.wanted() == 4


def test_lost_ranks_are_tried_again_and_each_time_later(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    counts = RankCount(3, 1, take_back=10)
    assert counts.lose_one() and counts.wanted() == 2
    now[0] = 10.0
    assert counts.wanted() == 3
    assert counts.lose_one() and counts.lose_one() and not counts.lose_one() and counts.wanted() == 1
    now[0] = 10.0 + 39
    assert counts.wanted() == 1
    now[0] = 10.0 + 41
    assert counts.wanted() == 3


def test_a_number_that_the_run_cannot_be_cut_for_is_left_out():
    counts = RankCount(4, 1)
    assert not counts.exclude(4)
    assert counts.lose_one() and counts.exclude(3) and counts.wanted() == 2
    assert counts.exclude(2) and not counts.exclude(1)


def test_settings_for_fewer_ranks_keep_what_fits():
    settings = make_settings({"workload": "unet3d", "mesh": {"N": 2, "D": 2}})
    assert for_ranks(settings, 4) is settings and for_ranks(settings, 3).mesh == {}
    halves = make_settings({"workload": "transformer", "mesh": {"N": 2}, "model_parts": 2})
    assert for_ranks(halves, 4) is halves and for_ranks(halves, 2).mesh == {}
    assert for_ranks(make_settings({"workload": "unet3d", "plan": "auto"}), 3).plan == "auto"


def test_a_launcher_with_too_few_ranks_is_refused(monkeypatch):
    from halocline.cli.train import _for_these_ranks

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--least-ranks 2: the launcher has started 1"):
        _for_these_ranks(make_settings({"workload": "unet3d"}), 2)


def test_agents_that_keep_one_store_for_all_rounds_are_refused(monkeypatch):
    from halocline.cli.train import _for_these_ranks

    settings = make_settings({"workload": "unet3d"})
    told = {"RANK": "0", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        _for_these_ranks(settings, 2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert _for_these_ranks(settings, 2) is settings


# ---- runs ----

CODE = """
import os, signal, time
from pathlib import Path
from torch import nn

class Network(nn.Sequential):
    def __init__(self):
        first, last = nn.Conv3d(1, 3, 3, padding=1), nn.Conv3d(3, 1, 3, padding=1)
        super().__init__(first, nn.BatchNorm3d(3), nn.ReLU(), nn.Dropout(0.1), last)

CHANGES = {2: (3, 3), 4: (2, 2), 7: (4, None)}  # at a step: as many ranks from then on, and which one is lost

class Lost:
    def on_step(self, trainer, step, loss):
        rank = trainer.mesh.rank
        if rank == 0:
            with open("samples", "a") as file:
                file.write(f"{step} {trainer.mesh.size} {trainer.samples}\\n")
        now, lost = CHANGES.get(step, (0, None))
        if now and trainer.mesh.size != now and not Path(f"mark{step}").exists():
            if rank == (lost or 0):
                Path(f"mark{step}").touch()
                Path("room").write_text(str(now))
                if lost and "ALONE" in os.environ:
                    os.kill(os.getppid(), signal.SIGKILL)  # the agent, too
                if lost:
                    os.kill(os.getpid(), signal.SIGKILL)
        if step == 8 and trainer.mesh.size == 2 and "ALONE" in os.environ:
            end = time.monotonic() + 60
            while not trainer.stop.asked and time.monotonic() < end:  # until others have joined
                time.sleep(0.1)
"""
STEPS = 13
SETS = (
    'model="lost_ranks:Network"', 'loss="torch.nn.functional:mse_loss"', 'data.x.path="x.npy"', 'data.y.path="y.npy"',
    'data.x.dims="NCDHW"', 'data.y.dims="NCDHW"', "data.validation=0", "checkpoint_every=2", "precision=fp64",
    "batch=2", "deadline=30", f"steps={STEPS}", 'callbacks=["lost_ranks:Lost"]',
)  # fmt: skip
TRAIN = ["-m", "halocline.cli", "train", "run.toml", *(word for each in SETS for word in ("--set", each))]


def _prepare(folder, code=CODE):
    (folder / "lost_ranks.py").write_text(code)
    (folder / "run.toml").write_text("")
    for name, seed in (("x", 1), ("y", 2)):
        np.save(folder / f"{name}.npy", np.random.default_rng(seed).standard_normal((6, 1, 12, 12, 12)))


def _environment(folder):
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
        "HALOCLINE_SECRET": "of a test, and long enough",
    }


def _seen(folder):
    """By step of the curve: the samples; and the numbers of ranks that made steps, in order."""
    made, sizes = {}, []
    for line in (folder / "samples").read_text().splitlines():
        step, size, samples = line.split(" ", 2)
        made[int(step)] = samples  # of a step that was made again, the last
        if sizes[-1:] != [int(size)]:
            sizes.append(int(size))
    return [made[step] for step in range(STEPS)], sizes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses and samples of a run on two ranks that loses none."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _prepare(folder, CODE.replace("CHANGES = {", "CHANGES = {} and {"))
    command = [sys.executable, *TRAIN, "--out", "run", "--ranks", "2"]
    subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, timeout=170, check=True)
    return [entry["loss"] for entry in read_log(folder / "run", "step")], _seen(folder)[0]


def _compare(folder, undisturbed):
    losses = [entry["loss"] for entry in read_log(folder / "run", "step")]
    wanted, samples = undisturbed
    seen, sizes = _seen(folder)
    assert seen == samples
    epochs = [number for text in seen[:12] for number in text.strip("[]").split(", ")]
    assert set(Counter(epochs).values()) == {4}  # 12 steps of 2 are 4 epochs of 6
    assert len(losses) == STEPS and max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-8
    return sizes


@pytest.mark.long
def test_four_ranks_become_three_and_two_and_four_again(tmp_path, undisturbed):
    _prepare(tmp_path)
    (tmp_path / "room").write_text("4")
    command = [sys.executable, *TRAIN, "--out", "run", "--ranks", "4", "--restarts", "2", "--least-ranks", "2"]
    done = subprocess.run(
        [*command, "--slots", "room"], cwd=tmp_path, env=_environment(tmp_path), capture_output=True, timeout=170
    )
    assert done.returncode == 0, done.stderr.decode()
    assert _compare(tmp_path, undisturbed) == [4, 3, 2, 4]
    entries = map(json.loads, (tmp_path / "run" / LOG).read_text().splitlines())  # of steps that were made again, too
    assert [entry["ranks"] for entry in entries if entry["kind"] == "start"] == [4, 3, 2, 4]


@pytest.mark.trial
def test_agents_of_torchrun_are_lost_and_come_back(tmp_path, undisturbed):
    """Four agents with a rank each, of which two are killed with their ranks; then two others join."""
    _prepare(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []

    def start(index):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1",
            "--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
            "--rdzv-id", "test", "--rdzv-conf", f"is_host={int(index == 0)},last_call_timeout=3",
            "--local-addr", "127.0.0.1", "-m", *TRAIN[1:], "--out", "run", "--least-ranks", "2",
            "--set", "deadline=120",
        ]  # fmt: skip
        with (tmp_path / f"agent-{index}").open("wb") as log:
            own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else ranks meet under what the last round left
            environment = {**_environment(tmp_path), **own_store, "ALONE": "1", "GLOO_SOCKET_IFNAME": "lo"}
            agents.append(
                subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    try:
        for index in range(4):
            start(index)
        end = time.monotonic() + 500
        while not (tmp_path / "mark7").exists():
            assert time.monotonic() < end, [(tmp_path / f"agent-{index}").read_text()[-800:] for index in range(4)]
            time.sleep(0.2)
        for index in (4, 5):
            start(index)
        assert agents[0].wait(max(1.0, end - time.monotonic())) == 0, (tmp_path / "agent-0").read_text()
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)
        for agent in agents:
            try:
                agent.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
    sizes = _compare(tmp_path, undisturbed)
    assert sizes[0] == 4 and sizes[-1] == 4 and 2 in sizes
