"""Runs whose gradients go on into the next forward, one step late, or in fewer bits."""

import numpy as np
import pytest
from test_train import _train, place  # noqa: F401  (a fixture)

from halocline.testing import shared_pool
from halocline.train.config import make_settings
from halocline.train.settings import ConfigError


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("larc", marks=pytest.mark.long)])
def test_next_forward_follows_one_rank(place, tmp_path, optimizer):  # noqa: F811
    options = ("steps=5", f"optimizer.name={optimizer}", "schedule.name=cosine", "accumulate=2", "checkpoint_every=2")
    one = _train(place, tmp_path / "one", *options)
    ahead = (*options, "mesh.D=2", "gradients.overlap=next-forward")
    for each in shared_pool(2).run(_train, place, tmp_path / "two", *ahead, deadline=120):
        assert np.allclose(each.losses, one.losses, rtol=1e-8, atol=0)
        assert np.isclose(each.metrics["loss"], one.metrics["loss"], rtol=1e-8)


@pytest.mark.long
def test_a_lagged_run_goes_on_with_the_gradients_it_had(place, tmp_path):  # noqa: F811
    whole = _train(place, tmp_path / "whole", "steps=7", "gradients.lag=1")
    plain = _train(place, tmp_path / "plain", "steps=7")
    assert whole.losses[:2] == [plain.losses[0], whole.losses[1]] and whole.losses[1:] != plain.losses[1:]
    part = tmp_path / "part"
    first = shared_pool(2).run(_train, place, part, "steps=4", "gradients.lag=1", "mesh.D=2", deadline=120)
    rest = _train(place, part, "steps=7", "gradients.lag=1")
    assert np.allclose(first[0].losses + rest.losses, whole.losses, rtol=1e-8, atol=0)


@pytest.mark.long
def test_fewer_bits_on_the_way_train_nearly_alike(place, tmp_path):  # noqa: F811
    one = _train(place, tmp_path / "one", "steps=4")
    for wire, off in (("bf16", 1e-2), ("fp16", 1e-3)):
        options = ("steps=4", "mesh.D=2", f"gradients.wire={wire}")
        two = shared_pool(2).run(_train, place, tmp_path / wire, *options, deadline=120)
        assert two[0].losses == two[1].losses
        assert two[0].losses != one.losses and np.allclose(two[0].losses, one.losses, rtol=off, atol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lag": 1, "overlap": "next-forward"}, "lag"),
        ({"wire": "fp16", "overlap": "next-forward"}, "bf16"),
        ({"rings": "round"}, "levels"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_settings({"workload": "unet3d", "gradients": settings})
