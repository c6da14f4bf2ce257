"""Runs: a network of the user's own goes the same way on one rank and cut; it stops, goes on, and predicts."""

import json
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from halocline.data import open_store
from halocline.testing import shared_pool
from halocline.train.config import load_settings
from halocline.train.guard import Guard, TrainingError, fingerprints
from halocline.train.log import read_log
from halocline.train.settings import ConfigError, GuardSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "own"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The worked example, in a folder of its own with its data made."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    sys.path.insert(0, str(folder))
    import make_data

    make_data.main(folder / "rings.h5")
    yield folder
    sys.path.remove(str(folder))


def _settings(place, *changes):
    return load_settings(place / "run.toml", ["precision=fp64", f"data={place / 'rings.h5'}", *changes])


def _train(place, folder, *changes):
    """On every rank of whatever calls it."""
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    from halocline.train.trainer import Trainer

    torch.set_num_threads(1)
    return Trainer(_settings(place, *changes), folder).train()


def test_a_cut_run_follows_that_of_one_rank(place, tmp_path):
    options = ("steps=4", "accumulate=2", "clip=1.0", "optimizer.name=larc", "data.flip=DH", "data.shift={W = 2}")
    one = _train(place, tmp_path / "one", *options)
    for name, mesh in (("depth", ("mesh.D=4",)), ("both", ("mesh.N=2", "mesh.H=2"))):
        four = shared_pool(4).run(_train, place, tmp_path / name, *options, *mesh, deadline=120)
        for each in four:
            assert np.allclose(each.losses, one.losses, rtol=1e-8, atol=0)
            assert np.isclose(each.metrics["loss"], one.metrics["loss"], rtol=1e-8)
    steps = list(read_log(tmp_path / "both", "step"))
    assert [entry["step"] for entry in steps] == list(range(4))
    assert len(list(read_log(tmp_path / "both", "rank"))) == 4
    assert [entry["values"]["halo_beside"] for entry in read_log(tmp_path / "both", "choices")] == [1 << 15]


def test_a_run_goes_on_on_another_mesh(place, tmp_path):
    whole = _train(place, tmp_path / "whole", "steps=12", "schedule.name=cosine")
    part = tmp_path / "part"
    stopped = shared_pool(4).run(_stop_at, place, part, 5, deadline=120)
    assert all(each.stopped and len(each.losses) == 5 for each in stopped)
    rest = shared_pool(2).run(_train, place, part, "steps=12", "schedule.name=cosine", deadline=120)
    assert np.allclose(stopped[0].losses + rest[0].losses, whole.losses, rtol=1e-8, atol=0)
    assert np.isclose(rest[0].metrics["loss"], whole.metrics["loss"], rtol=1e-8)


def _stop_at(place, folder, step):
    """As if a signal had reached one rank alone."""
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    from halocline.train.trainer import Trainer

    torch.set_num_threads(1)
    settings = _settings(place, "steps=12", "schedule.name=cosine", "mesh.D=2", "mesh.H=2")

    def tell(kind, values):
        if kind == "step" and values["step"] == step - 1 and trainer.mesh.rank == 2:
            trainer.stop()

    trainer = Trainer(settings, folder, tell)
    return trainer.train()


def _predict(place, run, source, out):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    from halocline.train.predict import predict

    torch.set_num_threads(1)
    return predict(run, open_store(source, "NCDHW"), out)


def test_predictions_are_written_box_by_box(place, tmp_path):
    """On samples larger than those of the training, and on more ranks."""
    _train(place, tmp_path / "run", "steps=4")
    volumes = np.random.default_rng(0).standard_normal((3, 1, 24, 17, 16))
    np.save(tmp_path / "large.npy", volumes)
    _predict(place, tmp_path / "run", tmp_path / "large.npy", tmp_path / "one.h5")
    with h5py.File(tmp_path / "one.h5") as file:
        expected = file["p"][...]
    assert expected.shape == (3, 2, 24, 17, 16)
    for name in ("cut.zarr", "cut.h5"):
        shared_pool(4).run(_predict, place, tmp_path / "run", tmp_path / "large.npy", tmp_path / name, deadline=120)
        found = open_store(tmp_path / name, "NCDHW")
        assert np.allclose(np.stack([found.read_new(s) for s in range(3)]), expected, rtol=1e-5, atol=1e-6)
    assert not list(tmp_path.glob(".*part*"))


def test_a_loss_that_is_no_number_ends_the_run(place, tmp_path):
    with pytest.raises(TrainingError, match="the loss is"):
        _train(place, tmp_path / "run", "steps=50", "optimizer.name=sgd", "optimizer.lr=1e200")


def _drifted(place, folder):
    from torch import nn

    import halocline as hc

    mesh = hc.Mesh(data=2)
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    if mesh.rank == 1:
        with torch.no_grad():
            model.bias[1] = 1e-30
    Guard(GuardSettings(drift_every=1), model, mesh).look(0, 1.0, 0.1)


def test_weights_that_drift_apart_are_named(place, tmp_path):
    from halocline.testing import RankError

    with pytest.raises(RankError, match=r"1 of 2 tensors differ between ranks, first bias .ranks 0, 1 differ"):
        shared_pool(2).run(_drifted, place, tmp_path)


def test_fingerprints_see_every_bit_and_place():
    model = torch.nn.Linear(5, 7)
    before = fingerprints(model.state_dict())
    with torch.no_grad():
        model.weight[0, 0], model.weight[0, 1] = model.weight[0, 1].clone(), model.weight[0, 0].clone()
    after = fingerprints(model.state_dict())
    assert before[0] != after[0] and before[1] == after[1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["model=network:Nobody"], "model = 'network:Nobody' cannot be imported"),
        (["model=network"], "give package.module:name"),
        (["data.x.dataset=volume"], "has no dataset 'volume'"),
        (["data.validation=24"], "data.validation = 24"),
        (["mesh.D=3"], "are 3 ranks, and there are 1"),
        (["data=nowhere.h5"], "nowhere.h5"),
    ],
)
def test_mistakes_are_told_before_anything_runs(place, tmp_path, changes, text):
    with pytest.raises(ConfigError, match=text):
        _train(place, tmp_path / "run", *changes)


def test_too_little_memory_is_told_with_numbers(place, tmp_path, monkeypatch):
    from halocline.train import forecast

    monkeypatch.setattr(forecast, "available", lambda: 1 << 20)
    with pytest.raises(TrainingError, match=r"a step needs [0-9.]+ MiB a rank \(weights .*there are 1.0 MiB; cut over"):
        _train(place, tmp_path / "run")


def test_the_log_survives_a_line_that_was_cut_off(tmp_path):
    lines = [json.dumps({"kind": "step", "step": step, "loss": 1.0 / (step + 1)}) for step in (0, 1, 1)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    assert [entry["step"] for entry in read_log(tmp_path, "step")] == [0, 1]
