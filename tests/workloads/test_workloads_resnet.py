"""ResNet-50 and -101 have the published sizes; striped images are the same in every box; no cut changes an answer."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.data import Loader
from halocline.geometry import Interval, slices
from halocline.program import dry, record
from halocline.testing import run_local
from halocline.workloads.resnet import RESNET50, RESNET101, fields, fit
from halocline.workloads.workload import Workload

WORKLOADS = {"resnet50": RESNET50, "resnet101": RESNET101}


@pytest.mark.parametrize(
    ("workload", "parameters", "products"), [(RESNET50, 25_557_032, 4.09e9), (RESNET101, 44_549_160, 7.80e9)]
)
def test_the_networks_are_the_published_ones(workload: Workload, parameters: int, products: float) -> None:
    with dry(0, 1), torch.device("meta"), torch.no_grad():
        model, x = workload.factory(), torch.empty(1, 3, 224, 224)
        found = record(lambda: model(x), hc.Mesh(data=1))
    assert sum(p.numel() for p in model.parameters()) == parameters
    multiplied = sum(o.flops for o in found.operations if "convolution" in o.name or "mm" in o.name) / 2
    assert multiplied == pytest.approx(products, rel=0.001)


def test_images_follow_from_seed_and_sample_in_every_box() -> None:
    made, again = fields(20, 3, size=40, classes=10), pickle.loads(pickle.dumps(fields(20, 3, size=40, classes=10)))
    box = (Interval(1, 3), Interval(7, 40), Interval(11, 12))
    for sample in (0, 19):
        image = made["x"].store.read_new(sample)
        assert np.array_equal(again["x"].store.read_new(sample, box), image[slices(box)])
        assert np.array_equal(made["y"].store.read_new(sample), again["y"].store.read_new(sample))
    assert not np.array_equal(made["x"].store.read_new(0), made["x"].store.read_new(1))


def test_all_classes_occur_and_look_different() -> None:
    made = fields(200, 0, size=32, classes=10)
    labels = [int(made["y"].store.read_new(sample)[0]) for sample in range(200)]
    assert set(labels) == set(range(10))
    spectra = {label: np.abs(np.fft.rfft2(made["x"].store.read_new(labels.index(label))[0])) for label in range(10)}
    peaks = {tuple(np.unravel_index(spectrum.argmax(), spectrum.shape)) for spectrum in spectra.values()}
    assert len(peaks) == 10


def one_step(
    workload: Workload, network: nn.Module, mesh: hc.Mesh, cut: dict[str, str]
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, accuracy, and the gradient of every parameter."""
    model, meter = hc.distribute(deepcopy(network), mesh), workload.meter()
    made = workload.data(4, 0, **{**workload.small.data, "size": 32})
    made["x"] = replace(made["x"], dtype=torch.float64)
    batch = next(iter(Loader(made, mesh, batch=4, cut=cut, epochs=1)))
    output = model(batch["x"])
    loss = workload.loss(output, batch)
    loss.backward()
    meter.update(output, batch)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), meter.result()["accuracy"], gradients


@cache
def alone(name: str) -> tuple[nn.Module, float, float, dict[str, Tensor]]:
    """The network, and its step on one rank."""
    torch.manual_seed(0)
    network = WORKLOADS[name].factory(**WORKLOADS[name].small.network).double()
    return network, *one_step(WORKLOADS[name], network, hc.Mesh(data=1), {"N": "data"})


@pytest.mark.parametrize(
    ("name", "sizes", "cut"),
    [
        ("resnet50", {"height": 2, "width": 2}, {"H": "height", "W": "width"}),
        ("resnet50", {"data": 2}, {"N": "data"}),
        ("resnet101", {"data": 2, "width": 2}, {"N": "data", "W": "width"}),
    ],
    ids=["resnet50 2x2", "resnet50 data", "resnet101 both"],
)
def test_cutting_changes_nothing(name: str, sizes: dict[str, int], cut: dict[str, str]) -> None:
    workload, (network, loss, accuracy, gradients) = WORKLOADS[name], alone(name)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    ranks = int(np.prod(list(sizes.values())))
    for found_loss, found_accuracy, found in run_local(
        ranks, lambda: one_step(workload, network, hc.Mesh(**sizes), cut)
    ):
        assert (found_loss, found_accuracy) == pytest.approx((loss, accuracy), rel=1e-8)
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert float((found[key] - gradient).abs().max()) <= 1e-8 * scale, key


def test_a_small_one_fits_the_default_input() -> None:
    output = RESNET101.factory(**fit(RESNET101.shapes))(torch.randn(RESNET101.shapes[0]))
    assert output.shape == (2, 10)
