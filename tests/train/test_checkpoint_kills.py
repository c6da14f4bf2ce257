"""Runs killed while they save always resume, never behind what was complete; damage and harm are found."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_run import bits, saved, weights

from halocline.train.checkpoints import CheckpointError, Checkpoints
from halocline.train.checkpoints.files import Folder, _manifest, facts, read_manifest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "support" / "checkpoint_run.py"
KILLS = 20
OPERATIONS = 54  # on files, in two saves of a step
FILES = (".metadata", "__0_0.distcp", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def runs() -> Iterator[subprocess.Popen[str]]:
    """Starts a run for each line of its input."""
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert words(process) == ("ready", 0)
    yield process
    process.kill()
    process.communicate()


def words(process: subprocess.Popen[str]) -> tuple[str, int]:
    line = process.stdout.readline().split()
    assert line, "the script has ended; its own output says why"
    return line[0], int(line[1]) if len(line) > 1 else 0


def begin(process: subprocess.Popen[str], folder: Path, kill_at: int = 0) -> int:
    """Start a run; its process, once it is about to resume."""
    process.stdin.write(f"{kill_at} {folder}\n")
    process.stdin.flush()
    kind, child = words(process)
    assert kind == "started"
    return child


def heard(process: subprocess.Popen[str]) -> dict[str, int]:
    """All that a killed run had said: where it resumed, the last step that was complete."""
    said: dict[str, int] = {}
    while "ended" not in said:
        kind, number = words(process)
        said[kind] = number
    return said


def test_a_run_killed_anywhere_resumes_from_its_last_complete_checkpoint(
    runs: subprocess.Popen[str], tmp_path: Path
) -> None:
    delays, complete, resumed = random.Random(0), 0, 0
    for _ in range(KILLS):
        child = begin(runs, tmp_path)
        time.sleep(delays.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        said = heard(runs)
        assert said["ended"] == -signal.SIGKILL, "it failed by itself; its own output says why"
        if "resumed" in said:
            resumed += 1
            assert said["resumed"] >= complete
        complete = max(complete, said.get("complete", 0), said.get("resumed", 0))
    assert resumed > KILLS // 2 and complete > KILLS // 2, "killed too early to show anything"
    leave_nothing_half(tmp_path)


def test_a_run_killed_before_any_operation_on_a_file_resumes(runs: subprocess.Popen[str], tmp_path: Path) -> None:
    complete = 0
    for operation in range(1, OPERATIONS):
        begin(runs, tmp_path, operation)
        said = heard(runs)
        assert said["ended"] == -signal.SIGKILL, "it failed by itself; its own output says why"
        assert said["resumed"] >= complete
        complete = max(said["resumed"], said.get("complete", 0))
    assert complete > 0
    leave_nothing_half(tmp_path)


def leave_nothing_half(root: Path) -> None:
    """Also, a new start finds nothing to warn of, and removes what the kills left."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Folder(root).tidy()
    assert 1 <= len(Folder(root).steps()) <= 3  # the kill may have come between a new one and the removal of the oldest
    assert all(entry.name.startswith("step-") for entry in root.iterdir())


# ---- damage ----


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_one_before_used(tmp_path: Path, name: str, harm: Any) -> None:
    saved(tmp_path, 1, 2, 3).close()
    harm(tmp_path / "step-00000003" / name)
    checkpoints = Checkpoints(tmp_path, None, keep=2)
    with pytest.warns(RuntimeWarning, match=f"passed over: .*step-00000003, {name.replace('.', '[.]')}: "):
        loaded = checkpoints.load_latest(weights(2))
    assert loaded is not None and loaded.step == 2 and len(loaded.skipped) == 1
    assert bits(loaded.tensors) == bits(weights(2))
    with pytest.raises(CheckpointError, match=name):
        checkpoints.load(3)
    checkpoints.save(3, weights(3), {}, wait=True)  # takes the place of the damaged one
    assert checkpoints.steps() == [2, 3] and checkpoints.load(3).step == 3
    checkpoints.close()


def test_damaged_ones_do_not_count_among_those_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3).close()
    flip(tmp_path / "step-00000003" / "state.json")
    flip(tmp_path / "step-00000002" / "state.json")
    with Checkpoints(tmp_path, None, keep=2) as checkpoints:
        with pytest.warns(RuntimeWarning, match="passed over"):
            checkpoints.load_latest()
        checkpoints.save(4, weights(4), {}, wait=True)
        assert checkpoints.steps() == [1, 4]


def test_none_good_is_an_error_that_names_each(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2).close()
    flip(tmp_path / "step-00000001" / "__0_0.distcp")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with (
        Checkpoints(tmp_path, None) as checkpoints,
        pytest.warns(RuntimeWarning, match="passed over"),
        pytest.raises(
            CheckpointError, match=r"(?s)among 2:.*02, manifest.json: No such file.*01, __0_0.distcp: damaged"
        ),
    ):
        checkpoints.load_latest()


def vouch(folder: Path) -> None:
    """The manifest as one who means harm would make it."""
    content = read_manifest(folder, 1)
    content["files"] = {name: facts(folder / name) for name in content["files"]}
    (folder / "manifest.json").write_bytes(_manifest(content))


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", 1).close()
    folder = tmp_path / "run" / "step-00000001"
    good = (folder / ".metadata").read_bytes()
    for harmful in (pickle.dumps(Harm(tmp_path / "harm")), pickle.dumps(eval), good[:-1], pickle.dumps(torch.float32)):
        (folder / ".metadata").write_bytes(harmful)
        vouch(folder)
        with pytest.raises(CheckpointError, match=r"[.]metadata: it (asks for|cannot be read|is a dtype)"):
            Checkpoints(tmp_path / "run", None).load(1)
    assert not (tmp_path / "harm").exists()


def test_metadata_that_points_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1).close()
    folder = tmp_path / "step-00000001"
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
    vouch(folder)
    with pytest.raises(CheckpointError, match="no file of this checkpoint"):
        Checkpoints(tmp_path, None).load(1)
