"""Several runs on the same ranks: the curves of each alone, to the bit, and memory under the limit."""

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
import torch
from torch import nn

from halocline.errors import ConfigError
from halocline.testing import shared_pool
from halocline.testing.memory import peak_bytes
from halocline.train.config import make_settings, read_settings
from halocline.train.settings import Settings
from halocline.train.sharing import Shared, train_together
from halocline.train.spill import SpillFile, bytes_in, state_of
from halocline.train.task import defaults_of
from halocline.train.trainer import Trainer

# Dropout in the first, an own optimizer and accumulation in the second; a wide one for memory.
FIRST = ("steps=7", "precision=fp64", "data.samples=12", "data.validation=4", "batch=3", "checkpoint_every=3",
         "network.dropout=0.2", "network.size=16", "data.arguments.size=16", "network.width=2")  # fmt: skip
SECOND = ("steps=4", "precision=fp64", "data.samples=24", "data.validation=6", "batch=4", "checkpoint_every=0",
          "data.arguments={length = 12}", "optimizer.name=sgd", "seed=3")  # fmt: skip


def settings_of(workload: str, *changes: str) -> Settings:
    return make_settings({"workload": workload}, list(changes), defaults_of(workload), "test")


def both() -> list[Settings]:
    return [settings_of("cosmoflow", *FIRST), settings_of("disruption", *SECOND)]


def quiet(kind: str, values: dict[str, Any]) -> None:
    """No display."""


def together(folder: Path, limit: int | None, turn: int) -> Shared:
    torch.set_num_threads(1)
    return train_together([(s, folder / f"{n}", quiet) for n, s in enumerate(both())], limit, turn)


def alone(folder: Path) -> list[tuple[list[float], dict[str, float]]]:
    torch.set_num_threads(1)
    results = [Trainer(settings, folder / f"{n}").train() for n, settings in enumerate(both())]
    return [(one.losses, one.metrics) for one in results]


def outcomes(shared: Shared) -> list[tuple[list[float], dict[str, float]]]:
    return [(one.losses, one.metrics) for one in shared.results]


@pytest.mark.parametrize("turn", [pytest.param(1, marks=pytest.mark.long), 3])
def test_runs_in_turns_have_their_own_curves_to_the_bit(tmp_path: Path, turn: int) -> None:
    expected = alone(tmp_path / "alone")
    shared = together(tmp_path / "free", None, turn)
    assert outcomes(shared) == expected
    assert shared.spilled == 0
    tight = together(tmp_path / "tight", 1 << 40, turn)
    assert outcomes(tight) == expected
    assert not list(tmp_path.rglob("spill/*.bin"))


def on_two_ranks(folder: Path) -> tuple[Any, Any, int]:
    expected = alone(folder / "alone")
    shared = together(folder / "tight", 100 << 20, 2)
    return expected, outcomes(shared), shared.spilled


@pytest.mark.long
def test_on_two_ranks(tmp_path: Path) -> None:
    for expected, found, spilled in shared_pool(2).run(on_two_ranks, tmp_path, deadline=120):
        assert found == expected
        assert spilled > 0


def wide(n: int) -> Settings:
    """A decoder of 3.6 million weights, 14 MB; with gradients and Adam's moments 57."""
    return settings_of("transformer", "steps=3", "data.samples=8", "data.validation=0", "batch=2", "network.width=384",
                       f"seed={n}", "checkpoint_every=0")  # fmt: skip


