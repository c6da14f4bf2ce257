"""A rank that is lost for good: the run goes on with fewer, from the newest checkpoint, to the same curve."""

import json
import signal
from typing import ClassVar

import pytest

from halocline.cli import attempts
from halocline.train.config import make_settings, read_settings
from halocline.train.elastic import RankCount
from halocline.train.launch import Ending, LaunchError


class Ranks:
    """Ranks that fail while there are more than two of them."""

    made: ClassVar[list[int]] = []

    def __init__(self, command, ranks, folder, deadline, lock, template):
        self.ranks, self.folder = ranks, folder
        Ranks.made.append(ranks)

    def wait(self, look):
        if self.ranks > 2:
            return Ending(self.ranks - 1, -signal.SIGKILL, "killed by SIGKILL")
        (self.folder / "result.json").write_text(json.dumps({"stopped": False, "steps": 3, "preempted": False}))
        return None

    def signal(self, number):
        pass


@pytest.mark.parametrize(("least", "made"), [(None, [4] * 6), (3, [4, 4, 3, 3, 3, 3]), (1, [4, 4, 3, 2])])
def test_ranks_become_fewer_only_as_far_as_allowed(monkeypatch, tmp_path, least, made):
    monkeypatch.setattr(attempts, "LocalRanks", Ranks)
    Ranks.made = []
    settings = make_settings({"workload": "unet3d", "mesh": {"D": 4}})
    if least == 1:
        result = attempts.on_this_machine(settings, tmp_path, RankCount(4, least), 5)
        assert result["restarts"] == 3 and read_settings(tmp_path).mesh == {}
    else:
        with pytest.raises(LaunchError, match="killed by SIGKILL"):
            attempts.on_this_machine(settings, tmp_path, RankCount(4, least or 4), 5)
    assert Ranks.made == made


CODE = """
import os, signal

class Lost:
    def on_step(self, trainer, step, loss):
        if step == 4 and trainer.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_run_that_loses_a_rank_for_good_follows_one_rank(tmp_path):
    """Two ranks, of which the second dies whenever it gets to step 4; then one."""
    import os
    import subprocess
    import sys

    from halocline.train.log import read_log

    (tmp_path / "lost_rank.py").write_text(CODE)
    sets = (
        "network.width=2", "data.arguments.size=16", "data.samples=6", "data.validation=0", "checkpoint_every=2",
        "steps=8", "precision=fp64", "batch=2", "deadline=30",
    )  # fmt: skip
    base = [sys.executable, "-m", "halocline.cli", "train", "unet3d", "--json"]
    told = [word for each in sets for word in ("--set", each)]
    lost = ["--out", "lost", "--ranks", "2", "--restarts", "3", "--least-ranks", "1", "--set", "mesh.N=2"]
    lost += ["--set", 'callbacks=["lost_rank:Lost"]']
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for more in (lost, ["--out", "whole"]):
        done = subprocess.run([*base, *told, *more], cwd=tmp_path, env=environment, capture_output=True, timeout=170)
        assert done.returncode == 0, done.stderr.decode()
    assert json.loads((tmp_path / "lost" / "result.json").read_text())["steps"] == 8
    one, other = ([entry["loss"] for entry in read_log(tmp_path / name, "step")] for name in ("lost", "whole"))
    assert len(one) == 8 and max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-8
