"""What a run of the user's own can choose: loss, metrics, optimizer, initial weights, callbacks; what is meant."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import halocline as hc
from halocline.cli.app import app
from halocline.testing import shared_pool
from halocline.train.checkpoints import CheckpointError
from halocline.train.config import make_settings, read_toml
from halocline.train.export import export_weights
from halocline.train.imports import named
from halocline.train.losses import make_loss
from halocline.train.metrics import meter_maker
from halocline.train.optimizers import make_optimizer
from halocline.train.settings import ConfigError, OptimizerSettings
from halocline.train.trainer import Trainer
from halocline.workloads.metrics import Confusion

CODE = '''
import torch
import torch.nn.functional as F
from torch import nn

def Net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))

def plain(output, y, smooth=0.0):
    return F.cross_entropy(output, y, label_smoothing=smooth)

def factory(smooth=0.0):
    return lambda output, y: plain(output, y, smooth)

def share(output, y):
    """One number for each class."""
    return torch.stack([(output.argmax(1) == number).double().mean() for number in range(3)])

class Largest:
    def __init__(self):
        self.found = -1e9
    def update(self, output, batch):
        self.found = max(self.found, float(output.max()))
    def result(self):
        return {"largest": self.found}

class Listens:
    heard = []
    def on_start(self, trainer):
        self.heard.append(("start", trainer.step))
    def on_step(self, trainer, step, loss):
        self.heard.append(("step", step, loss))
    def on_validation(self, trainer, metrics):
        self.heard.append(("validation", metrics["dice"]))
    def on_end(self, trainer, result):
        self.heard.append(("end", result.steps))

class Deaf:
    pass

def number():
    return 3
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    (folder / "choices.py").write_text(CODE)
    rng = np.random.default_rng(0)
    with h5py.File(folder / "maps.h5", "w") as file:
        file["x"] = rng.standard_normal((6, 1, 8, 12)).astype("f4")
        file["y"] = rng.integers(0, 3, (6, 8, 12)).astype("u1")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def settings_of(place, *changes):
    told = {"model": "choices:Net", "loss": "choices:plain", "data": str(place / "maps.h5"), "steps": 2}
    return make_settings(told, ["data.validation=3", "batch=2", "precision=fp64", *changes])


def train(place, folder, *changes):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    torch.set_num_threads(1)
    return Trainer(settings_of(place, *changes), folder).train()


@pytest.mark.long
def test_metrics_of_a_cut_run_are_those_of_one_rank(place, tmp_path):
    told = ('metrics=["dice", "iou", "accuracy", "choices:share", "choices:Largest"]', 'class_names=["a", "b", "c"]')
    one = train(place, tmp_path / "one", *told)
    assert {"dice", "dice/a", "iou/b", "accuracy/c", "share", "share/a", "largest"} <= one.metrics.keys()
    for mesh in (("mesh.H=2",), ("mesh.N=2",)):
        for each in shared_pool(2).run(train, place, tmp_path / mesh[0], *told, *mesh, deadline=60):
            assert each.metrics.keys() == one.metrics.keys()
            assert all(np.isclose(each.metrics[name], one.metrics[name], rtol=1e-12) for name in one.metrics)


def test_classes_are_counted_as_their_definition_says():
    """One batch with a number that is no class, against counts by hand."""
    torch.manual_seed(0)
    output, y = torch.randn(2, 3, 5, 7), torch.randint(0, 3, (2, 5, 7))
    y[0, 0, :3] = 255
    meter = Confusion(3)
    meter.update(output, {"y": y.to(torch.uint8)})
    guess, known = output.argmax(1), y < 3
    for number in range(3):
        true, told = (y == number) & known, (guess == number) & known
        both = (true & told).sum()
        assert torch.isclose(meter.by_class()["dice"][number].float(), 2 * both / (true.sum() + told.sum()))
        assert torch.isclose(meter.by_class()["iou"][number].float(), both / (true | told).sum())
    assert meter.counts.sum() == known.sum()


def test_metrics_are_chosen_by_what_the_data_hold(place):
    make = meter_maker(settings_of(place))
    numbers, labels = make(), make()
    numbers.update(torch.ones(2, 1), {"y": torch.zeros(2, 1)})
    labels.update(torch.ones(2, 3, 4), {"y": torch.zeros(2, 1, 4, dtype=torch.int64)})  # as MONAI has labels
    assert set(numbers.result()) == {"mse", "mae"} and {"dice", "iou", "accuracy"} <= set(labels.result())
    nothing = make()
    nothing.update((torch.ones(2), 3), {"y": torch.ones(2)})
    assert nothing.result() == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("metrics=jaccard", "metrics = 'jaccard': give auto, dice, iou"),
        ("metrics=mse", r"metrics = 'mse': y of \[2, 8, 12\] does not fit an output of \[2, 3, 8, 12\]"),
        ("metrics=choices:nobody", "metrics = 'choices:nobody' cannot be imported"),
        ("class_names=['a', 'b']", "there are 2, and the network tells 3 classes apart"),
        ("callbacks=choices:Deaf", "callbacks = 'choices:Deaf' has none of the methods on_start"),
        ("optimizer=adamx", r"optimizer.name = 'adamx' \(did you mean adam\w*\?\): give adam, adamw"),
        ("optimizer=choices:plain", "optimizer.options"),
        ("model=choices:number", "gives a int, not a torch.nn.Module"),
        ("loss_options={sharpness = 2}", "unexpected keyword argument 'sharpness'; plain takes smooth"),
    ],
)
def test_choices_that_are_none_are_told(place, tmp_path, change, text):
    with pytest.raises(ConfigError, match=text):
        train(place, tmp_path / "run", change)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("torch.nn:CrossEntropyLoss", {"label_smoothing": 0.1, "weight": [1.0, 1.0, 1.0]}),
        ("torch.nn.functional:cross_entropy", {"label_smoothing": 0.1}),
        ("choices:plain", {"smooth": 0.1}),
        ("choices:factory", {"smooth": 0.1}),
    ],
)
def test_a_loss_is_a_class_a_function_or_what_makes_one(place, target, options):
    output, y = torch.randn(2, 3, 4), torch.randint(0, 3, (2, 4))
    loss = make_loss(target, options)
    assert torch.isclose(loss(output, y), F.cross_entropy(output, y, label_smoothing=0.1))


def test_optimizers_by_name_and_by_class(place):
    model = nn.Linear(2, 2)
    assert isinstance(make_optimizer(model, OptimizerSettings("adamw", options={"amsgrad": True})), torch.optim.AdamW)
    made = make_optimizer(model, OptimizerSettings("torch.optim:RMSprop", lr=0.5, options={"alpha": 0.7}))
    assert isinstance(made, torch.optim.RMSprop) and made.defaults["alpha"] == 0.7 and made.defaults["lr"] == 0.5
    with pytest.raises(ConfigError, match="unexpected keyword argument 'beta'; RMSprop takes lr, alpha"):
        make_optimizer(model, OptimizerSettings("torch.optim:RMSprop", options={"beta": 1}))
    assert make_settings({"workload": "unet3d", "optimizer": "sgd", "schedule": "cosine"}).optimizer.name == "sgd"


def test_a_run_begins_with_the_weights_of_a_file(place, tmp_path):
    import choices

    other = choices.Net().double()
    with torch.no_grad():
        other[0].weight.fill_(0.25)
    export_weights(other, tmp_path / "start.pt")
    trainer = Trainer(settings_of(place, f"weights={tmp_path / 'start.pt'}"), tmp_path / "run")
    assert torch.equal(trainer.model[0].weight, other[0].weight)
    trainer.train()
    torch.save({"state_dict": nn.Linear(1, 1).state_dict()}, tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match=r"odd\.pt does not fit the model: 0\.weight is missing, .* more"):
        Trainer(settings_of(place, f"weights={tmp_path / 'odd.pt'}"), tmp_path / "other")


def test_callbacks_hear_of_a_run(place, tmp_path):
    import choices

    choices.Listens.heard.clear()
    result = train(place, tmp_path / "run", "callbacks=choices:Listens")
    kinds = [each[0] for each in choices.Listens.heard]
    assert kinds == ["start", "step", "step", "validation", "end"]
    assert [each[2] for each in choices.Listens.heard[1:3]] == result.losses


def test_a_callback_may_end_a_run(place, tmp_path):
    (place / "ending.py").write_text(
        "class Enough:\n    def on_step(self, trainer, step, loss):\n        trainer.stop.asked = True\n"
    )
    result = train(place, tmp_path / "run", "callbacks=ending:Enough")
    assert result.stopped and not result.preempted and len(result.losses) == 1


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("batch_size", "batch"),
        ("epochs", r"steps\? \(a run is as long as its steps\)"),
        ("data.labels", "data.y"),
        ("stepps", "steps"),
        ("optimiser.lr", "optimizer"),
    ],
)
def test_did_you_mean(key, meant):
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        make_settings({"workload": "unet3d"}, [f"{key}=1"])


def test_a_mistake_names_the_option_or_the_file_it_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = {"workload": "unet3d", "stepps": 1}
    with pytest.raises(ConfigError, match=r"run\.toml: stepps is unknown.*; --set optimizr\.lr=1: optimizr is unknown"):
        make_settings(told, ["batch=2", "optimizr.lr=1"], where="run.toml")
    with pytest.raises(ConfigError, match=r"torch\.nn:MSELos' cannot be imported: .*\(did you mean MSELoss\?\)"):
        named("loss", "torch.nn:MSELos")
    with pytest.raises(ConfigError, match=rf"run\.toml cannot be read: No such file or directory in {tmp_path}"):
        read_toml(Path("run.toml"))


def test_a_loader_says_what_it_is(place):
    fields = {"x": hc.data.HDF5(place / "maps.h5", "x", "NCHW"), "y": hc.data.HDF5(place / "maps.h5", "y", "NHW")}
    with hc.data.Loader(fields, batch=4) as loader:
        assert repr(loader) == (
            "<Loader: 6 samples in 2 batches of 4; x (CHW 1 x 8 x 12, float32), y (HW 8 x 12, int64); cut nowhere>"
        )
    with pytest.raises(hc.HaloclineError, match=r"cut=\{'data': 'N'\}: .* write cut=\{'N': 'data'\}"):
        hc.data.Loader(fields, cut={"data": "N"})
    with pytest.raises(hc.HaloclineError, match="memory = '32 cows': give a size, such as 8GiB"):
        hc.data.Loader(fields, memory="32 cows")


def test_names_are_there_for_editors_and_at_run_time():
    import ast
    import inspect

    assert {"data", "train", "testing"} <= set(dir(hc)) and hc.train.Trainer is Trainer
    for module in (hc, hc.train):
        tree = ast.parse(inspect.getsource(module))
        blocks = [node for node in tree.body if isinstance(node, ast.If)]
        told = {alias.asname for block in blocks for node in block.body for alias in node.names}
        assert told <= set(dir(module)) and all(getattr(module, name) is not None for name in told)
    assert set(hc.train.__all__) <= told
    for public in (hc.shard, hc.distribute, hc.data.Loader):
        assert "hc." in inspect.getdoc(public)


def test_a_target_that_is_nothing_is_told_what_it_could_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["train", "run.tml"])
    assert ran.exit_code == 2 and "run.tml is neither a workload (unet3d, " in ran.stderr
    assert f"nor, seen from {tmp_path}, a TOML file or the folder of a run" in ran.stderr
    assert not list(tmp_path.iterdir())
