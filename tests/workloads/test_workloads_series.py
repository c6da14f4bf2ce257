"""Plasma signals and seismic sections: cut runs follow one rank, half precision on the wire, batches in parts."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halocline.data import Loader
from halocline.data.loading.pipeline import Batch
from halocline.data.tools.convert import convert
from halocline.errors import ConfigError
from halocline.geometry import Interval
from halocline.testing import shared_pool
from halocline.train.config import make_settings
from halocline.train.precision import Precision
from halocline.train.reporting.answers import answers
from halocline.train.splitting import PartsCheck
from halocline.train.task import defaults_of
from halocline.train.trainer import Trainer
from halocline.workloads import WORKLOADS
from halocline.workloads.disruption import CHANNELS, SCALARS, DisruptionNet, Shots
from halocline.workloads.metrics import RocCurve
from halocline.workloads.seismic import Sections, fields
from halocline.world import Label, Mesh, Summed, this_world


def train(folder: Path, workload: str, *changes: str) -> tuple[list[float], dict[str, float], list[int]]:
    """Losses, metrics and bytes of each sum of gradients on this rank. On every rank of whatever calls it."""
    torch.set_num_threads(1)
    settings, sent = make_settings({"workload": workload}, list(changes), defaults_of(workload), "test"), []

    def listen(event: object) -> None:
        if isinstance(event, Summed) and event.label.channel.startswith("gradients"):
            sent.append(event.bytes)

    trainer = Trainer(settings, folder)
    with trainer.mesh.world.events.listening(listen):
        result = trainer.train()
    return result.losses, result.metrics, sent


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
    # Deterministic, so that no measured time decides into how many sums the gradients of a step go.
    changes = ("steps=120", "data.validation=256", "data.samples=1920", "gradients.deterministic=true")
    pool = shared_pool(2)
    (_, single, whole), *_ = pool.run(train, tmp_path / "fp32", "disruption", *changes, deadline=300)
    (_, half, bytes_half), *_ = pool.run(
        train, tmp_path / "fp16", "disruption", *changes, "gradients.wire=fp16", deadline=300
    )
    assert single["auc"] > 0.8
    assert abs(half["auc"] - single["auc"]) < 0.01
    # The first step is recorded and the second finds the range of each bucket, both in full precision.
    assert len(bytes_half) == len(whole) == 120
    assert bytes_half[:2] == whole[:2] and all(
        2 * narrow == wide for narrow, wide in zip(bytes_half[2:], whole[2:], strict=True)
    )


@pytest.mark.gpu
@pytest.mark.long
def test_half_precision_on_a_gpu_keeps_the_area(tmp_path: Path) -> None:
    """Training in fp16 by autocast with a scaled loss, against fp32 on the same device."""
    changes = ("steps=200", "data.validation=512", "data.samples=3200")
    _, single, _ = train(tmp_path / "fp32", "disruption", *changes, "precision=fp32")
    _, half, _ = train(tmp_path / "fp16", "disruption", *changes, "precision=fp16")
    assert single["auc"] > 0.8
    assert abs(half["auc"] - single["auc"]) < 0.01


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
    for scored, classes in ((scores, torch.zeros(60)), (scores, torch.ones(60)), (scores / 0 * 0, truth.double())):
        meaningless = RocCurve()
        meaningless.add(scored, classes)
        assert meaningless.result().keys() == meter.result().keys()
        assert all(value != value for value in meaningless.result().values())
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


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Mixing(nn.Module):
    """Every sample less the mean of its batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def sum_of_squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().sum()


def some_ignored(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch["y"], ignore_index=0)


def of_each(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch["y"])


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    ("network", "loss", "words"),
    [
        (nn.Identity(), of_each, ""),
        (nn.Dropout(0.5), of_each, ""),
        (nn.Identity(), sum_of_squares, "no mean over samples"),
        (nn.Identity(), some_ignored, "no mean over samples"),
        (Mixing(), of_each, "mixes the samples of a batch"),
    ],
    ids=["mean", "dropout", "sum", "ignored", "mixing"],
)
def test_a_batch_whose_parts_give_another_gradient_is_refused(
    network: nn.Module, loss: Any, words: str, precision: str
) -> None:
    draw = torch.Generator().manual_seed(3)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    x, y = torch.randn(5, 3, 6, generator=draw, dtype=dtype), torch.randint(0, 3, (5, 6), generator=draw)
    parts = [
        Batch(0, 0, tuple(piece), {"x": x[piece], "y": y[piece]}, 0)
        for piece in ([0, 1], [2, 3], [4])
    ]  # fmt: skip
    settings = make_settings({"workload": "seismic"}, ["batch=5"], defaults_of("seismic"), "test")
    check = PartsCheck(network, settings, 2, Precision(precision, torch.device("cpu")))
    state = torch.get_rng_state()
    if words:
        with pytest.raises(ConfigError, match=words):
            check(parts, loss)
    else:
        for _ in range(4):
            check(parts, loss)
    assert network.training and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("ranks", "cut"), [(1, "mesh.N=1"), (2, "mesh.N=2"), (2, "mesh.H=2")])
