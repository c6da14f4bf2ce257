"""Workloads' data and losses: the same numbers for every box, and training cut over ranks as on one."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

import halocline as hc
from halocline.data import Field, Loader
from halocline.geometry import Interval, whole
from halocline.random import reproducible
from halocline.testing import run_local
from halocline.workloads import cosmoflow, unet3d, universes, volumes
from halocline.workloads.workload import Workload

AXES = {"data": "N", "depth": "D", "height": "H", "width": "W"}
STEPS, BATCH = 2, 2


# ---- shared with the tests of other workloads ----


def whole_sample(field: Field, sample: int) -> Any:
    store = field.store
    out = np.empty(store.shape, store.dtype)
    store.read_stored(sample, tuple(map(whole, store.shape)), out)
    return out


def part(field: Field, sample: int, box: tuple[Interval, ...]) -> Any:
    out = np.empty([i.size for i in box], field.store.dtype)
    field.store.read_stored(sample, box, out)
    return out


def check_boxes(fields: Mapping[str, Field], boxes: int = 12) -> None:
    """Bit for bit, also after a trip to another process; and no two samples alike."""
    chance = np.random.default_rng(0)
    for field in pickle.loads(pickle.dumps(fields)).values():
        true = whole_sample(field, 1)
        assert not np.array_equal(true, whole_sample(field, 0))
        for _ in range(boxes):
            ends = [sorted(chance.choice(size + 1, 2, replace=False)) for size in field.store.shape]
            box = tuple(Interval(int(lo), int(hi)) for lo, hi in ends)
            assert np.array_equal(part(field, 1, box), true[tuple(slice(*i) for i in box)])


def check_cut(workload: Workload, network: Mapping[str, Any], data: Mapping[str, Any], sizes: dict[str, int]) -> None:
    """Two steps of training and then what is measured: on thread ranks as on one, in float64."""
    torch.manual_seed(0)
    weights = workload.factory(**network).double().state_dict()

    @reproducible(0)  # dropout draws the same for every cut
    def train(sizes: dict[str, int]) -> list[float]:
        mesh = hc.Mesh(**sizes)
        model = workload.factory(**network).double()
        model.load_state_dict(weights)
        model = hc.distribute(model, mesh)
        fields = {
            name: Field(field.store, torch.float64 if field.store.dtype.kind == "f" else None)
            for name, field in workload.data(STEPS * BATCH, seed=2, **data).items()
        }
        loader = Loader(fields, mesh, batch=BATCH, cut={AXES[axis]: axis for axis in sizes})
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        numbers, meter = [], workload.meter()
        for batch in loader:
            optimizer.zero_grad()
            output = model(batch["x"])
            loss = workload.loss(output, batch)
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
            meter.update(output, batch)
        loader.close()
        sums = [float(p.detach().square().sum()) for p in model.parameters()]
        return [*numbers, *meter.result().values(), *sums]

    true = run_local(1, lambda: train(dict.fromkeys(sizes, 1)))[0]
    for found in run_local(prod(sizes.values()), lambda: train(sizes)):
        assert found == pytest.approx(true, rel=1e-8, abs=1e-10)


# ---- CosmoFlow and the U-Net ----


CASES = {
    "cosmoflow": (cosmoflow.WORKLOAD, {"width": 2, "size": 16, "batch_norm": True}, {"size": 16}),
    "unet3d": (unet3d.WORKLOAD, {"width": 2}, {"size": 16}),
}


@pytest.mark.parametrize("name", CASES)
def test_any_box_is_the_wholes(name: str) -> None:
    workload, _, data = CASES[name]
    check_boxes(workload.data(2, seed=3, **data))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"depth": 2}, {"depth": 2, "height": 2}, {"data": 2, "depth": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_cut_training_is_that_of_one_rank(name: str, sizes: dict[str, int]) -> None:
    check_cut(*CASES[name], sizes)


def test_universes_fluctuate_as_their_parameters_say() -> None:
    fields = universes.universes(16, seed=1, size=32)
    ratios = [
        whole_sample(fields["x"], sample).std(axis=(1, 2, 3)) / universes.deviations(universes.targets(1, sample))
        for sample in range(16)
    ]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.03)
    assert np.var(ratios) < 0.05  # of their logarithms: the scatter of so few waves, 1 / (2 waves)


def test_how_much_a_cube_fluctuates_tells_its_parameters_up_to_their_scatter() -> None:
    size, misses = 16, []
    fields = universes.universes(256, seed=2, size=size)
    for sample in range(256):
        logs = np.log(whole_sample(fields["x"], sample).std(axis=(1, 2, 3)))
        misses.append(universes.SHAPES @ logs / len(logs) / universes.REACH - universes.targets(2, sample))
    assert np.var(misses, axis=0).mean() == pytest.approx(universes.scatter(size), rel=0.25)
    assert universes.scatter(32) > 7 * universes.scatter(64)


def test_lesions_lie_in_organs_and_look_darker() -> None:
    fields = volumes.volumes(4, seed=0, size=32)
    for sample in range(4):
        scan, labels = whole_sample(fields["x"], sample)[0], whole_sample(fields["y"], sample)
        shares = np.bincount(labels.ravel(), minlength=3) / labels.size
        assert shares[volumes.BACKGROUND] > shares[volumes.ORGAN] > shares[volumes.LESION] > 0
        assert scan[labels == volumes.ORGAN].mean() > scan[labels == volumes.LESION].mean() + 0.05


def test_the_loss_of_a_certain_and_right_answer_is_near_zero() -> None:
    truth = torch.randint(0, 3, (2, 4, 4, 4), generator=torch.Generator().manual_seed(0))
    sure = 50.0 * torch.stack([truth == c for c in range(3)], 1)
    assert float(unet3d.loss(sure, {"y": truth})) < 1e-6
    assert float(unet3d.loss(-sure, {"y": truth})) > 1
