"""Runs under faults: stopped ranks, killed launchers, early signals, refused commands, corrupt state, failing saves."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fault_trials import kill_the_launcher, stop_a_rank, terminate_early
from test_training_hard import place, settings_of, train  # noqa: F401  a network and data of one's own
from torch import nn

import halocline as hc
from halocline.cli import attempts
from halocline.cli.stopping import Stop
from halocline.errors import HaloclineError, RankFailure
from halocline.testing import run_local, shared_pool
from halocline.train import launch
from halocline.train.checkpoints import CheckpointError, Checkpoints, Folder, named_tensors
from halocline.train.config import make_settings
from halocline.train.elastic import RankCount
from halocline.train.guard import Guard, TrainingError
from halocline.train.launch import LocalRanks
from halocline.train.log import read_log
from halocline.train.settings import GuardSettings
from halocline.train.signals import PREEMPTED
from halocline.train.trainer import Trainer
from halocline.world.launcher import RankInfo, rank_info_of
from halocline.world.rendezvous import BoundedStore

DEADLINE = 10.0


# ---- stores that do not answer ----

SERVER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_a_stopped_store_is_noticed_by_our_own_deadline():
    """torch's client waits for its answer without end."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        raw = torch.distributed.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        store = BoundedStore(raw, 0.3)
        store.set("a", "1")
        assert store.get("a") == "1" and store.check("a") and store.add("n", 2) == 2
        server.send_signal(signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)  # a signal takes effect some time after it is sent
        for call in (lambda: store.check("a"), lambda: store.get("a"), lambda: store.add("n", 1)):
            with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
                call()
    finally:
        server.kill()
        server.communicate()


# ---- the launcher ----


def ranks_of(code, count, folder, deadline=1.0):
    return LocalRanks([sys.executable, "-c", f"import os, sys, time; {code}"], count, folder, deadline)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_ended(tmp_path, stopped):
    ending = ranks_of(f"os.kill(os.getpid(), 19) if os.environ['RANK'] == '{stopped}' else 0", 2, tmp_path).wait()
    assert ending.rank == stopped and not ending.is_final and "it is stopped (SIGSTOP" in ending.words


def test_a_rank_without_heartbeats_is_named_and_ended(tmp_path):
    """It has shown life once, and then hangs with all its threads."""
    code = "fd = int(os.environ['HALOCLINE_LAUNCHER'].split()[1]); os.write(fd, b'.'); time.sleep(600)"
    ending = ranks_of(code, 1, tmp_path).wait()
    assert ending.rank == 0 and "no sign of life for 1 s" in ending.words


class Unstarted:
    """Ranks that a signal finds while they are started."""

    def __init__(self, *_):
        self.signals = []
        os.kill(os.getpid(), signal.SIGTERM)

    def wait(self):
        return None

    def signal(self, number):
        self.signals.append(number)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_a_signal_that_comes_while_ranks_start_is_handed_on():
    made = []
    with Stop() as stop:
        assert stop.follow(lambda: made.append(Unstarted()) or made[0]) is None
    assert made[0].signals == [signal.SIGTERM] and stop.asked == 1


def test_a_refused_command_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("halocline.train.checkpoints.files._LOCK_PATIENCE", 0.1)
    (tmp_path / "config.toml").write_text("of the live run")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-1.error").write_text("of the live run")
    live = Folder(tmp_path / "checkpoints")
    live.claim()
    with pytest.raises(CheckpointError, match="another run writes its checkpoints here"):
        attempts.on_this_machine(make_settings({"workload": "unet3d"}), tmp_path, RankCount(2, 2), restarts=1)
    live.release()
    assert (tmp_path / "config.toml").read_text() == (tmp_path / "ranks" / "rank-1.error").read_text()
    assert (tmp_path / "config.toml").read_text() == "of the live run"


def test_ranks_share_the_lock_of_their_launcher(tmp_path):
    launcher = Folder(tmp_path)
    launcher.claim()
    (tmp_path / ".step-00000001.part").mkdir()
    rank = Folder(tmp_path, os.dup(launcher.lock))
    rank.claim()
    assert not list(tmp_path.iterdir())  # what a rank that was killed left is put right by the next
    launcher.release()
    assert not Folder(tmp_path)._take(0.0)  # the rank still holds it


