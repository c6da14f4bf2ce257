"""Data of the user's own in a run: NIfTI volumes, added channels, labels, the split, pairs; predictions elsewhere."""

import os
import shutil
import signal
import sys
import types

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import halocline as hc
from halocline.cli import attempts
from halocline.cli.app import app
from halocline.cli.predict_rank import answer
from halocline.data import open_store
from halocline.data.stores.derived import Labels, OneChannel
from halocline.errors import DataError
from halocline.testing import shared_pool
from halocline.train.config import make_settings
from halocline.train.elastic import RankCount
from halocline.train.log import read_log
from halocline.train.own import own_data
from halocline.train.predict import predict
from halocline.train.settings import ConfigError, DataSettings, FieldSettings
from halocline.train.trainer import Trainer

nibabel = pytest.importorskip("nibabel")
SHAPE = (6, 8, 10)  # as nibabel shows it: W, H, D
AFFINE = np.array([[-1.5, 0, 0, 10], [0, 0.7, 0.1, -20], [0, -0.1, 3, 5], [0, 0, 0, 1]])
NETWORK = """
from torch import nn
from nifti_helper import CLASSES

def make():
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, CLASSES, 1))
"""


def volumes(folder, count=5):
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir()
    for number in range(count):
        label = rng.integers(0, 3, SHAPE).astype(np.uint8)
        image = (100 * label + rng.normal(0, 5, SHAPE)).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(image, AFFINE), folder / "images" / f"case_{number}_ct.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, AFFINE), folder / "labels" / f"case_{number}.nii.gz")
    (folder / "images" / "._case_0_ct.nii.gz").write_bytes(b"left by an archiver")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = volumes(tmp_path_factory.mktemp("nifti"))
    (folder / "nifti_network.py").write_text(NETWORK)
    (folder / "nifti_helper.py").write_text("CLASSES = 3\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def settings_of(place, *changes):
    told = {"model": "nifti_network:make", "loss": "torch.nn.functional:cross_entropy", "steps": 2}
    told["data"] = {"x": str(place / "images"), "y": str(place / "labels")}
    return make_settings(told, ["precision=fp64", *changes])


def train(place, folder, *changes):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    torch.set_num_threads(1)
    return Trainer(settings_of(place, *changes), folder).train()


def predicted(run, source, out, **options):
    return predict(run, source, out, **options)


@pytest.mark.long
def test_volumes_are_trained_on_and_predicted_in_another_folder(place, tmp_path, monkeypatch):
    """Neither the training data nor the user's module is there; other sizes, and the affine is kept."""
    one = train(place, tmp_path / "run")
    two = shared_pool(2).run(train, place, tmp_path / "cut", deadline=60)
    for each in two:
        assert np.allclose(each.losses, one.losses, rtol=1e-10)
        assert each.metrics.keys() == one.metrics.keys() >= {"dice", "dice/0", "dice/2", "iou/1", "accuracy/1"}
        assert all(np.isclose(each.metrics[name], one.metrics[name], rtol=1e-12) for name in one.metrics)
    assert sorted(path.name for path in (tmp_path / "run" / "code").iterdir()) == [
        "nifti_helper.py",
        "nifti_network.py",
    ]
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "scans").mkdir(parents=True)
    shutil.move(tmp_path / "run", elsewhere / "run")
    rng = np.random.default_rng(1)
    for name, shape in (("a", SHAPE), ("b", (5, 4, 12))):
        image = nibabel.Nifti1Image(rng.integers(0, 300, shape).astype(np.int16), AFFINE * (2 if name == "b" else 1))
        nibabel.save(image, elsewhere / "scans" / f"{name}.nii")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(place)])
    for module in ("nifti_network", "nifti_helper"):
        monkeypatch.delitem(sys.modules, module)
    predicted(elsewhere / "run", "scans", elsewhere / "scores")
    where = (elsewhere / "run", str(elsewhere / "scans"), elsewhere / "classes")
    shared_pool(2).run(predicted, *where, classes=True, deadline=60)
    for name, shape in (("a", SHAPE), ("b", (5, 4, 12))):
        source = nibabel.load(elsewhere / "scans" / f"{name}.nii")
        scores, classes = (nibabel.load(elsewhere / kind / f"{name}.nii.gz") for kind in ("scores", "classes"))
        assert scores.shape == (*shape, 3) and classes.shape == shape and classes.get_data_dtype() == np.uint8
        assert np.array_equal(scores.affine, source.affine) and np.array_equal(classes.affine, source.affine)
        assert np.array_equal(scores.get_fdata().argmax(-1), classes.get_fdata())
    assert not list(elsewhere.glob(".*"))


