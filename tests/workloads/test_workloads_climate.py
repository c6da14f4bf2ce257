"""The networks are the paper's, the weather is the same in every box, and no cut changes an answer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halocline as hc
from halocline.data import Field, Loader, Statistics
from halocline.geometry import Box, Interval, slices, whole
from halocline.program import dry, record
from halocline.testing import run_local
from halocline.workloads import climate, deeplab, tiramisu
from halocline.workloads.workload import Workload

WORKLOADS = {"tiramisu": tiramisu.WORKLOAD, "deeplab": deeplab.WORKLOAD}


def terafloats_to_train(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> float:
    """For one step: three times the convolutions of forward, in 10^12 operations."""
    with dry(0, 1), torch.device("meta"), torch.no_grad():
        model, x = make(), torch.empty(shape)
        found = record(lambda: model(x), hc.Mesh(data=1))
    return 3 * sum(o.flops for o in found.operations if "convolution" in o.name) / 1e12


def convolution_weights(make: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters() if p.dim() == 4)


@pytest.mark.parametrize(
    ("make", "weights", "terafloats"), [(tiramisu.Tiramisu, 7_502_592, 4.188), (deeplab.DeepLab, 43_648_768, 13.02)]
)
def test_the_networks_are_the_published_ones(make: Callable[[], nn.Module], weights: int, terafloats: float) -> None:
    """7.50 and 43.6 million weights in convolutions."""
    assert convolution_weights(make) == weights
    assert terafloats_to_train(make, (1, 16, 768, 1152)) == pytest.approx(terafloats, rel=0.001)


def test_four_channels_and_48_filters_are_published_too() -> None:
    def make() -> nn.Module:
        return tiramisu.Tiramisu(first=48, channels_in=4)

    assert convolution_weights(make) == pytest.approx(7.13e6, rel=0.001)
    assert terafloats_to_train(make, (1, 4, 768, 1152)) == pytest.approx(3.703, rel=0.001)


def test_without_norms_features_are_halved_instead() -> None:
    model = deeplab.DeepLab(**{**deeplab.fit(deeplab.SHAPES), "batch_norm": False})
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert sum(isinstance(module, deeplab.Halve) for module in model.modules()) > 12
    assert model(torch.randn(deeplab.SHAPES[0])).isfinite().all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes_that_do_not_halve_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use multiples of"):
        WORKLOADS[name].factory(**WORKLOADS[name].fit(WORKLOADS[name].shapes))(torch.zeros(1, 16, 32, 36))


# ---- the weather ----


def boxes(shape: tuple[int, ...]) -> list[Box]:
    """Halves, an odd part inside, one column, one pixel."""
    *_, height, width = shape
    planes = [
        (Interval(0, height // 2), whole(width)),
        (Interval(height // 2, height), Interval(width // 2, width)),
        (Interval(5, 18), Interval(7, 44)),
        (whole(height), Interval(width - 1, width)),
        (Interval(13, 14), Interval(3, 4)),
    ]
    return [(*(Interval(c // 3, c - c // 4) for c in shape[:-2]), *plane) for plane in planes]


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_box_has_the_bits_that_it_has_in_the_whole(name: str) -> None:
    store = climate.fields(100, 3, 40, 56, storms=2, rivers=2)[name].store
    for sample in (0, 57, 99):
        sample_whole = store.read_new(sample)
        for box in boxes(store.shape):
            assert np.array_equal(store.read_new(sample, box), sample_whole[slices(box)])


def test_weather_follows_from_the_seed_and_moves_with_time() -> None:
    first, again, other = (climate.fields(50, seed, 48, 64) for seed in (0, 0, 1))
    for name in ("x", "y"):
        store = pickle.loads(pickle.dumps(again[name].store))
        assert np.array_equal(first[name].store.read_new(11), store.read_new(11))
        assert not np.array_equal(first[name].store.read_new(11), other[name].store.read_new(11))
        assert not np.array_equal(first[name].store.read_new(11), first[name].store.read_new(12))
    weather = climate.Weather(0, 768, 1152, 1, 1)
    (before,), (after,) = weather.at(3)[0], weather.at(4)[0]
    assert 0 < abs(after.x - before.x) < 0.05 * 1152


def test_weather_without_storms_is_refused() -> None:
    with pytest.raises(ValueError, match="there must be at least one of each"):
        climate.fields(1, 0, 32, 32, storms=0)


@pytest.mark.parametrize(("samples", "arguments"), [(300, climate.SMALL), (2, {})], ids=["small", "full"])
def test_classes_have_their_shares(samples: int, arguments: dict[str, int]) -> None:
    found = Statistics.of(climate.fields(samples, 5, **arguments)["y"].store, classes=True)
    assert [found.frequencies[label] for label in range(3)] == pytest.approx(climate.FREQUENCIES, rel=0.03)
    assert found.class_weights(3).tolist() == pytest.approx(climate.WEIGHTS, abs=0.03)


def test_the_weights_are_the_papers() -> None:
    store = climate.fields(1, 0, 32, 32)["y"].store
    counted = replace(Statistics.of(store, classes=True), classes={0: 9824, 1: 7, 2: 169})
    assert counted.class_weights(3).tolist() == pytest.approx(climate.WEIGHTS, abs=1e-3)


def test_a_guess_of_background_alone_scores_a_third_and_costs_most_where_storms_are() -> None:
    meter, (batch,) = tiramisu.WORKLOAD.meter(), Loader(climate.fields(2, 0, **climate.SMALL), batch=2, epochs=1)
    guess = torch.zeros(2, 3, 96, 128)
    guess[:, climate.BACKGROUND] = 9.0
    meter.update(guess, batch)
    assert meter.result()["mean_iou"] == pytest.approx(0.327, abs=0.003)
    assert climate.loss(guess, batch) > 5 * torch.nn.functional.cross_entropy(guess, batch["y"])


# ---- cut ----


def in_double(fields: dict[str, Field]) -> dict[str, Field]:
    return {"x": replace(fields["x"], dtype=torch.float64), "y": fields["y"]}


def one_step(
    workload: Workload, network: nn.Module, mesh: hc.Mesh, cut: dict[str, str]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Loss and measures, and the gradient of every parameter; dropout is drawn alike for every cut."""
    model = hc.distribute(deepcopy(network), mesh)
    fields = in_double(workload.data(4, 0, **{**workload.small.data, "height": 32, "width": 32}))
    meter = workload.meter()
    with hc.random.reproducible(1):
        batch = next(iter(Loader(fields, mesh, batch=2, cut=cut, epochs=1)))
        output = model(batch["x"])
        loss = workload.loss(output, batch)
        loss.backward()
    meter.update(output, batch)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), **meter.result()}, gradients


@cache
def alone(name: str) -> tuple[nn.Module, dict[str, float], dict[str, Tensor]]:
    """The network, and its step on one rank."""
    torch.manual_seed(0)
    network = WORKLOADS[name].factory(**WORKLOADS[name].small.network).double()
    return network, *one_step(WORKLOADS[name], network, hc.Mesh(data=1), {"N": "data"})


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "cut"),
    [({"height": 2, "width": 2}, {"H": "height", "W": "width"}), ({"data": 2}, {"N": "data"})],
    ids=["2x2", "data"],
)
@pytest.mark.parametrize("name", WORKLOADS)
def test_cutting_changes_nothing(name: str, sizes: dict[str, int], cut: dict[str, str]) -> None:
    workload, (network, measures, gradients) = WORKLOADS[name], alone(name)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    ranks = int(np.prod(list(sizes.values())))
    for found, tiles in run_local(ranks, lambda: one_step(workload, network, hc.Mesh(**sizes), cut)):
        assert found == pytest.approx(measures, rel=1e-8)
        assert tiles.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert float((tiles[key] - gradient).abs().max()) <= 1e-8 * scale, key
