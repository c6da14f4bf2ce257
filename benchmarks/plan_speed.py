"""How long a plan takes to make: the command as users run it, and the search as networks become deeper."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from halocline.errors import HaloclineError
from halocline.plan import candidate, estimate, recording
from halocline.plan import replay as replaying
from halocline.plan.api import make_subject
from halocline.plan.machine import load_machine
from halocline.plan.search import search

from .machine import describe

MACHINE = "perlmutter"
BLOCKS = (10, 100)
TARGETS = {"wall_s": 10.0, "depth_ratio": 2.0, "peak_bytes": 2_000_000_000}


@dataclass(frozen=True)
class PlanSpeedTrial:
    """What is planned: a U-Net at ``size`` cubed on ``gpus`` devices."""

    size: int = 256
    gpus: int = 1024


class ResidualNet(nn.Module):
    """Equal blocks of two convolutions, one after another."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv3d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(width, width, 3, padding=1),
                nn.BatchNorm3d(width),
                nn.ReLU(),
                nn.Conv3d(width, width, 3, padding=1),
            )
            for _ in range(blocks)
        )
        self.leave = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.leave(x)


def measure_plan_speed(trial: PlanSpeedTrial, tell: Callable[[str], None]) -> dict[str, Any]:
    """Everything in seconds; "search_s" is processor time without recording and replaying steps."""
    tell(f"planning unet3d at {trial.size} cubed for {trial.gpus} devices")
    command = time_command(trial)
    search_seconds(ResidualNet, 1, trial)  # what torch sets up once
    depths = {}
    for blocks in BLOCKS:
        tell(f"searching for {blocks} residual blocks")
        depths[str(blocks)] = search_seconds(ResidualNet, blocks, trial)
    few, many = (depths[str(blocks)]["search_s"] for blocks in BLOCKS)
    return {**command, "depth": depths, "depth_ratio": many / few, "targets": TARGETS, "machine": describe(None)}


def time_command(trial: PlanSpeedTrial) -> dict[str, Any]:
    """The command on one core, with the interpreter's start."""
    shape = ",".join(map(str, (1, 1, *[trial.size] * 3)))
    words = ["plan", "unet3d", "--shape", shape, "--machine", MACHINE, "--gpus", str(trial.gpus), "--json"]
    core = min(os.sched_getaffinity(0))
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-c", "from halocline.cli import main; main()", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(child.pid, {core})
    said = child.stderr.read() if child.stderr else b""
    _, status, used = os.wait4(child.pid, 0)
    wall = time.monotonic() - start
    if status:
        raise HaloclineError(f"halocline {' '.join(words)} ended with status {status}: {said.decode()[-500:]}")
    return {"wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}


def search_seconds(network: Callable[[int], nn.Module], blocks: int, trial: PlanSpeedTrial) -> dict[str, float]:
    """Processor time of one search: of the search itself, of recording steps, and of replaying them."""
    spent = {"recording_s": 0.0, "replay_s": 0.0}
    calls = dict.fromkeys(spent, 0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **named)
            finally:
                spent[name] += time.process_time() - begun
                calls[name] += 1

        return call

    record, replay = timed("recording_s", recording.record_step), timed("replay_s", replaying.replay)
    subject = make_subject(lambda: network(blocks), [(1, 1, *[trial.size] * 3)])
    with (
        mock.patch.object(candidate, "record_step", record),
        mock.patch.object(estimate, "record_step", record),
        mock.patch.object(candidate, "replay", replay),
    ):
        begun = time.process_time()
        search(subject, load_machine(MACHINE), trial.gpus)
        whole = time.process_time() - begun
    return {"search_s": whole - sum(spent.values()), **spent, "recorded_steps": calls["recording_s"]}
