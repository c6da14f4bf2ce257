"""Checkpoints behind a URL of fsspec: copied in the background, brought back, verified, listed and pruned there."""

import json
import shutil
import uuid

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from halocline.cli.app import app
from halocline.errors import ConfigError
from halocline.testing import shared_pool
from halocline.train.checkpoints import CheckpointError, Checkpoints
from halocline.train.checkpoints.cloud import CloudFolder, is_url
from halocline.train.config import make_settings
from halocline.train.log import read_log
from halocline.train.trainer import Trainer


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"


def tensors(step):
    return {"w": torch.arange(5.0) * step, "b": torch.tensor(step)}


def write(folder, url, steps, keep=3, every=0):
    with Checkpoints(folder, None, keep, keep_every=every, cloud=url) as checkpoints:
        for step in steps:
            checkpoints.save(step, tensors(step), {"step": step})


def files_of(url):
    return fsspec.core.url_to_fs(url)


def damage(url, step, name="manifest.json"):
    files, root = files_of(url)
    path = f"{root}/step-{step:08d}/{name}"
    data = bytearray(files.cat_file(path))
    data[len(data) // 2] ^= 1
    files.pipe_file(path, bytes(data))


def newest(folder, url):
    with Checkpoints(folder, None, cloud=url) as checkpoints:
        return checkpoints.load_latest(tensors(1))


def test_another_machine_goes_on_from_the_copy(tmp_path, url):
    write(tmp_path / "a", url, (2, 4))
    found = newest(tmp_path / "b", url)
    assert found.step == 4 and found.state == {"step": 4} and torch.equal(found.tensors["w"], tensors(4)["w"])
    write(tmp_path / "b", url, (6,))
    assert CloudFolder(url).steps() == [2, 4, 6]
    assert newest(tmp_path / "a", url).step == 6


def test_as_many_stay_there_as_here(tmp_path, url):
    write(tmp_path / "a", url, range(1, 8), keep=2, every=3)
    assert CloudFolder(url).steps() == [3, 6, 7] == Checkpoints(tmp_path / "a", None).steps()


@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_copy_is_passed_over(tmp_path, url, name):
    write(tmp_path / "a", url, (2, 4))
    damage(url, 4, name)
    with pytest.warns(RuntimeWarning, match="passed over.*damaged"):
        assert newest(tmp_path / "b", url).step == 2
    found = CliRunner().invoke(app, ["checkpoint", "verify", url, "--json"])
    told = {each["step"]: each["problems"] for each in json.loads(found.stdout)["checkpoints"]}
    assert found.exit_code == 1 and not told[2] and "damaged" in told[4][0] and name in told[4][0]


def test_a_copy_without_its_manifest_is_none(tmp_path, url):
    write(tmp_path / "a", url, (2, 4))
    files, root = files_of(url)
    files.rm_file(f"{root}/step-00000004/manifest.json")
    assert newest(tmp_path / "b", url).step == 2
    files.rm_file(f"{root}/step-00000002/state.json")
    with pytest.warns(RuntimeWarning, match=r"state\.json: No such file"):
        assert newest(tmp_path / "c", url) is None


def test_commands_list_and_prune_there(tmp_path, url):
    write(tmp_path / "a", url, range(1, 6), keep=9)
    runner = CliRunner()
    listed = json.loads(runner.invoke(app, ["checkpoint", "ls", url, "--json"]).stdout)
    assert [each["step"] for each in listed["checkpoints"]] == [1, 2, 3, 4, 5] and listed["folder"] == url
    local = json.loads(runner.invoke(app, ["checkpoint", "ls", str(tmp_path / "a"), "--json"]).stdout)
    for there, here in zip(listed["checkpoints"], local["checkpoints"], strict=True):
        assert {k: there[k] for k in ("size", "files", "ranks")} == {k: here[k] for k in ("size", "files", "ranks")}
    gone = json.loads(runner.invoke(app, ["checkpoint", "prune", url, "--keep", "2", "--dry-run", "--json"]).stdout)
    assert gone["removed"] == [1, 2, 3] and CloudFolder(url).steps() == [1, 2, 3, 4, 5]
    assert runner.invoke(app, ["checkpoint", "prune", url, "--keep", "2"]).exit_code == 0
    assert CloudFolder(url).steps() == [4, 5]
    empty = runner.invoke(app, ["checkpoint", "verify", url + "/none"])
    assert empty.exit_code == 2 and "has no checkpoint" in " ".join(empty.output.split())


def test_a_place_that_does_not_take_it_fails_the_save(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    url = f"memory://{uuid.uuid4().hex}"
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", full)
    checkpoints = Checkpoints(tmp_path / "a", None, cloud=url)
    with pytest.raises(CheckpointError, match=f"{url}: step 2 was not copied there: No space left.*make room"):
        checkpoints.save(2, tensors(2), {}, wait=True)
    checkpoints.close()
    assert CloudFolder(url).steps() == []


def test_an_unknown_scheme_is_one_line():
    assert is_url("s3://a") and not is_url("runs/a")
    with pytest.raises(ConfigError, match="nowhere://x cannot be reached"):
        CloudFolder("nowhere://x")


def trained(folder, url, steps, start):
    settings = {"workload": "unet3d", "network": {"width": 2}, "data": {"arguments": {"size": 16}, "samples": 4}}
    more = {"steps": steps, "checkpoint_every": 2, "cloud": url, "deadline": 30, "mesh": {"N": 2}, "batch": 2}
    more |= {"gradients": {"deterministic": True}}
    trainer = Trainer(make_settings({**settings, **more}), folder)
    trainer.train()
    return [entry["loss"] for entry in read_log(folder, "step")][start:]


@pytest.mark.long
def test_a_run_on_two_ranks_goes_on_elsewhere_to_the_same_bits(tmp_path):
    url, pool = f"file://{tmp_path}/bucket", shared_pool(2)
    whole = pool.run(trained, tmp_path / "whole", f"{url}/whole", 6, 4, deadline=60.0)[0]
    pool.run(trained, tmp_path / "first", f"{url}/run", 4, 0, deadline=60.0)
    shutil.rmtree(tmp_path / "first")
    assert pool.run(trained, tmp_path / "second", f"{url}/run", 6, 0, deadline=60.0)[0] == whole
