"""Mistakes of a first day: each is one line with what to do, in commands with the promised status."""

import sys

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import halocline as hc
from halocline.cli.app import app
from halocline.testing import run_local
from halocline.train.explain import explain

USER = """
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=1):
        super().__init__()
        self.layer = nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        return self.layer(x)

def wrong(output, y):
    return {}["missing"]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "first_day.py").write_text(USER)
    with h5py.File(tmp_path / "maps.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 1, 4, 4), "f4"), np.zeros((4, 4, 4), "f4")
    told = ['model = "first_day:Net"', 'loss = "torch.nn:CrossEntropyLoss"', "steps = 1", 'data.path = "maps.h5"']
    (tmp_path / "run.toml").write_text("\n".join([*told, "data.y.classes = true"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("first_day", None)


def said(*arguments):
    found = CliRunner().invoke(app, ["train", "run.toml", "--out", "run", *arguments])
    lines = [line for line in found.stderr.splitlines() if line.startswith("halocline train:")]
    assert found.exit_code == 2 and len(lines) == 1 and "Traceback" not in found.stderr
    return lines[0]


@pytest.mark.long
def test_an_error_of_the_users_code_is_one_line_with_its_place(place):
    line = USER.splitlines().index('    return {}["missing"]') + 1
    words = said("--set", "loss=first_day:wrong")
    assert f"first_day.py:{line}: KeyError: 'missing' (--debug shows the traceback)" in words
    words = said("--set", "network.channels=3")
    assert "first_day.py:" in words and "the data have 1 channels and this layer takes 3: give the network 1" in words
    words = said("--set", "data.y.classes=false")
    assert "set data.y.classes = true" in words
    (place / "broken_day.py").write_text("x = 1\ndef f(:\n")
    assert "broken_day.py:2: SyntaxError" in said("--set", "model=broken_day:f")
    assert "run from the folder that holds nobody.py" in said("--set", "model=nobody:f")
    found = CliRunner().invoke(app, ["train", "run.toml", "--out", "run", "--debug", "--set", "loss=first_day:wrong"])
    assert isinstance(found.exception, KeyError)


def test_the_place_is_that_of_the_innermost_line_of_the_users_own(place):
    import first_day

    def raised(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001
            return explain(error)
        raise AssertionError("nothing was raised")

    line = USER.splitlines().index("        return self.layer(x)") + 1
    assert raised(lambda: first_day.Net(3)(torch.zeros(1, 1, 2, 2))).startswith(f"first_day.py:{line}: RuntimeError: ")
    assert raised(lambda: [][0]).endswith("IndexError: list index out of range")

    def like_monai():
        raise ValueError("please provide a tensor with shape B1H[WD].")

    assert raised(like_monai).endswith("set data.y.channel = true")
    words = raised(lambda: nn.functional.nll_loss(torch.zeros(2, 3), torch.zeros(2)))
    assert words.endswith("set data.y.classes = true")


def calls(mesh, x):
    return [
        (
            lambda: hc.shard(x, mesh, {"depth": 2}),
            r"to axes of the mesh, so write \{2: 'depth'\}",
        ),
        (lambda: hc.shard(mesh, x, {2: "depth"}), r"takes the tensor first, then the mesh: hc\.shard\(tensor, mesh"),
        (lambda: hc.shard(x.numpy(), mesh, {2: "depth"}), r"not a numpy\.ndarray; give torch\.as_tensor\(array\)"),
        (lambda: hc.shard(x, {"depth": 2}, {2: "depth"}), r"the mesh is a dict; make one with hc\.Mesh"),
        (lambda: hc.shard(x, mesh, "depth"), r"dims is a str; map dims of the tensor to axes, such as \{2: 'depth'\}"),
        (lambda: hc.shard(x, mesh, {2: 1}), r"has 2: 1; it maps numbers of dims to names of axes"),
        (lambda: hc.from_tile(x.numpy(), mesh, {2: "depth"}), r"hc\.from_tile takes a torch tensor"),
        (lambda: hc.distribute(mesh, nn.Linear(1, 1)), r"takes a torch\.nn\.Module, then a mesh"),
    ]


def test_arguments_in_another_order_or_of_another_type_are_told_with_what_to_write():
    def on_each():
        mesh, x = hc.Mesh(depth=2), torch.zeros(1, 1, 4, 4)
        for call, words in calls(mesh, x):
            with pytest.raises(hc.HaloclineError, match=words):
                call()
        cut = hc.shard(x, mesh, {2: "depth"})
        with pytest.raises(hc.HaloclineError, match="the input has 1 channels and the layer takes 3"):
            nn.Conv2d(3, 2, 1)(cut)
        with pytest.raises(hc.HaloclineError, match=r"for class numbers give integers: y\.long\(\)"):
            nn.functional.cross_entropy(cut.expand(1, 2, 4, 4), hc.shard(torch.zeros(1, 4, 4), mesh, {1: "depth"}))

    run_local(2, on_each)


@pytest.mark.long
def test_a_run_that_never_began_leaves_no_folder(place):
    (place / "run.toml").write_text(
        (place / "run.toml").read_text().replace("data.y.classes = true", "data.y.dims = 'NQ'")
    )
    found = CliRunner().invoke(app, ["train", "run.toml", "--ranks", "2"])
    assert found.exit_code == 2 and not (place / "runs" / "run-1").exists(), found.stderr
    found = CliRunner().invoke(app, ["train", "run.toml", "--ranks", "2", "--out", "kept"])
    assert found.exit_code == 2 and (place / "kept").exists()  # a folder that was asked for stays
    found = CliRunner().invoke(app, ["predict", "kept", "maps.h5", "out.h5"])
    assert found.exit_code == 2 and "kept was not trained: it has no input.json" in found.stderr
