"""What ``halocline bench gradients`` trains, and the bound it compares with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import gradients_models
from benchmarks.gradients_case import bound, earliest_finish
from benchmarks.gradients_models import (
    SUBJECTS,
    Layer,
    bytes_of,
    emulated,
    layers_of,
    tensors_of,
)
from benchmarks.gradients_ranks import StepTimes

# ---- what is trained ----


@pytest.mark.parametrize(
    ("name", "tensors", "megabytes"),
    [("resnet18", 62, 46.8), ("resnet50", 161, 102.2), ("resnet24mb", 161, 24.6), ("unet3d", 61, 50.4)],
)
def test_the_networks_are_of_the_size_they_are_known_for(name: str, tensors: int, megabytes: float) -> None:
    assert (tensors_of(name), round(bytes_of(name) / 1e6, 1)) == (tensors, megabytes)


@pytest.mark.parametrize("name", SUBJECTS)
def test_layers_hold_every_parameter_in_its_order(name: str) -> None:
    with torch.device("meta"):
        model = SUBJECTS[name].build()
    layers = layers_of(name)
    listed = [shape for layer in layers for shape in layer.shapes]
    real = [tuple(parameter.shape) for parameter in model.parameters()]
    trained = emulated(layers, 0) if SUBJECTS[name].emulated else model
    assert listed == [tuple(parameter.shape) for parameter in trained.parameters()]
    assert sorted(listed) == sorted(real)


def test_multiplications_of_resnet50_are_the_published() -> None:
    assert sum(layer.multiplications for layer in layers_of("resnet50")) == pytest.approx(4.09e9, rel=0.01)


def test_a_transposed_convolution_multiplies_at_its_input() -> None:
    layer, norm_joined = gradients_models.record_layers(
        nn.Sequential(nn.ConvTranspose3d(2, 3, 2, 2, bias=False), nn.Conv3d(3, 1, 1), nn.BatchNorm3d(1)),
        torch.ones(1, 2, 2, 2, 2),
    )
    assert (layer.multiplications, norm_joined.multiplications) == (2 * 3 * 8 * 8, 3 * 64)
    assert norm_joined.shapes == ((1, 3, 1, 1, 1), (1,), (1,), (1,))


LAYERS = tuple(Layer(str(index), ((2, 3), (index + 1,)), index + 1) for index in range(4))


def test_gradients_come_layer_by_layer_from_the_last() -> None:
    model, came = emulated(LAYERS, 0.02), []
    for index, layer in enumerate(model):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: came.append(index))
    model(torch.ones(1)).sum().backward()
    assert came == [3, 3, 2, 2, 1, 1, 0, 0]


def test_time_is_shared_by_multiplications() -> None:
    assert [layer.seconds for layer in emulated(LAYERS, 1.0)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_gradients_are_nobody_elses_and_accumulate() -> None:
    model = emulated(LAYERS, 0.0)
    (model(torch.ones(1)) * 2).sum().backward()
    first = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kept = [gradient.clone() for gradient in first]
    model.zero_grad()
    (model(torch.ones(1)) * 2).sum().backward()
    for before, copy, parameter in zip(first, kept, model.parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.data_ptr() != before.data_ptr()
        assert torch.equal(parameter.grad, copy) and parameter.grad.shape == parameter.shape
    (model(torch.ones(1)) * 2).sum().backward()
    for copy, parameter in zip(kept, model.parameters(), strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, 2 * copy)
    assert len({copy.flatten()[0].item() for copy in kept}) > 5


# ---- the bound ----


def test_a_wire_waits_for_gradients_and_gradients_for_the_wire() -> None:
    assert earliest_finish([1.0, 2.0, 3.0], [10, 10, 10], 10) == 4  # each goes as it comes
    assert earliest_finish([1.0, 2.0, 3.0], [30, 10, 10], 10) == 6  # from the first on never idle
    assert earliest_finish([3.0, 1.0], [5, 10], 10) == 3.5  # in the order of coming, not of listing
    assert earliest_finish([1.0, 1.0, 5.0], [0, 10, 0], 10) == 5


def test_the_bound_takes_medians_over_rounds_and_the_latest_rank() -> None:
    def step(early: float, late: float) -> StepTimes:
        return StepTimes(1.0, 4.0, 0.5, {0: late, 1: early})

    rounds = [(step(2, 4), step(3, 4)), (step(2, 4), step(3, 4)), (step(9, 9), step(0, 0))]
    assert bound(rounds, [10, 30], 10) == 3 + 4 + 0.5
    assert bound(rounds, [10, 30], 100) == 1 + 4 + 0.5  # backward itself is what takes longest
