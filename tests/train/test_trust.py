"""Folders of runs that came from elsewhere: nothing that they name is executed unless the user says so."""

import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

from halocline.cli.app import app
from halocline.data import HDF5
from halocline.errors import ConfigError, DataError
from halocline.train.config import make_settings, read_settings
from halocline.train.imports import named
from halocline.train.task import model_maker
from halocline.train.trainer import Trainer
from halocline.train.trust import check_trusted, code_of

CODE = """
from pathlib import Path
from torch import nn
Path("imported").touch()

def make():
    return nn.Conv2d(1, 2, 3, padding=1)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a network of the user's own, which leaves a file when it is imported."""
    place = tmp_path_factory.mktemp("trust")
    (place / "trust_net.py").write_text(CODE)
    with h5py.File(place / "maps.h5", "w") as file:
        file["x"], file["y"] = np.zeros((3, 1, 4, 4), "f4"), np.zeros((3, 4, 4), "i4")
    told = {"model": "trust_net:make", "loss": "torch.nn:CrossEntropyLoss", "steps": 1}
    settings = make_settings({**told, "data": {"path": "maps.h5", "validation": 0}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        patch.syspath_prepend(str(place))
        patch.chdir(place)
        Trainer(settings, place / "run").train()
    sys.modules.pop("trust_net", None)
    return place


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of that run, with the same user's secret."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "run"
    sys.modules.pop("trust_net", None)


def predict(run: Path, *more: str) -> tuple[int, str]:
    for name in ("trust_net", *(each for each in sys.modules if each.startswith("trust_net."))):
        sys.modules.pop(name, None)
    (run.parent / "imported").unlink(missing_ok=True)
    shutil.rmtree(run.parent / "p.zarr", ignore_errors=True)
    (run.parent / "p.h5").unlink(missing_ok=True)
    found = CliRunner().invoke(app, ["predict", str(run), "maps.h5", "p.h5", "--dataset", "x", *more])
    return found.exit_code, found.stderr


def test_a_run_of_ones_own_is_used_and_a_foreign_one_needs_trust(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert predict(run)[0] == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another user"))
    status, said = predict(run)
    assert status == 2 and "--trust" in said and "trust_net:make" in said and len(said.strip().splitlines()) == 1
    assert not (run.parent / "imported").exists()  # not even imported
    assert predict(run, "--trust")[0] == 0
    assert (run.parent / "imported").exists()
    assert predict(run)[0] == 0  # marked by the user who trusted it


def test_a_changed_run_is_a_foreign_one(run: Path) -> None:
    config, code = run / "config.toml", run / "code" / "trust_net.py"
    for file, text in (
        (config, config.read_text().replace("trust_net:make", "os:system")),
        (config, config.read_text().replace("callbacks = []", 'callbacks = ["trust_net:make"]')),
        (code, code.read_text() + "\nprint('more')\n"),
    ):
        before = file.read_text()
        assert text != before
        file.write_text(text)
        status, said = predict(run)
        assert status == 2 and "--trust" in said and not (run.parent / "imported").exists()
        found = CliRunner().invoke(app, ["train", str(run), "--set", "steps=2"])
        assert found.exit_code == 2 and "--trust" in found.stderr and not (run.parent / "imported").exists()
        file.write_text(before)
    (run / "code" / "evil.py").write_text("")
    assert predict(run)[0] == 2
    (run / "code" / "evil.py").unlink()
    assert predict(run)[0] == 0


def test_what_is_no_network_is_not_called_even_if_trusted(run: Path) -> None:
    config = run / "config.toml"
    before = config.read_text()
    for target in ("os:system", "subprocess:run", "subprocess:Popen", "builtins:exec", "pathlib:Path"):
        arguments = f'\n[network]\ncommand = "touch {run}/harm"\n'
        config.write_text(before.replace("trust_net:make", target).replace("\n[network]\n", arguments))
        status, said = predict(run, "--trust")
        assert status == 2 and "is not called" in said and not (run / "harm").exists(), (target, said)


def test_a_run_without_code_of_its_own_needs_no_trust(tmp_path: Path) -> None:
    settings = make_settings({"workload": "unet3d"})
    assert code_of(settings) == []
    check_trusted(tmp_path, settings, trust=False)
    plain = make_settings({"model": "torch.nn:Conv3d", "loss": "torch.nn:MSELoss", "data": {"path": "a.h5"}})
    assert code_of(plain) == []
    for model in ("torch.hub:load", "torch:load", "torch.utils.cpp_extension:load"):
        foreign = make_settings({"model": model, "loss": "torch.nn:MSELoss", "data": {"path": "a.h5"}})
        with pytest.raises(ConfigError, match="--trust"):
            check_trusted(tmp_path, foreign, trust=False)


def test_a_class_that_is_no_module_is_refused_before_it_is_made() -> None:
    settings = make_settings({"model": "collections:Counter", "loss": "torch.nn:MSELoss", "data": {"path": "a.h5"}})
    with pytest.raises(ConfigError, match="not called"):
        model_maker(settings)
    assert named("model", "torch.nn:Conv3d") is nn.Conv3d


# ---- data ----


def test_links_and_virtual_datasets_stay_in_their_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "private"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        with h5py.File(folder / "numbers.h5", "w") as file:
            file["v"] = np.arange(24.0).reshape(2, 3, 4)
    with h5py.File(inside / "links.h5", "w") as file:
        file["beside"] = h5py.ExternalLink("numbers.h5", "/v")
        file["outside"] = h5py.ExternalLink(str(outside / "numbers.h5"), "/v")
        file["upwards"] = h5py.ExternalLink("../private/numbers.h5", "/v")
        file["group/soft"] = h5py.SoftLink("/outside")
        file["round"] = h5py.SoftLink("/again")
        file["again"] = h5py.SoftLink("/round")
        file["folder"] = h5py.ExternalLink("../private/numbers.h5", "/")
        for name, source in (("virtual", "numbers.h5"), ("far", str(outside / "numbers.h5"))):
            layout = h5py.VirtualLayout((2, 3, 4), "f8")
            layout[...] = h5py.VirtualSource(source, "v", (2, 3, 4))
            file.create_virtual_dataset(name, layout)
    for good in ("beside", "virtual"):
        assert len(HDF5(inside / "links.h5", good, "NHW")) == 2
    for bad in ("outside", "upwards", "group/soft", "far", "folder/v"):
        with pytest.raises(DataError, match="outside the folder of its file"):
            HDF5(inside / "links.h5", bad, "NHW")
        assert len(HDF5(inside / "links.h5", bad, "NHW", outside=True)) == 2
    with pytest.raises(DataError):
        HDF5(inside / "links.h5", "round", "NHW")


def test_settings_of_a_foreign_version_are_read(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(f"something_new = 3\n{config.read_text()}")
    assert read_settings(run).model == "trust_net:make"
