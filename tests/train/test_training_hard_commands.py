"""What commands are told and what they leave: odd settings, damaged logs, ranks that die, Ctrl-C, old results."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import halocline as hc
from halocline import sizes
from halocline.cli import attempts as attempts_module
from halocline.cli import train as train_command
from halocline.cli import train_rank
from halocline.cli.app import app
from halocline.errors import RankFailure
from halocline.train import forecast
from halocline.train.batch_files import BatchJob, slurm_script
from halocline.train.config import load_settings, make_settings, read_settings, write_settings
from halocline.train.elastic import RankCount
from halocline.train.launch import Ending, LaunchError, LocalRanks
from halocline.train.log import RunLog, read_log
from halocline.train.reporting import write_report
from halocline.train.settings import ConfigError
from halocline.train.task import defaults_of, make_task
from halocline.train.trainer import Result

# ---- settings ----


def test_odd_values_are_read_as_they_were_written(tmp_path):
    told = {
        "workload": "unet3d",
        "clip": math.inf,
        "network": {"a b": 1, "x.y": {"": [True]}, "name": 'a\x7f\n"é😀'},
        "data": {"x": {"fill": -math.inf}, "arguments": {"tables": [{"odd key": 1.5}]}},
    }
    settings = make_settings(told)
    write_settings(settings, tmp_path / "config.toml")
    assert load_settings(tmp_path / "config.toml") == settings
    assert read_settings(tmp_path).network == told["network"]
    assert not list(tmp_path.glob(".*"))


def test_words_that_python_and_json_have_are_no_strings():
    changes = ["network.norm=False", "network.bias=True", "data.path=2026-01-31", "clip=none", "seed=007"]
    settings = make_settings({"workload": "a", "clip": 1.0}, changes)
    assert settings.network == {"norm": False, "bias": True}
    assert (settings.data.path, settings.clip, settings.seed) == ("2026-01-31", None, 7)
    with pytest.raises(ConfigError, match=r"network\.norm = None: settings have no None"):
        make_settings({"workload": "a"}, ["network.norm=None"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("optimizer.betas=[0.9, 1.5]", r"optimizer.betas.1 = 1.5: .*less than 1"),
        ("optimizer.weight_decay=nan", "optimizer.weight_decay = nan: .*greater than or equal to 0"),
        ("optimizer.trust=0", "optimizer.trust = 0: .*greater than 0"),
        ("guard.slow=1", "guard.slow = 1: .*greater than 1"),
        ("guard.drift_every=-1", "guard.drift_every = -1: .*greater than or equal to 0"),
        ("deadline=0", "deadline = 0: .*greater than 0"),
    ],
)
def test_numbers_out_of_range_are_told(change, text):
    with pytest.raises(ConfigError, match=text):
        make_settings({"workload": "a"}, [change])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["workload=unet"], r"workload = 'unet' \(did you mean unet3d\?\)"),
        (
            ["network.wdth=4"],
            "network = .*unexpected keyword argument 'wdth'; UNet3d takes width, channels_in, classes",
        ),
        (["data.arguments.edge=4"], "data.arguments = .*'edge'; volumes takes size"),
        (["data=scans.h5"], "data.path = 'scans.h5': workload = 'unet3d' has its own"),
        (["loss=torch.nn.functional:mse_loss"], "loss = .*workload = 'unet3d' has its own"),
    ],
)
def test_what_a_workload_does_not_take_is_refused(changes, text):
    settings = make_settings({}, changes, defaults_of("unet3d"))
    with pytest.raises(ConfigError, match=text):
        make_task(settings, torch.float32).make_model()


@pytest.mark.parametrize("text", ["1.2.3GiB", ".", "1..5"])
def test_sizes_with_too_many_points(text):
    with pytest.raises(ConfigError, match=r"data\.memory"):
        make_settings({"workload": "unet3d"}, [f"data.memory='{text}'"])


def test_memory_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "_CGROUP", str(tmp_path))
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "a 1\ninactive_file 50\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert forecast.available() == 175


# ---- commands ----


def told(*arguments):
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == 2, found
    assert len(found.stderr.strip().splitlines()) == 1 and "Traceback" not in found.stderr
    return found.stderr


def test_mistakes_of_the_command_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.toml").write_text('workload = "unet3d"\nscale = "huge"\n')
    (tmp_path / "own.toml").write_text('model = "a:b"\nloss = "a:c"\ndata = "x.h5"\n')
    (tmp_path / "folder").mkdir()
    assert "did you mean cosmoflow?" in told("train", "cosmoflo")
    assert "scale = 'huge'" in told("train", "odd.toml")
    assert "neither a TOML file nor the folder of a run" in told("train", "folder")
    assert "is not a workload" in told("train", "own.toml", "--full")
    assert "workload = 'unet' (did you mean unet3d?)" in told("train", "cosmoflow", "--set", "workload=unet")
    monkeypatch.setenv("RANK", "0")
    assert "here a launcher did" in told("train", "cosmoflow", "--ranks", "2", "--out", "a")
    assert not (tmp_path / "runs").exists()


def test_a_workload_at_full_size_has_the_settings_of_that_size(tmp_path):
    for changes, full in ((["scale=full"], False), ([], True)):
        settings, _ = train_command._settings("unet3d", changes, full, tmp_path)
        assert (settings.scale, settings.steps) == ("full", 20_000)


def test_a_run_whose_settings_were_spoiled_by_hand_does_not_go_on(tmp_path, monkeypatch):
    write_settings(make_settings({"workload": "unet3d"}), tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text((tmp_path / "config.toml").read_text().replace("lr =", "lrr ="))
    assert "optimizer.lrr is unknown" in told("train", str(tmp_path))


def test_the_demo_removes_nothing_but_demos(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "holds other files" in told("demo", "--out", str(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_paths_with_spaces_reach_slurm_whole():
    text = slurm_script(BatchJob("my runs/a b.toml", "out dir", 1, 1, 0, 6, 1))
    assert "srun halocline train 'my runs/a b.toml' --out 'out dir'" in text
    assert "--job-name=a-b\n" in text and "export SRUN_CPUS_PER_TASK=6" in text


def test_a_port_in_use_is_one_line(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RankFailure, match=f"cannot meet at 127.0.0.1:{port}: the port is in use .*set MASTER_PORT"):
            hc.init(5.0)


# ---- the log ----


def test_what_follows_a_line_that_was_cut_off_is_kept(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"kind": "step", "step": 0, "loss": 1.0}\n\xff\x00\n3\n{"kind": "st')
    log = RunLog(tmp_path)
    log.write("step", step=1, loss=math.nan)
    log.write("step", step=2, loss=-math.inf)
    log.close()
    losses = [entry["loss"] for entry in read_log(tmp_path, "step")]
    assert losses[0] == 1.0 and math.isnan(losses[1]) and losses[2] == -math.inf
    assert b"NaN" not in (tmp_path / "log.jsonl").read_bytes()
    assert "loss" in write_report(tmp_path).sections


def test_steps_after_the_checkpoint_that_a_run_went_back_to_do_not_count(tmp_path):
    log = RunLog(tmp_path)
    for step in (0, 1, 2, 3, 4):
        log.write("step", step=step, loss=float(step))
    log.write("validation", step=2, loss=0.2)
    log.write("validation", step=4, loss=0.4)
    for step in (2, 3):
        log.write("step", step=step, loss=10.0 + step)
    log.close()
    assert [entry["loss"] for entry in read_log(tmp_path, "step")] == [0, 1, 12, 13]
    assert [entry["step"] for entry in read_log(tmp_path, "validation")] == [2]


# ---- ranks of this machine ----


def ranks_of(code, count, folder):
    return LocalRanks(
        [sys.executable, "-c", f"import os, signal, sys; rank = int(os.environ['RANK']); {code}"], count, folder
    )


def test_the_rank_that_was_killed_is_named_and_not_the_one_that_noticed(tmp_path):
    running = ranks_of("os.kill(os.getpid(), 9) if rank == 1 else sys.exit(1)", 2, tmp_path)
    for process in running.processes:
        process.wait()
    assert running.wait() == Ending(1, -9, "killed by SIGKILL")


def test_what_a_rank_said_last_is_told(tmp_path):
    ending = ranks_of("sys.exit('no such file here' if rank == 1 else 0)", 2, tmp_path).wait()
    assert ending == Ending(1, 1, "ended with status 1: no such file here")


def test_a_terminals_interrupt_is_left_to_the_launcher(tmp_path):
    """Its first is to write a checkpoint: ranks that it kills at once could not."""
    assert ranks_of("sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN)", 2, tmp_path).wait() is None
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def attempts(monkeypatch, tmp_path, ending, during=lambda: None):
    """How often ranks were started that all end like that."""
    made = []

    class Fake:
        def __init__(self, command, ranks, folder, deadline, lock, template):
            made.append(self)
            self.signals = []

        def wait(self, look):
            during()
            return ending

        def signal(self, number):
            self.signals.append(number)

    monkeypatch.setattr(attempts_module, "LocalRanks", Fake)
    with pytest.raises(LaunchError, match=ending.words):
        attempts_module.on_this_machine(make_settings({"workload": "unet3d"}), tmp_path, RankCount(2, 2), restarts=2)
    return made


def test_ranks_that_die_are_started_again_but_not_wrong_settings(monkeypatch, tmp_path):
    assert len(attempts(monkeypatch, tmp_path, Ending(1, -9, "killed"))) == 3
    assert len(attempts(monkeypatch, tmp_path, Ending(1, 2, "mesh.D = 3"))) == 1


def test_whoever_asks_to_stop_is_not_started_again(monkeypatch, tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    made = attempts(monkeypatch, tmp_path, Ending(0, -9, "killed"), twice)
    assert [each.signals for each in made] == [[signal.SIGTERM, signal.SIGKILL]]


class FakeTrainer:
    def __init__(self, settings, folder, tell, lock):
        pass

    def train(self):
        return Result(4, metrics={"loss": math.nan})


def test_results_are_json_of_the_first_rank_and_of_this_run(monkeypatch, tmp_path):
    monkeypatch.setattr("halocline.train.trainer.Trainer", FakeTrainer)
    settings = make_settings({"workload": "unet3d"})
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    train_rank.run_rank(settings, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SLURM_PROCID", "0")
    train_rank.run_rank(settings, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == {"loss": "nan"}
    write_settings(settings, tmp_path / "config.toml")
    assert "finished" in write_report(tmp_path).path.read_text()

    def fail(self):
        raise LaunchError("another rank died")

    monkeypatch.setattr(FakeTrainer, "train", fail)
    with pytest.raises(LaunchError):
        train_rank.run_rank(settings, tmp_path)
    assert not (tmp_path / "result.json").exists()
    assert "not finished" in write_report(tmp_path).path.read_text()


def test_an_error_of_the_network_is_told_with_its_kind(monkeypatch, tmp_path):
    write_settings(make_settings({"workload": "unet3d"}), tmp_path / "config.toml")

    def fail(settings, folder, lock):
        raise ValueError("a volume of [20] does not halve")

    monkeypatch.setattr(train_rank, "run_rank", fail)
    monkeypatch.setattr(sys, "argv", ["train_rank", str(tmp_path)])
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        train_rank.main()
    words = (tmp_path / "ranks" / "rank-1.error").read_text()
    assert re.search(r"test_training_hard_commands\.py:\d+: ValueError: a volume of \[20\] does not halve", words)
    assert "rank-1.traceback" in words and "Traceback" in (tmp_path / "ranks" / "rank-1.traceback").read_text()


# ---- whole programs ----


@pytest.mark.long
def test_ctrl_c_in_a_terminal_ends_ranks_after_a_checkpoint(tmp_path):
    """A terminal sends it to every process of the group at once."""
    sets = ("network.width=2", "data.arguments.size=16", "data.samples=4", "steps=2000", "checkpoint_every=0")
    command = [sys.executable, "-m", "halocline.cli", "train", "unet3d", "--ranks", "2", "--out", str(tmp_path / "run")]
    command += [word for each in sets for word in ("--set", each)] + ["--json", "--restarts", "1"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
    log = tmp_path / "run" / "log.jsonl"
    while run.poll() is None and not (log.exists() and any(read_log(log.parent, "step"))):
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err.decode()
    found = json.loads(out.splitlines()[-1])
    assert found["stopped"] and found["restarts"] == 0, err.decode()
    assert Path(tmp_path / "run" / "checkpoints" / f"step-{len(found['losses']):08d}").is_dir()
