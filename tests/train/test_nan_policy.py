"""A loss that is not finite: the run ends, warns, leaves the step out, or goes back to its last checkpoint."""

import math
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from halocline.errors import ConfigError
from halocline.testing import shared_pool
from halocline.train.config import make_settings
from halocline.train.guard import TrainingError
from halocline.train.log import read_log
from halocline.train.trainer import Trainer

CODE = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nan_net.py").write_text(CODE)
    x, y = np.random.default_rng(0).normal(size=(6, 1, 6, 4)), np.zeros((6, 1, 6, 4))
    x[0] = y[0] = 1e200  # whose square is infinite, in the loss and in the statistics of the norm
    with h5py.File(tmp_path / "maps.h5", "w") as file:
        file["x"], file["y"] = x, y
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("nan_net", None)


def settings_of(place: Path, policy: str, **more: object):
    told = {
        "model": "nan_net:make", "loss": "torch.nn:MSELoss", "steps": 12, "precision": "fp64", "checkpoint_every": 1,
        "data": {"path": str(place / "maps.h5"), "validation": 0}, "guard": {"nan": policy}, **more,
    }  # fmt: skip
    return make_settings(told)


def trained(place: Path, policy: str, name: str, mesh: dict | None = None) -> tuple[list[float], dict]:
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    more = {} if mesh is None else {"mesh": mesh}
    trainer = Trainer(settings_of(place, policy, **more), place / name)
    losses = trainer.train().losses
    return losses, {key: value.clone() for key, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("policy", ["skip", pytest.param("rollback", marks=pytest.mark.long)])
def test_a_bad_sample_does_no_harm_on_any_number_of_ranks(place: Path, policy: str) -> None:
    losses, weights = trained(place, policy, policy)
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    assert len(bad) == 2 and len(losses) == 12  # once an epoch
    assert all(value.isfinite().all() for value in weights.values())
    notes = [entry["text"] for entry in read_log(place / policy, "note")]
    assert sum("the loss is inf" in text for text in notes) == 2
    if policy == "rollback":
        assert any(f"back to the weights of step {bad[0]}" in text for text in notes)
    cut = shared_pool(2).run(trained, place, policy, f"{policy} cut", {"H": 2}, deadline=60)
    for other, their_weights in cut:
        assert [math.isfinite(loss) for loss in other] == [math.isfinite(loss) for loss in losses]
        finite = [pair for pair in zip(losses, other, strict=True) if math.isfinite(pair[0])]
        assert max(abs(one - two) for one, two in finite) < 1e-8
        for key, value in weights.items():
            assert torch.allclose(value.double(), their_weights[key].double(), atol=1e-8, rtol=0)


def test_a_run_that_cannot_recover_ends(place: Path) -> None:
    with h5py.File(place / "maps.h5", "r+") as file:
        file["y"][...] = 1e200
    with pytest.raises(TrainingError, match="no checkpoint to go back to"):
        trained(place, "rollback", "never good")
    with pytest.raises(TrainingError, match="lower the learning rate"):
        trained(place, "raise", "raises")


@pytest.mark.parametrize("gradients", [{"lag": 1}, {"overlap": "next-forward"}])
def test_policies_that_need_whole_steps_refuse_late_gradients(place: Path, gradients: dict) -> None:
    for policy in ("skip", "rollback"):
        with pytest.raises(ConfigError, match="ends before the next begins"):
            settings_of(place, policy, gradients=gradients)
