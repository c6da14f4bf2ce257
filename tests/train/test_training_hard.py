"""Training where it is hard: uneven batches, numbers that are none, runs gone on with otherwise, odd predictions."""

import json
import signal
import sys
import threading
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import halocline as hc
from halocline.data import open_store
from halocline.errors import DataError, HaloclineError
from halocline.testing import run_local, shared_pool
from halocline.train.checkpoints import CheckpointError
from halocline.train.config import make_settings
from halocline.train.guard import LEAST_SCALE, Guard, TrainingError, fingerprints
from halocline.train.log import RunLog, read_log
from halocline.train.precision import Precision
from halocline.train.predict import likeliest, predict
from halocline.train.settings import ConfigError, GuardSettings
from halocline.train.step import evaluating, training_step
from halocline.train.trainer import Trainer
from halocline.world import this_world

NETWORK = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=2, dropout=0.0, pair=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(dropout), nn.Conv2d(4, classes, 1))
        self.pair = pair

    def forward(self, x):
        y = self.layers(x)
        return (y, x) if self.pair else y

def loss(output, y):
    output = output[0] if isinstance(output, tuple) else output
    return torch.nn.functional.cross_entropy(output, y)

def numb(output, y):
    """Its value is a number, its gradient is not."""
    return loss(output, y) + (output.sum() * 0).sqrt()
