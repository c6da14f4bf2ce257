"""Plasma signals and seismic sections: cut runs follow one rank, half precision on the wire, batches in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halocline.errors import ConfigError
from halocline.geometry import Interval
from halocline.testing import shared_pool
from halocline.train.config import make_settings
from halocline.train.log import read_log
from halocline.train.reporting.answers import answers
from halocline.train.task import defaults_of
from halocline.train.trainer import Trainer
from halocline.workloads import WORKLOADS
from halocline.workloads.disruption import CHANNELS, SCALARS, DisruptionNet, Shots
from halocline.workloads.metrics import RocCurve
from halocline.workloads.seismic import Sections
from halocline.world import this_world


def train(folder: Path, workload: str, *changes: str) -> tuple[list[float], dict[str, float], int]:
    """Losses, metrics and bytes summed on this rank. On every rank of whatever calls it."""
    torch.set_num_threads(1)
    before = this_world().traffic.summed_bytes
    settings = make_settings({"workload": workload}, list(changes), defaults_of(workload), "test")
    result = Trainer(settings, folder).train()
    return result.losses, result.metrics, this_world().traffic.summed_bytes - before


SHORT = {
    "disruption": ("steps=4", "data.samples=30", "data.validation=10", "batch=7", "data.arguments={length = 12}"),
    "disruption_conv": ("steps=3", "data.samples=16", "data.validation=5", "batch=5", "data.arguments={length = 12}"),
    "seismic": ("steps=3", "data.samples=9", "data.validation=2", "batch=4", "data.arguments={size = 32}"),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_cut_run_follows_that_of_one_rank(tmp_path: Path, name: str) -> None:
    changes = ("precision=fp64", *SHORT[name])
    losses, metrics, _ = train(tmp_path / "one", name, *changes)
    for found, measured, _ in shared_pool(2).run(train, tmp_path / "two", name, *changes):
        assert np.allclose(found, losses, rtol=1e-8, atol=0)
        assert measured == pytest.approx(metrics, rel=1e-8)


@pytest.mark.long
def test_half_precision_on_the_wire_halves_bytes_and_keeps_the_area(tmp_path: Path) -> None:
    changes = ("steps=120", "data.validation=256", "data.samples=1920")
    pool = shared_pool(2)
    (_, single, whole), *_ = pool.run(train, tmp_path / "fp32", "disruption", *changes, deadline=300)
    (_, half, bytes_half), *_ = pool.run(
        train, tmp_path / "fp16", "disruption", *changes, "gradients.wire=fp16", deadline=300
    )
    assert single["auc"] > 0.8
    assert abs(half["auc"] - single["auc"]) < 0.01
    assert bytes_half < 0.55 * whole


def test_shots_show_what_comes_before_a_disruption() -> None:
    shots, box = Shots(0, 64), (Interval(0, CHANNELS), Interval(0, 64))
    kinds = [shots.disrupts(number) for number in range(200)]
    assert 80 < sum(kinds) < 120
    mode = [float(shots.signals(number, box)[5, -8:].mean()) for number in range(200)]
    apart = [np.mean([m for m, k in zip(mode, kinds, strict=True) if k is which]) for which in (True, False)]
    assert apart[0] > apart[1] + 0.5
    part = shots.signals(3, (Interval(2, SCALARS), Interval(10, 20)))
    assert np.array_equal(part, shots.signals(3, box)[2:SCALARS, 10:20])
    assert shots.alarm(kinds.index(True), (Interval(0, 64),)).sum() == 16


def test_the_published_network_has_70_million_weights() -> None:
    with torch.device("meta"):
        model = DisruptionNet(**WORKLOADS["disruption"].full.network)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(70e6, rel=0.01)


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    torch.manual_seed(0)
    scores, truth = torch.randn(60).round(decimals=1), torch.rand(60) < 0.4
    meter = RocCurve()
    meter.add(scores[:25], truth[:25].double())
    meter.add(scores[25:], truth[25:].double())
    better = scores[truth][:, None] - scores[~truth]
    wanted = float((better > 0).double().mean() + 0.5 * (better == 0).double().mean())
    assert meter.result()["auc"] == pytest.approx(wanted, abs=1e-12)
    page = answers({"y": truth[:, None].float().numpy(), "p": scores[:, None].numpy()})
    assert page is not None and f"ROC curve: area {wanted:.4f}" in page


def gradients(parts: int, folder: Path, **more: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    changes = ["precision=fp64", *SHORT["seismic"], "steps=3", f"split={parts}"]
    settings = make_settings({"workload": "seismic", **more}, changes, defaults_of("seismic"), "test")
    trainer = Trainer(settings, folder)
    result = trainer.train()
    return result.losses, {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_parts_of_a_batch_give_its_gradient(tmp_path: Path) -> None:
    """Nine samples in batches of four: the third has one sample, and none spans two epochs."""
    losses, true = gradients(1, tmp_path / "whole")
    for parts in (2, 3, 4):
        found, slopes = gradients(parts, tmp_path / f"{parts}")
        assert np.allclose(found, losses, rtol=1e-12, atol=0)
        assert all(float((slopes[name] - true[name]).abs().max()) < 1e-10 for name in true)


def test_batches_are_split_where_they_do_not_fit(tmp_path: Path) -> None:
    losses, _ = gradients(1, tmp_path / "whole", memory="1GiB")
    found, _ = gradients(0, tmp_path / "parts", memory="2MiB")
    assert np.allclose(found, losses, rtol=1e-12, atol=0)
    with pytest.raises(Exception, match="split = 0, which computes it in parts"):
        gradients(1, tmp_path / "tight", memory="2MiB")


def test_a_batch_norm_is_not_split(tmp_path: Path) -> None:
    told = {"workload": "unet3d", "split": 2, "batch": 2, "steps": 1}
    with pytest.raises(ConfigError, match="batch norm"):
        Trainer(make_settings(told, [], defaults_of("unet3d"), "test"), tmp_path)


@pytest.mark.long
def test_data_four_times_the_memory_train_with_flat_memory(tmp_path: Path) -> None:
    """64 sections of 256 KiB with labels of twice that are 48 MiB; 12 MiB of them are kept."""
    shape = ("batch=2", "data.arguments={size = 256}", "data.samples=64", "data.validation=2", "data.memory=12MiB")
    held = []
    for steps in (8, 64):
        shared_pool(1).run(train, tmp_path / f"{steps}", "seismic", *shape, f"steps={steps}", deadline=300)
        held.append(next(iter(read_log(tmp_path / f"{steps}", "rank")))["memory"])
    assert held[1] - held[0] < 12 << 20


def test_sections_are_the_same_in_parts() -> None:
    sections, whole = Sections(1, 48), Interval(0, 48)
    all_of = sections.section(5, (Interval(0, 1), whole, whole))
    rows, columns = Interval(7, 20), Interval(30, 48)
    assert np.array_equal(sections.section(5, (Interval(0, 1), rows, columns)), all_of[:, 7:20, 30:48])
    labels = sections.labels(5, (whole, whole))
    assert np.array_equal(sections.labels(5, (rows, columns)), labels[7:20, 30:48]) and 0.02 < labels.mean() < 0.6