def test_a_run_in_parts_refuses_a_loss_with_weights_of_classes(tmp_path: Path, ranks: int, cut: str) -> None:
    with pytest.raises(Exception, match=r"split: the loss of a batch is .* weights of classes"):
        shared_pool(ranks).run(in_parts, tmp_path, cut)


def in_parts(folder: Path, cut: str) -> None:
    if this_world().rank == 0:
        for name, field in fields(6, 0, 32).items():
            convert(field.source, folder / f"{name}.zarr")
    this_world().sum(torch.zeros(1), tuple(range(this_world().size)), Label("written", "test"))
    changes = [f"data.x={folder / 'x.zarr'}", f"data.y={folder / 'y.zarr'}", "data.validation=0", "batch=4", "split=2"]
    own = {"model": "halocline.workloads.seismic:SeismicUNet", "loss": "torch.nn:CrossEntropyLoss"}
    own["loss_options"] = {"weight": [1.0, 5.0]}  # type: ignore[assignment]
    changes += ["steps=1", "network={width = 4}", cut]
    Trainer(make_settings(own, changes, {}, "test"), folder / "run").train()


@pytest.mark.long
def test_data_four_times_the_memory_are_streamed_with_flat_memory() -> None:
    """64 sections of 256 KiB with labels of twice that are 48 MiB; 12 MiB of them are kept."""
    held = shared_pool(1).run(streamed, deadline=300)[0]
    assert held[-1] - held[0] < 6 << 20


def streamed() -> list[int]:
    """The most memory of this process in each of three epochs."""
    held = []
    with Loader(fields(64, 0, 256), Mesh(data=1), batch=2, cut={}, memory=12 << 20, shuffle=True) as loader:
        for _ in range(3):
            seen = []
            for batch in loader:
                seen.append(resident())
                del batch
            held.append(max(seen))
    return held


@pytest.mark.trial
@pytest.mark.parametrize("kind", ["generated", "zarr"])
def test_training_on_data_four_times_the_memory_has_flat_memory(tmp_path: Path, kind: str) -> None:
    """256 sections of 64 KiB with labels of twice that are 48 MiB, of which 12 MiB are kept.

    In the first quarter of the first epoch the samples that stay are read into their place; from then on nothing grows:
    a batch that stayed in memory would add 1.5 MiB a step, 96 MiB from the first epoch to the last.
    """
    found, resting = shared_pool(1).run(trained_on_sections, tmp_path, kind, deadline=300)[0]
    epochs = [max(found[32 * epoch + 8 : 32 * epoch + 32]) for epoch in range(3)]
    assert len(found) == 96 and epochs[-1] - epochs[0] < 8 << 20, [each >> 20 for each in epochs]
    assert 0 < resting <= 12 << 20


def trained_on_sections(folder: Path, kind: str) -> tuple[list[int], int]:
    """Bytes of this process after each step of three epochs, and those that the loader keeps at the end."""
    torch.set_num_threads(1)
    changes = ["steps=96", "batch=8", "data.memory=12MiB", "data.validation=4", "optimizer.lr=1e-3"]
    if kind == "zarr":
        for name, field in fields(260, 0, 128).items():
            convert(field.source, folder / f"{name}.zarr")
        changes += [f"data.x={folder / 'x.zarr'}", f"data.y={folder / 'y.zarr'}", "network={width = 4}"]
        own = {"model": "halocline.workloads.seismic:SeismicUNet", "loss": "torch.nn.functional:cross_entropy"}
        settings = make_settings(own, changes, {}, "test")
    else:
        changes += ["data.samples=256", "data.arguments={size = 128}"]
        settings = make_settings({"workload": "seismic"}, changes, defaults_of("seismic"), "test")
    seen: list[int] = []
    trainer = Trainer(settings, folder / "run", lambda kind, _: seen.append(resident()) if kind == "step" else None)
    trainer.train()
    return seen, trainer.loader.report.held_bytes


def test_a_zarr_store_gives_the_steps_of_the_generated_one(tmp_path: Path) -> None:
    losses, _ = gradients(2, tmp_path / "generated")
    made = fields(9, 0, 32)
    for name, field in made.items():
        convert(field.source, tmp_path / f"{name}.zarr")
    changes = [f"data.x={tmp_path / 'x.zarr'}", f"data.y={tmp_path / 'y.zarr'}", "data.validation=0", "batch=4"]
    changes += ["precision=fp64", "steps=3", "split=2", "network={width = 4}", "optimizer={name = 'adam', lr = 5e-3}"]
    own = {"model": "halocline.workloads.seismic:SeismicUNet", "loss": "torch.nn.functional:cross_entropy"}
    found = Trainer(make_settings(own, changes, {}, "test"), tmp_path / "zarr").train().losses
    assert np.allclose(found, losses, rtol=1e-12, atol=0)


def test_sections_are_the_same_in_parts() -> None:
    sections, whole = Sections(1, 48), Interval(0, 48)
    all_of = sections.section(5, (Interval(0, 1), whole, whole))
    rows, columns = Interval(7, 20), Interval(30, 48)
    assert np.array_equal(sections.section(5, (Interval(0, 1), rows, columns)), all_of[:, 7:20, 30:48])
    labels = sections.labels(5, (whole, whole))
    assert np.array_equal(sections.labels(5, (rows, columns)), labels[7:20, 30:48]) and 0.02 < labels.mean() < 0.6
