"""Checkpoints from the command line, and damage: any byte that changes, in any file, is found."""

import json
import random
import shutil
from pathlib import Path

import pytest
from checkpoint_run import saved
from typer.testing import CliRunner

from halocline.cli.app import app
from halocline.train.checkpoints import CheckpointError, Checkpoints, Folder
from halocline.train.checkpoints.files import MANIFEST, METADATA, STATE
from halocline.train.checkpoints.inspect import verify_checkpoint


def told(*arguments):
    found = CliRunner().invoke(app, ["checkpoint", *map(str, arguments), "--json"])
    return found.exit_code, (json.loads(found.stdout.splitlines()[-1]) if found.stdout else found.stderr)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saved(tmp_path / "checkpoints", *range(1, 7)).close()
    return tmp_path


def test_checkpoints_are_listed_verified_and_pruned(run: Path) -> None:
    status, listed = told("ls", run)
    assert status == 0 and [each["step"] for each in listed["checkpoints"]] == [*range(1, 7)]
    assert all(each["ranks"] == 1 and not each["verified"] and each["size"] > 0 for each in listed["checkpoints"])
    status, verified = told("verify", run / "checkpoints")
    assert status == 0 and all(each["verified"] and not each["problems"] for each in verified["checkpoints"])
    damaged = run / "checkpoints" / "step-00000006" / STATE
    damaged.write_bytes(damaged.read_bytes()[:-1])
    status, verified = told("verify", run, "--step", 6)
    assert status == 1 and "state.json: damaged, it has" in verified["checkpoints"][0]["problems"][0]
    kept = {"removed": [1, 3, 6], "kept": [2, 4, 5], "dry_run": True}
    assert told("prune", run, "--keep", 2, "--keep-every", 2, "--dry-run") == (0, kept)
    assert len(told("ls", run)[1]["checkpoints"]) == 6
    assert told("prune", run, "--keep", 2, "--keep-every", 2) == (0, {**kept, "dry_run": False})
    assert [each["step"] for each in told("ls", run)[1]["checkpoints"]] == [2, 4, 5]


def test_what_cannot_be_done_is_one_line(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for words in (("ls", run / "nowhere"), ("verify", run, "--step", 99), ("ls", tmp_path_factory.mktemp("empty"))):
        found = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
        assert found.exit_code == 2 and len(found.stderr.strip().splitlines()) == 1
    for folder in (run / "checkpoints").iterdir():
        (folder / MANIFEST).unlink()
    found = CliRunner().invoke(app, ["checkpoint", "prune", str(run)])
    assert found.exit_code == 2 and "no checkpoint is whole, so none is removed" in found.stderr
    assert len(Folder(run / "checkpoints").steps()) == 6


def test_a_run_that_writes_keeps_its_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.train.checkpoints.files._LOCK_PATIENCE", 0.05)
    with Checkpoints(run / "checkpoints", None) as live:
        live.claim()
        found = CliRunner().invoke(app, ["checkpoint", "prune", str(run)])
    assert found.exit_code == 2 and "another run writes" in found.stderr


def test_checkpoints_at_multiples_stay(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, None, keep=1, keep_every=4) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(step, {}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8, 10]


def places(size: int, rng: random.Random) -> list[int]:
    """Some of every class: the first bytes, the last ones, and others at random."""
    return sorted({*range(min(8, size)), *range(max(0, size - 8), size), *(rng.randrange(size) for _ in range(12))})


def test_a_changed_byte_is_found_in_every_class_of_file(tmp_path: Path) -> None:
    """Header and data of the tensors' file, its table, state and manifest: by verify, and before anything is loaded."""
    saved(tmp_path, 3).close()
    folder, rng = Folder(tmp_path), random.Random(0)
    path = folder.path(3)
    files = sorted(file.name for file in path.iterdir())
    assert {METADATA, STATE, MANIFEST, "__0_0.distcp"} == set(files)
    tried = 0
    for name in files:
        whole = (path / name).read_bytes()
        for place in places(len(whole), rng):
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.randrange(8)
            (path / name).write_bytes(changed)
            assert verify_checkpoint(folder, 3).problems, f"{name}, byte {place}"
            tried += 1
        for damaged in (whole[:-1], whole + b"\0", b""):
            (path / name).write_bytes(damaged)
            assert verify_checkpoint(folder, 3).problems
        (path / name).write_bytes(whole)
        assert not verify_checkpoint(folder, 3).problems
        (path / name).rename(tmp_path / "aside")
        assert verify_checkpoint(folder, 3).problems
        (tmp_path / "aside").rename(path / name)
    assert tried > 90


@pytest.mark.filterwarnings("ignore:checkpoint passed over")
def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2).close()
    for name in (METADATA, STATE, MANIFEST, "__0_0.distcp"):
        copy = tmp_path / f"copy of {name}"
        shutil.copytree(tmp_path / "step-00000002", copy / "step-00000002")
        shutil.copytree(tmp_path / "step-00000001", copy / "step-00000001")
        file = copy / "step-00000002" / name
        changed = bytearray(file.read_bytes())
        changed[len(changed) // 2] ^= 4
        file.write_bytes(changed)
        with Checkpoints(copy, None) as checkpoints:
            loaded = checkpoints.load_latest()
            assert loaded is not None and loaded.step == 1 and name in loaded.skipped[0]
            with pytest.raises(CheckpointError, match="damaged"):
                checkpoints.load(2)