# ---- launchers of others ----

PLACES = {
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "2"}, RankInfo("torchrun", 1, 4)),
    "srun": ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "PMIX_RANK": "3"}, RankInfo("Slurm", 3, 4)),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
    "mpich": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, RankInfo("MPI", 1, 2)),
    "open mpi": ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2"}, RankInfo("MPI", 2, 4)),
    "pmix": ({"PMIX_RANK": "1"}, RankInfo("MPI", 1, 0)),
    "nobody": ({}, None),
}


@pytest.mark.parametrize("case", PLACES)
def test_every_launcher_says_which_rank_this_is(case):
    variables, expected = PLACES[case]
    assert rank_info_of(variables) == expected


@pytest.mark.parametrize(("case", "rank"), [("mpich", 1), ("open mpi", 2), ("nobody", 0)])
def test_the_trainer_takes_its_rank_from_mpiexec(case, rank, monkeypatch):
    """Otherwise every process would write the results of rank 0."""
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "SLURM_", "PMI", "OMPI_"))]:
        monkeypatch.delenv(name)
    for name, value in PLACES[case][0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "joined_world", lambda: None)
    assert (launch.this_rank(), launch.launched()) == (rank, case != "nobody")


# ---- corrupt state ----


def flipped_at(place, folder, step, **more):  # noqa: F811
    """One bit of a weight changes on the last rank after that step; the error that every rank ends with."""
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

    def tell(kind, values):
        if kind == "step" and values["step"] == step - 1 and trainer.mesh.rank == trainer.mesh.size - 1:
            with torch.no_grad():
                trainer.model.layers[0].weight.view(torch.int64)[0, 0, 0, 0] ^= 1

    trainer = Trainer(settings_of(place, "steps=6", "checkpoint_every=1", "guard.drift_every=0"), folder, tell)
    with pytest.raises(TrainingError) as told:
        trainer.train()
    return str(told.value)


@pytest.mark.long
def test_a_weight_that_changed_on_one_rank_is_never_saved(place, tmp_path):  # noqa: F811
    for words in shared_pool(2).run(flipped_at, place, tmp_path, 4, deadline=60):
        assert "step 4: 1 of 16 tensors differ between ranks, first layers.0.weight (ranks 0, 1 differ" in words
        assert "no checkpoint is written" in words
    assert max(Folder(tmp_path / "checkpoints").steps()) == 3
    whole = train(place, tmp_path / "whole", "steps=6").losses
    rest = shared_pool(2).run(train, place, tmp_path, "steps=6", deadline=60)[0].losses
    assert len(rest) == 3 and torch.allclose(torch.tensor(rest), torch.tensor(whole[3:]), rtol=1e-9, atol=0)


def odd_one_of_three():
    mesh, model = hc.Mesh(data=3), nn.BatchNorm1d(2)
    if mesh.rank == 1:
        model.running_var[1] += 1e-7
    guard = Guard(GuardSettings(), model, mesh)
    with pytest.raises(TrainingError) as told:
        guard.may_save(7, named_tensors({"model": model.state_dict()}))
    return str(told.value)


def test_the_rank_that_most_others_disagree_with_is_named():
    for words in run_local(3, odd_one_of_three):
        assert "step 7: 1 of 5 tensors differ between ranks, first running_var on rank 1" in words


def test_numbers_that_are_none_in_buffers_are_not_saved():
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    model.register_buffer("empty", torch.full((2,), torch.nan))  # as the model was made
    guard = Guard(GuardSettings(), model, hc.Mesh(data=1))
    assert guard.may_save(1, named_tensors({"model": model.state_dict()}))
    model.running_mean[0] = torch.nan
    with pytest.raises(TrainingError, match="step 2: 1 tensors hold NaN or infinities, first running_mean"):
        guard.may_save(2, named_tensors({"model": model.state_dict()}))


# ---- saves that fail ----