def test_a_prediction_that_cannot_be_written_leaves_nothing(place, tmp_path, monkeypatch):
    import halocline.train.answers as answers

    train(place, tmp_path / "run")

    def full(self, place, tile):
        raise OSError(28, "No space left on device")

    for kind, out in ((answers.ArrayFile, "out.h5"), (answers.NiftiFiles, "out")):
        monkeypatch.setattr(kind, "put", full)
        with pytest.raises(OSError, match="No space left"):
            predict(tmp_path / "run", str(place / "images"), tmp_path / out)
    monkeypatch.setattr(answers.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=4096))
    for out in ("out.h5", "out.zarr", "out"):
        with pytest.raises(DataError, match=r"out.* needs [\d.]+ KiB, and its disk has 4\.0 KiB free"):
            predict(tmp_path / "run", str(place / "images"), tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_prediction_that_is_terminated_leaves_nothing(place, tmp_path, monkeypatch):
    from halocline.train.answers import ArrayFile

    train(place, tmp_path / "run")
    monkeypatch.setattr(ArrayFile, "put", lambda self, place, tile: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        request = {"run": tmp_path / "run", "source": str(place / "images"), "out": tmp_path / "out.h5"}
        with pytest.raises(SystemExit, match="143"):
            answer(request)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_predict_refuses_ranks_of_its_own_under_a_launcher(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    ran = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "in.h5", str(tmp_path / "out.h5"), "--ranks", "2"])
    assert ran.exit_code == 2 and "--ranks is for ranks that this command starts" in ran.stderr


def test_what_is_missing_for_a_prediction_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is not the folder of a run.*give one of `halocline train`"):
        predict(tmp_path / "nowhere", "in.h5", tmp_path / "out.h5")
    with pytest.raises(DataError, match=r"in\.h5: no such file or folder in /"):
        open_store(tmp_path / "in.h5")


def test_npy_files_are_predicted_into_npy_files(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    (tmp_path / "npy_network.py").write_text("from torch import nn\nNet = lambda: nn.Conv3d(1, 2, 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for folder, shape in (("cubes", (2, 3, 5)), ("fields", (2, 2, 3, 5))):
        (tmp_path / folder).mkdir()
        for number in range(3):
            np.save(tmp_path / folder / f"case{number}.npy", rng.normal(size=shape))
    told = {"model": "npy_network:Net", "loss": "torch.nn.functional:mse_loss", "steps": 1, "precision": "fp64"}
    fields = {"x": {"path": str(tmp_path / "cubes"), "dims": "DHW"}, "y": {"path": str(tmp_path / "fields")}}
    fields["y"]["dims"] = "CDHW"
    Trainer(make_settings({**told, "data": fields}), tmp_path / "run").train()
    source = str(tmp_path / "cubes")
    predict(tmp_path / "run", source, tmp_path / "scores")
    shared_pool(2).run(predicted, tmp_path / "run", source, tmp_path / "classes", classes=True, deadline=60)
    predict(tmp_path / "run", source, tmp_path / "all.h5")
    with h5py.File(tmp_path / "all.h5") as file:
        expected = file["p"][:]
    for number in range(3):
        scores, classes = (np.load(tmp_path / kind / f"case{number}.npy") for kind in ("scores", "classes"))
        assert scores.shape == (2, 2, 3, 5) and np.array_equal(scores, expected[number])
        assert classes.dtype == np.uint8 and np.array_equal(classes, scores.argmax(0))
    assert not list(tmp_path.glob(".*"))


def test_dims_that_are_missing_are_suggested_for_the_files_that_there_are(tmp_path):
    for folder, shape in (("cubes", (2, 3, 5)), ("fields", (2, 2, 3, 5))):
        (tmp_path / folder).mkdir()
        for number in range(3):
            np.save(tmp_path / folder / f"case{number}.npy", np.zeros(shape))
    x = FieldSettings(path=str(tmp_path / "cubes"), dims="DHW")
    with pytest.raises(ConfigError, match=r"case0\.npy does not name the dims of its array .*data\.y\.dims = 'CDHW'"):
        own_data(DataSettings(x=x, y=FieldSettings(path=str(tmp_path / "fields"))), torch.float64)
    y = FieldSettings(path=str(tmp_path / "fields"), dims="NDHW")
    with pytest.raises(ConfigError, match=r"y has 6 .*; or is N in data\.y\.dims = 'NDHW' another dim, such as C\?"):
        own_data(DataSettings(x=x, y=y), torch.float64)
    shown = CliRunner().invoke(app, ["data", "info", str(tmp_path / "fields")])
    assert "such as --dims CDHW." in " ".join(shown.stdout.split())
    with pytest.raises(DataError, match=r"cubs: no such file or folder in .* \(did you mean cubes\?\)"):
        open_store(tmp_path / "cubs")


def test_mistakes_in_paths_and_meshes_are_found_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "LocalRanks", None)
    (tmp_path / "cubes").mkdir()
    np.save(tmp_path / "cubes" / "a.npy", np.zeros((2, 2)))
    told = {"model": "a:b", "loss": "a:c", "data": {"x": str(tmp_path / "cubs"), "y": str(tmp_path / "cubes")}}
    with pytest.raises(ConfigError, match=r"^data\.x: .*cubs: no such file .* \(did you mean cubes\?\)"):
        attempts.on_this_machine(make_settings(told), tmp_path / "run", RankCount(2, 2), 0)
    for mesh, parts in ({"D": 3}, 1), ({"D": 2}, 2), ({}, 4):
        settings = make_settings({"workload": "vit3d", "mesh": mesh, "model_parts": parts})
        with pytest.raises(ConfigError, match=r"ranks, and there are 2; give sizes that multiply to that"):
            attempts.on_this_machine(settings, tmp_path / "run", RankCount(2, 2), 0)
    assert not (tmp_path / "run").exists()


def test_the_file_of_the_training_is_predicted_without_options(tmp_path, monkeypatch):
    (tmp_path / "plain_network.py").write_text("from torch import nn\nNet = lambda: nn.Conv3d(1, 2, 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with h5py.File(tmp_path / "both.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 1, 4, 4, 4), "f4"), np.zeros((4, 4, 4, 4), "u1")
    told = {"model": "plain_network:Net", "loss": "torch.nn:CrossEntropyLoss", "data": str(tmp_path / "both.h5")}
    Trainer(make_settings({**told, "steps": 1}), tmp_path / "run").train()
    found = predict(tmp_path / "run", tmp_path / "both.h5", tmp_path / "out.h5", classes=True)
    assert found["samples"] == 4 and found["shape"] == [4, 4, 4]
    (words,) = (entry["text"] for entry in read_log(tmp_path / "run", "data"))
    assert "4 samples: the first 3 for training, the last one (index 3) for validation (data.validation = 0.1)" in words


@pytest.mark.parametrize(
    ("told", "samples", "kept"), [(0.1, 24, 2), (0.1, 3, 1), (0.5, 4, 2), (0, 9, 0), (3, 9, 3), (0.9, 2, 1)]
)
def test_a_stated_share_or_number_is_held_out(told, samples, kept):
    assert DataSettings(validation=told).held_out(samples) == kept


def test_channels_and_labels_are_as_the_settings_say(place, tmp_path):
    def fields(x=FieldSettings(), y=FieldSettings()):  # noqa: B008
        x, y = (
            FieldSettings(**{**vars(each), "path": str(place / name)}) for each, name in ((x, "images"), (y, "labels"))
        )
        return own_data(DataSettings(x=x, y=y), torch.float32).training

    found = fields()
    assert found["x"].dims == "CDHW" and found["x"].tensor_dtype == torch.float32
    assert found["y"].dims == "DHW" and found["y"].tensor_dtype == torch.int64
    assert fields(y=FieldSettings(channel=True))["y"].store.shape == (1, *SHAPE[::-1])
    assert fields(x=FieldSettings(channel=False))["x"].dims == "DHW"
    assert fields(y=FieldSettings(classes=False))["y"].tensor_dtype == torch.float32
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 5, 6, 2), "f4"), AFFINE), tmp_path / "two.nii")
    assert open_store(tmp_path / "two.nii").shape == (2, 6, 5, 4)


