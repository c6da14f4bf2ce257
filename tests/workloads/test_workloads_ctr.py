"""Clicks from a large table: runs on one and two ranks are alike, and checkpoints go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halocline.geometry import Interval
from halocline.tensor import unwrap
from halocline.testing import shared_pool
from halocline.testing.check import check_network
from halocline.train.config import make_settings
from halocline.train.task import defaults_of
from halocline.train.trainer import Trainer
from halocline.workloads import WORKLOADS
from halocline.workloads.ctr import CATEGORIES, FIELDS, TABLE, ClickNet, Clicks

# On one rank torch's own lookups make sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
SHORT = ("precision=fp64", "data.samples=60", "data.validation=12", "batch=9", "checkpoint_every=3")


def train(folder: Path, *changes: str) -> tuple[list[float], dict[str, float], int]:
    """Losses, metrics, and rows of the table that this rank holds."""
    torch.set_num_threads(1)
    settings = make_settings({"workload": "ctr"}, [*SHORT, *changes], defaults_of("ctr"), "test")
    trainer = Trainer(settings, folder)
    result = trainer.train()
    return result.losses, result.metrics, len(unwrap(dict(trainer.model.named_parameters())[TABLE]))


def test_a_cut_run_follows_that_of_one_rank_and_resumes_on_another_number(tmp_path: Path) -> None:
    losses, metrics, rows = train(tmp_path / "one", "steps=6")
    assert rows == FIELDS * CATEGORIES
    for found, _, mine in shared_pool(2).run(train, tmp_path / "two", "steps=3", deadline=120):
        assert mine == rows // 2
        assert np.allclose(found, losses[:3], rtol=1e-8, atol=0)
    rest, measured, _ = train(tmp_path / "two", "steps=6")  # rows and sums of squares of both ranks
    assert np.allclose(rest, losses[3:], rtol=1e-8, atol=0)
    assert measured == pytest.approx(metrics, rel=1e-8)


@pytest.mark.parametrize("cut", [{"data": 2}, {"data": 2, "model": 2}])
def test_exact_by_check(cut: dict[str, int]) -> None:
    pool: Any = shared_pool(2 if len(cut) == 1 else 4)
    assert check_network("ctr", cut=cut, steps=2, pool=pool).verdict == "exact"


def test_clicks_depend_on_categories_and_are_the_same_in_parts() -> None:
    box = (Interval(0, FIELDS),)
    chosen = np.stack([Clicks(0, FIELDS, CATEGORIES, answers=False)(n, box) for n in range(300)])
    clicked = np.concatenate([Clicks(0, FIELDS, CATEGORIES, answers=True)(n, (Interval(0, 1),)) for n in range(300)])
    assert 0.25 < clicked.mean() < 0.75
    assert chosen.min() >= 0 and chosen.max() < CATEGORIES
    assert np.median(chosen) < CATEGORIES / 4  # few categories are most of what comes
    part = Clicks(0, FIELDS, CATEGORIES, answers=False)(7, (Interval(2, 5),))
    assert np.array_equal(part, chosen[7, 2:5])


def test_the_full_table_is_of_48_gigabytes_and_no_rank_makes_it() -> None:
    with torch.device("meta"):
        model = ClickNet(**WORKLOADS["ctr"].full.network)
    assert model.table.weight.nbytes == pytest.approx(48.9e9, rel=0.01)