def full_disk(place, folder):  # noqa: F811
    """The second rank cannot write its part of the checkpoint of step 2; the words and step of every rank's end."""
    import halocline.train.checkpoints.store as store

    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    trainer = Trainer(settings_of(place, "steps=60", "checkpoint_every=2"), folder)
    true = store.facts

    def facts(path, durable=False):
        if trainer.mesh.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return true(path, durable)

    store.facts = facts
    try:
        trainer.train()
    except HaloclineError as error:
        return str(error), trainer.step, trainer.checkpoints._pending is None
    finally:
        store.facts = true


def test_a_failed_save_ends_the_run_at_once_and_says_why_on_every_rank(place, tmp_path):  # noqa: F811
    ends = shared_pool(2).run(full_disk, place, tmp_path, deadline=60)
    for words, step, done in ends:
        assert "checkpoint of step 2 was not saved" in words and "rank 1: No space left on device" in words
        assert done and step == ends[0][1]
    assert not Folder(tmp_path / "checkpoints").steps()


@pytest.mark.long
def test_a_failed_save_is_raised_before_the_next(place, tmp_path, monkeypatch):  # noqa: F811
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("halocline.train.checkpoints.saving.write_tensors", fail)

    def tell(kind, values):
        if kind == "step":
            time.sleep(0.05)

    with pytest.raises(CheckpointError, match="step 20 was not saved: Input/output error"):
        train(place, tmp_path, "steps=60", "checkpoint_every=20", tell=tell)
    assert len(list(read_log(tmp_path, "step"))) < 40


def test_who_leaves_on_an_error_does_not_wait_for_a_stuck_writer(tmp_path, monkeypatch):
    monkeypatch.setattr("halocline.train.checkpoints.saving._LEAVING", 0.1)
    stuck = threading.Event()
    monkeypatch.setattr("halocline.train.checkpoints.saving.write_tensors", lambda *_: stuck.wait(60))
    began = time.monotonic()

    def fail_beside_a_save():
        with Checkpoints(tmp_path, None, deadline=50) as saves:
            saves.save(1, {"w": torch.zeros(3)}, {})
            raise RankFailure("another rank is gone")

    with pytest.raises(RankFailure, match="another rank is gone"):
        fail_beside_a_save()
    with (
        pytest.raises(CheckpointError, match="still being written"),
        Checkpoints(tmp_path / "b", None, deadline=0.2) as late,
    ):
        late.save(1, {"w": torch.zeros(3)}, {}, wait=True)
    assert time.monotonic() - began < 20  # and not 50
    stuck.set()


# ---- whole programs ----


@pytest.mark.long
@pytest.mark.parametrize("by", ["own", *(pytest.param(by, marks=pytest.mark.trial) for by in ("variables", "mpiexec"))])
def test_a_stopped_rank_ends_the_run_by_the_deadline(tmp_path, by):
    outcome = stop_a_rank(tmp_path, random.Random(1), DEADLINE, 2, by)
    assert outcome.status not in (None, 0), outcome
    assert "rank 0" in outcome.stderr and outcome.seconds < DEADLINE + 20, outcome


@pytest.mark.trial
def test_a_stopped_rank_is_started_again(tmp_path):
    outcome = stop_a_rank(tmp_path, random.Random(3), DEADLINE, 2, "own", restarts=1)
    assert outcome.status == 0 and '"restarts": 1' in outcome.stdout, outcome


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_sigterm_during_the_start_is_obeyed(tmp_path, seed):
    outcome = terminate_early(tmp_path, random.Random(seed), 8.0, 2)
    assert outcome.status in (-signal.SIGTERM, PREEMPTED), outcome


@pytest.mark.long
def test_ranks_end_with_their_launcher(tmp_path):
    assert kill_the_launcher(tmp_path, random.Random(0), 5.0, 2).status == 0


@pytest.mark.trial
def test_one_rank_alone_prints_under_mpiexec(tmp_path):
    from fault_trials import command

    mpiexec = Path(sys.executable).parent / "mpiexec"
    told = [str(mpiexec), "-n", "2", *command(tmp_path / "run", 2, 60.0, 0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(told, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 1 and done.stderr.count("step 1: loss") == 1