def test_images_and_labels_that_do_not_belong_together_are_refused(place, tmp_path):
    shutil.copytree(place / "labels", tmp_path / "labels")
    (tmp_path / "labels" / "case_1.nii.gz").rename(tmp_path / "labels" / "case_7.nii.gz")
    with pytest.raises(
        ConfigError, match=r"sample 1 has x case_1_ct\.nii\.gz and y case_2\.nii\.gz, which do not belong"
    ):
        own_data(settings_of(place, f"data.y={tmp_path / 'labels'}").data, torch.float32)
    (tmp_path / "labels" / "case_7.nii.gz").unlink()
    with pytest.raises(ConfigError, match=r"x has 5 samples .* and y has 4"):
        own_data(settings_of(place, f"data.y={tmp_path / 'labels'}").data, torch.float32)
    nibabel.save(nibabel.Nifti1Image(np.zeros((6, 8, 11), "u1"), AFFINE), tmp_path / "odd.nii")
    nibabel.save(nibabel.Nifti1Image(np.zeros(SHAPE, "i2"), AFFINE), tmp_path / "image.nii")
    odd = settings_of(place, f"data.x={tmp_path / 'image.nii'}", f"data.y={tmp_path / 'odd.nii'}")
    with pytest.raises(ConfigError, match="D has 10 in x and 11 in y"):
        own_data(odd.data, torch.float32)