def under_a_limit(folder: Path) -> tuple[list[int], int, int, int, bool]:
    """Peaks of tensor memory: of each run alone, of both at once, of both in turns; their limit; are curves equal?"""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}

    def run(name: str, work: Any) -> int:
        return peak_bytes(lambda: found.update({name: work()})).peak

    def single(n: int) -> list[float]:
        return Trainer(wide(n), folder / f"alone-{n}").train().losses

    def pair(name: str, limit: int | None) -> Shared:
        return train_together([(wide(n), folder / f"{name}-{n}", quiet) for n in (0, 1)], limit, 1)

    peaks = [run(f"alone {n}", lambda n=n: single(n)) for n in (0, 1)]
    limit = max(peaks) + (4 << 20)
    free, shared = run("free", lambda: pair("free", None)), run("shared", lambda: pair("shared", limit))
    alone = [found["alone 0"], found["alone 1"]]
    same = all([one.losses for one in found[name].results] == alone for name in ("free", "shared"))
    assert found["shared"].spilled > 100 << 20 > found["free"].spilled == 0
    return peaks, free, shared, limit, same


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_models_under_a_limit_that_one_alone_needs(tmp_path: Path, ranks: int) -> None:
    each = [under_a_limit(tmp_path)] if ranks == 1 else shared_pool(2).run(under_a_limit, tmp_path, deadline=240)
    for peaks, free, shared, limit, same in each:
        assert max(peaks) <= limit < free  # each alone fits, both at once do not
        assert shared <= limit  # in turns they do
        assert same


def test_a_run_that_does_not_fit_alone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a step needs .* the limit for all runs is 1.0 MiB"):
        together(tmp_path, 1 << 20, 1)
    with pytest.raises(ConfigError, match="have one folder"):
        train_together([(s, tmp_path, quiet) for s in both()], None)
    lagging = settings_of("cosmoflow", *FIRST, "gradients.lag=1")
    with pytest.raises(ConfigError, match="leave gradients under way"):
        train_together([(lagging, tmp_path / "a", quiet), (both()[1], tmp_path / "b", quiet)], None)


class StopAfter:
    """A display that asks the runs to stop at a step of the first."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "step" and values["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.long
def test_ctrl_c_saves_every_run_and_the_same_folders_go_on(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone")
    first, second = both()
    runs = [(first, tmp_path / "0", StopAfter(3)), (second, tmp_path / "1", quiet)]
    stopped = train_together(runs, 100 << 20, 2)
    assert [one.stopped for one in stopped.results] == [True, True]
    assert [one.steps for one in stopped.results] == [4, 2]
    rest = train_together([(read_settings(f), f, quiet) for _, f, _ in runs], 100 << 20, 2)
    for before, after, (losses, metrics) in zip(stopped.results, rest.results, expected, strict=True):
        assert before.losses + after.losses == losses
        assert after.metrics == metrics


def test_tensors_keep_their_identity_while_their_bytes_are_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 30)).square().sum().backward()
    optimizer.step()
    view, known = model[0].weight[3:5], [each.clone() for each in state_of(model, optimizer)]
    size, file = bytes_in(state_of(model, optimizer)), SpillFile(tmp_path / "x" / "y.bin")
    assert file.spill(state_of(model, optimizer)) == size > 3 * 600 * 4
    assert file.is_out and bytes_in(state_of(model, optimizer)) == 0
    file.restore()
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), known, strict=True))
    assert torch.equal(view, model[0].weight[3:5]) and view.data_ptr() == model[0].weight[3:5].data_ptr()
    file.remove()
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.long
def test_the_command_trains_stops_and_goes_on(tmp_path: Path) -> None:
    """Two workloads on two ranks; SIGTERM in the middle, then the folders again."""
    told = ["-m", "halocline.cli", "train"]
    more = ["--ranks", "2", "--memory", "1GiB", "--turn", "2", "--json", "--quiet"]
    settings = ("steps=60", "batch=2", "data.samples=64", "data.validation=2", "data.arguments={length = 12}")
    small = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, *told, "disruption", "disruption_conv", "--out", str(tmp_path), *more, *small]
    folders = [str(tmp_path / name) for name in ("disruption", "disruption_conv")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log, end = tmp_path / "disruption_conv" / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and '"step"' in log.read_text()):
        assert time.monotonic() < end and running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    first = json.loads(running.communicate(timeout=120)[0].splitlines()[-1])
    assert running.returncode == 75
    assert all(one["stopped"] and 0 < one["steps"] < 60 for one in first["runs"])
    done = subprocess.run([sys.executable, *told, *folders, *more], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [one["steps"] for one in last["runs"]] == [60, 60]
    assert all(len(one["losses"]) == 60 for one in last["runs"])  # the logs have each step once
    assert last["makespan"] >= last["one_after_another"] > 0