'''
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hard")
    (folder / "hard_network.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    with h5py.File(folder / "maps.h5", "w") as file:
        file["x"] = rng.standard_normal((7, 1, 8, 12)).astype("f4")
        file["y"] = rng.integers(0, 2, (7, 8, 12)).astype("u1")
    yield folder
    if str(folder) in sys.path:
        sys.path.remove(str(folder))


def settings_of(place, *changes):
    told = {"model": "hard_network:Net", "loss": "hard_network:loss", "data": str(place / "maps.h5")}
    told |= {"steps": 4, "batch": 2, "precision": "fp64", "checkpoint_every": 0}
    return make_settings(told, ["data.validation=2", *changes])


def train(place, folder, *changes, tell=lambda kind, values: None):
    """On every rank of whatever calls it."""
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    torch.set_num_threads(1)
    return Trainer(settings_of(place, *changes), folder, tell).train()


def notes(folder):
    return " ".join(entry["text"] for entry in read_log(folder, "note"))


# ---- the step ----


def test_batches_of_other_sizes_count_by_their_samples():
    """Three that pile up, the last of them small, are one batch."""
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)

    def step(*sizes):
        torch.manual_seed(0)
        model = hc.distribute(nn.Linear(3, 2).double())
        parts = [{"x": a, "y": b} for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
        optimizer, precision = torch.optim.SGD(model.parameters(), 0.1), Precision("fp64", CPU)
        loss = training_step(model, parts, lambda out, batch: (out - batch["y"]).square().mean(), optimizer, precision)
        return loss, model.weight.detach()

    (whole, expected), (piled, found) = step(5), step(2, 2, 1)
    assert torch.allclose(piled, whole, rtol=1e-12) and torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "mesh",
    [{"N": 2}, pytest.param({"H": 2}, marks=pytest.mark.long), pytest.param({"N": 2, "W": 2}, marks=pytest.mark.long)],
)
def test_uneven_batches_that_pile_up_are_those_of_one_rank(place, tmp_path, mesh):
    """Five samples in batches of two: the third batch has one, which two data ranks cannot share."""
    told = ("accumulate=3", "clip=0.05", "guard.drift_every=1", "steps=5")
    one = train(place, tmp_path / "one", *told)
    cut = [f"mesh.{letter}={parts}" for letter, parts in mesh.items()]
    ranks = int(np.prod(list(mesh.values())))
    for each in shared_pool(ranks).run(train, place, tmp_path / "cut", *told, *cut, deadline=120):
        assert np.allclose(each.losses, one.losses, rtol=1e-9, atol=0)
        assert np.isclose(each.metrics["loss"], one.metrics["loss"], rtol=1e-9)


@pytest.mark.parametrize("name", ["sgd", "larc"])
def test_fp16_clips_what_is_unscaled_and_leaves_out_what_overflowed(name):
    from halocline.train.optimizers import LARC

    model, precision = nn.Linear(4, 4), Precision("fp16", CPU)
    base = torch.optim.SGD(model.parameters(), 1.0)
    optimizer = base if name == "sgd" else LARC(base, trust=1e6)
    batch = [{"x": torch.randn(8, 4), "y": torch.randn(8, 4)}]
    before = model.weight.detach().clone(), model.bias.detach().clone()
    precision.skipped = True
    while precision.skipped:  # until the scale is one that fp16 can bear
        training_step(model, batch, lambda out, _: 9 * out.float().square().mean(), optimizer, precision, clip=0.25)
    moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert torch.isclose(moved.norm(), torch.tensor(0.25), rtol=1e-3)
    scale, kept = precision.scale, model.weight.detach().clone()
    training_step(model, batch, lambda out, _: out.float().sum() * 1e38, optimizer, precision, clip=0.25)
    assert precision.skipped and precision.scale == scale / 2 and torch.equal(model.weight, kept)


def test_a_run_of_fp16_that_never_learns_ends(place, tmp_path):
    """The loss is a number all the time; every step is left out."""
    with pytest.raises(TrainingError, match=r"overflow fp16.*nothing is learned"):
        train(place, tmp_path, "precision=fp16", "loss=hard_network:numb", "steps=60")
    steps = list(read_log(tmp_path, "step"))
    assert all(entry["skipped"] == 1 for entry in steps) and steps[-1]["scale"] < LEAST_SCALE


# ---- the guard ----


@pytest.mark.long
def test_weights_that_are_no_numbers_are_never_kept(place, tmp_path):
    """The loss of the step that spoils them is a number still."""
    with pytest.raises(TrainingError, match=r"step 1: 12 tensors hold NaN .*first layers\.0\.weight"):
        train(place, tmp_path / "a", "loss=hard_network:numb", "checkpoint_every=1")
    with pytest.raises(TrainingError, match="tensors hold NaN"):  # in the last step, after which no loss is taken
        train(place, tmp_path / "b", "loss=hard_network:numb", "steps=1")
    train(place, tmp_path / "c", "loss=hard_network:numb", "guard.nan=warn", "checkpoint_every=1")
    assert "the loss is nan" in notes(tmp_path / "c") and "no checkpoint is written" in notes(tmp_path / "c")
    assert not list(tmp_path.glob("*/checkpoints/step-*"))


def test_fingerprints_see_the_lowest_bit_and_signs_that_change_together():
    model = nn.Linear(8, 4)
    before = fingerprints(model.state_dict())
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    assert fingerprints(model.state_dict())[0] != before[0]
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
        model.weight[0, 1] *= -1
        model.weight[2, 3] *= -1
    assert fingerprints(model.state_dict())[0] != before[0]


def slow_rank(warned):
    mesh = hc.Mesh(data=2)
    guard = Guard(GuardSettings(drift_every=1), nn.Linear(1, 1), mesh, warned.append)
    nn.init.zeros_(guard._model.weight)
    nn.init.zeros_(guard._model.bias)
    guard.look(0, 1.0, 10.0 if mesh.rank == 1 else 0.1)


def test_of_two_ranks_the_slow_one_is_named_too():
    warned: list[str] = []
    run_local(2, lambda: slow_rank(warned))
    assert len(warned) == 1 and "rank 1 computes 10 s a step where the others take 0.1" in warned[0]


# ---- the loop ----


def test_validation_leaves_every_layer_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    model[0].eval()  # frozen by its maker
    with evaluating(model):
        assert not model[1].training
    assert model[1].training and model.training and not model[0].training


def test_runs_in_one_process_draw_the_numbers_of_their_seed(place, tmp_path):
    told = ("network.dropout=0.5", "steps=3")
    first = train(place, tmp_path / "a", *told).losses
    assert train(place, tmp_path / "b", *told).losses == first
    assert train(place, tmp_path / "c", *told, "seed=1").losses != first


def test_answers_that_cannot_be_drawn_do_not_end_a_run(place, tmp_path):
    result = train(place, tmp_path, "network.pair=true")
    assert np.isfinite(result.metrics["loss"]) and (tmp_path / "checkpoints" / "step-00000004").is_dir()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_ctrl_c_writes_a_checkpoint_and_ends(place, tmp_path):
    def tell(kind, values):
        if kind == "step" and values["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = train(place, tmp_path, "steps=40", tell=tell)
    assert result.stopped and len(result.losses) == 2 and (tmp_path / "checkpoints" / "step-00000002").is_dir()
    assert signal.getsignal(signal.SIGINT) is before


def test_two_runs_do_not_share_a_folder(place, tmp_path, monkeypatch):
    monkeypatch.setattr("halocline.train.checkpoints.files._LOCK_PATIENCE", 0.1)
    heard = []

    def tell(kind, values):
        if kind == "step" and values["step"] == 0:
            before = (tmp_path / "config.toml").read_bytes()
            with pytest.raises(CheckpointError, match="another run writes its checkpoints here"):
                train(place, tmp_path, "seed=3")
            heard.append((tmp_path / "config.toml").read_bytes() == before)

    train(place, tmp_path, tell=tell)
    assert heard == [True]


def without_data(place, folder):
    """The words with which each rank ends."""
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    settings = settings_of(place, "data=nowhere.h5") if this_world().rank == 1 else settings_of(place)
    with pytest.raises(HaloclineError) as told:
        Trainer(settings, folder)
    return str(told.value)


def test_a_rank_without_the_data_ends_all(place, tmp_path):
    first, second = shared_pool(2).run(without_data, place, tmp_path, deadline=60)
    assert "nowhere.h5" in second and "rank 1 failed: " in first and "nowhere.h5" in first


def test_the_last_step_is_in_the_log_and_the_page_counts_them_all(place, tmp_path):
    assert train(place, tmp_path, "steps=6", "log_every=4").steps == 6
    assert [entry["step"] for entry in read_log(tmp_path, "step")] == [0, 4, 5]


# ---- gone on with ----


@pytest.mark.long
def test_other_settings_are_said_and_take_effect(place, tmp_path):
    train(place, tmp_path, "steps=2", "optimizer.name=adamw")
    train(place, tmp_path, "steps=2", "optimizer.name=adamw", "log_every=2")
    assert "other settings" not in notes(tmp_path)
    trainer = Trainer(settings_of(place, "steps=3", "optimizer.name=adamw", "optimizer.weight_decay=0.5"), tmp_path)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert "from step 2 on: optimizer.weight_decay = 0.5 (was 0.0), steps = 3 (was 2)" in notes(tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer\.name = 'sgd': this run was begun with 'adamw'"):
        train(place, tmp_path, "steps=4", "optimizer.name=sgd")


# ---- TensorBoard ----


@pytest.mark.long
def test_tensorboard_is_written_where_it_is_and_missed_aloud_where_it_is_broken(place, tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            assert Path(folder).parent == tmp_path / "with"

        def add_scalar(self, name, value, step):
            written.append((name, float(value), step))

        def close(self):
            written.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    losses = train(place, tmp_path / "with").losses
    assert [each for each in written if each[0] == "step/loss"] == [("step/loss", v, n) for n, v in enumerate(losses)]
    assert any(each[0] == "validation/loss" for each in written) and written[-1] == "closed"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = []
    train(place, tmp_path / "without", tell=lambda kind, values: said.append((kind, values)))
    assert said[0][0] == "note" and "nothing is written for TensorBoard" in said[0][1]["text"]
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    log = RunLog(tmp_path / "quiet")
    assert log.no_board == ""
    log.close()


# ---- predictions ----


def predicted(place, run, source, out, dims="NCHW", **more):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    return predict(run, open_store(source, dims), out, **more)


def test_a_run_on_a_mesh_predicts_on_any_ranks_in_its_own_numbers(place, tmp_path):
    """Three odd samples on two data ranks; float64 stays float64."""
    shared_pool(2).run(train, place, tmp_path / "run", "mesh.N=2", deadline=60)
    np.save(tmp_path / "odd.npy", np.random.default_rng(1).standard_normal((3, 1, 7, 5)))
    predicted(place, tmp_path / "run", tmp_path / "odd.npy", tmp_path / "one.h5")
    with h5py.File(tmp_path / "one.h5") as file:
        expected = file["p"][...]
    assert expected.dtype == np.float64 and expected.shape == (3, 2, 7, 5)
    for ranks in (2, 4):
        out = tmp_path / f"{ranks}.h5"
        shared_pool(ranks).run(predicted, place, tmp_path / "run", tmp_path / "odd.npy", out, deadline=60)
        with h5py.File(out) as file:
            assert np.allclose(file["p"][...], expected, rtol=1e-12, atol=1e-12)


def test_classes_past_255_keep_their_numbers_and_one_channel_has_none():
    answer = torch.zeros(1, 300, 2)
    answer[0, 299] = 1
    assert likeliest(answer).tolist() == [[299, 299]]
    assert likeliest(answer[:, 50:]).dtype == torch.uint8
    with pytest.raises(DataError, match=r"\[1, 1, 2\] have no classes"):
        likeliest(answer[:, :1])


def test_samples_that_do_not_fit_are_refused_before_anything_is_written(place, tmp_path):
    train(place, tmp_path / "run")
    np.save(tmp_path / "volume.npy", np.zeros((2, 1, 4, 8, 8), "f4"))
    np.save(tmp_path / "colours.npy", np.zeros((2, 3, 8, 8), "f4"))
    with h5py.File(tmp_path / "maps.h5", "w") as file:
        file["x"] = np.zeros((1, 1, 8, 8), "f4")
    for name, dims, out, text in (
        ("volume.npy", "NCDHW", "out.h5", "has dims CDHW, and the network was trained on CHW"),
        ("colours.npy", "NCHW", "out.h5", "has 3 channels, and the network was trained on 1"),
        ("maps.h5", "NCHW", "maps.h5", "holds the samples; give"),
        ("maps.h5", "NCHW", "nowhere/out.h5", "there is no folder .*nowhere"),
    ):
        with pytest.raises(DataError, match=text):
            predicted(place, tmp_path / "run", tmp_path / name, tmp_path / out, dims, force=True)
    assert (tmp_path / "maps.h5").exists() and not (tmp_path / "out.h5").exists()


def test_the_log_of_a_run_that_is_lost_is_json(place, tmp_path):
    train(place, tmp_path, "guard.nan=warn", "optimizer.name=sgd", "optimizer.lr=1e200")

    def refuse(word):
        raise AssertionError(word)

    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert np.isnan([entry["loss"] for entry in read_log(tmp_path, "step")]).any()