def test_labels_stored_as_floats_are_class_numbers_if_they_are_whole(tmp_path):
    np.save(tmp_path / "labels.npy", np.array([[0.0, 1.0, 2.0], [1.0, 1.5, 0.0]]))
    store = Labels(hc.data.Npy(tmp_path / "labels.npy", "NW"))
    assert store.read_new(0).tolist() == [0, 1, 2] and store.dtype == np.int64
    with pytest.raises(DataError, match=r"sample 1 .*holds 1\.5, and labels are whole numbers"):
        store.read_new(1)
    with pytest.raises(DataError, match=r"float64 .*int64.*hc\.data\.Labels"):
        hc.data.Field(hc.data.Npy(tmp_path / "labels.npy", "NW"), dtype=torch.int64)


def test_integer_labels_are_ready_for_the_losses_of_torch(tmp_path):
    """As in the README: no dtype is given anywhere."""
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file["volumes"] = np.random.default_rng(0).standard_normal((2, 1, 4, 4, 4)).astype("f4")
        file["labels"] = np.ones((2, 4, 4, 4), "u1")
    fields = {name: hc.data.HDF5(tmp_path / "train.h5", key, dims) for name, key, dims in
              (("x", "volumes", "NCDHW"), ("y", "labels", "NDHW"))}  # fmt: skip
    with hc.data.Loader(fields, batch=2, memory="1MiB", shuffle=False) as loader:
        batch = next(iter(loader))
        loss = torch.nn.functional.cross_entropy(torch.nn.Conv3d(1, 2, 1)(batch["x"]), batch["y"])
    assert batch["y"].dtype == torch.int64 and loss.isfinite()
    assert hc.data.Field(fields["y"], dtype=torch.uint8).tensor_dtype == torch.uint8


def test_one_channel_reads_any_box(tmp_path):
    from halocline.geometry import Interval

    numbers = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype("i2")
    np.save(tmp_path / "plain.npy", numbers)
    store = OneChannel(hc.data.Npy(tmp_path / "plain.npy", "NDHW"))
    box = (Interval(0, 1), Interval(1, 3), Interval(0, 4), Interval(2, 5))
    out = np.empty((1, 2, 4, 3), "f8").transpose(0, 3, 2, 1).copy().transpose(0, 3, 2, 1)
    store.read(1, box, out)
    assert np.array_equal(out[0], numbers[1, 1:3, :, 2:5])
    assert repr(store) == f"<Npy {tmp_path / 'plain.npy'}: 2 samples of C 1, D 3, H 4, W 5, int16>"
