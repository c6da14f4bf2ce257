"""STEMDL: the network's size by formula, the physics of its data, and that cutting changes nothing."""

from __future__ import annotations

import pytest
import torch
from test_workloads import count
from test_workloads_data import check_boxes, check_cut, whole_sample

from halocline.program import record
from halocline.workloads.diffraction import scans
from halocline.workloads.stemdl import WORKLOAD, FCDenseNet
from halocline.world import Mesh


def convolutions(patterns: int, growth: int, kernel: int, pools: int, layers: int) -> list[tuple[int, int, int, int]]:
    """(channels in, channels out, taps, halvings of the map that they run over), with as many layers in every block."""
    made, taps = growth * layers, kernel**2

    def block(first: int, level: int) -> list[tuple[int, int, int, int]]:
        return [(first + i * growth, growth, taps, level) for i in range(layers)]

    found, channels = [(patterns, growth, taps, 0)], growth
    for level in range(pools):
        found += block(channels, level)
        channels += made
        found.append((channels, channels, 1, level))
    found += block(channels, pools)
    for level in reversed(range(pools)):
        skip = growth + made * (level + 1)
        # A transposed convolution is applied once for each pixel of its input, which is half as wide.
        found += [(made, made, 9, level + 1), *block(made + skip, level)]
    return [*found, (2 * made + growth + made, 1, 1, 0)]


def expected_parameters(*preset: int) -> int:
    """Weights and biases; and two for each channel that a batch norm sees: before all but the first, rises and last."""
    layers = convolutions(*preset)
    weights = sum(i * o * taps + o for i, o, taps, _ in layers)
    normed = [i for i, _, taps, _ in layers[1:-1] if taps in (1, preset[2] ** 2)]
    return weights + 2 * sum(normed)


def expected_flops(size: int, *preset: int) -> float:
    """Two for each multiplication; forward once, backward twice, but none for the gradient of the input."""
    work = [2.0 * i * o * taps * (size >> level) ** 2 for i, o, taps, level in convolutions(*preset)]
    return 3 * sum(work) - work[0]


PRESET = (1024, 128, 5, 3, 2)


def test_the_papers_preset_has_the_parameters_of_the_formula() -> None:
    with torch.device("meta"):
        model = FCDenseNet()
    assert count(model) == expected_parameters(*PRESET) == 39_613_825


def test_the_papers_preset_takes_the_work_of_the_formula() -> None:
    mesh = Mesh(data=1)
    with torch.device("meta"):
        model, x = FCDenseNet(), torch.zeros(1, 1024, 512, 512)
    found = record(lambda: model(x).sum().backward(), mesh)
    convolved = sum(one.flops for one in found.operations if "convolution" in one.name)
    assert convolved == pytest.approx(expected_flops(512, *PRESET), rel=1e-9)
    assert round(convolved / 1e12, 2) == 18.14


def test_a_phase_object_leaves_a_shadow() -> None:
    """Without a specimen the disc is even; with one the patterns of two places are shifted against each other."""
    even = whole_sample(scans(1, phase=0.0, electrons=1e9)["x"], 0)
    inside = even[:, 12:20, 12:20]
    assert float(inside.std()) < 0.1 * float(inside.mean())
    seen = whole_sample(scans(1, phase=0.8, electrons=1e9)["x"], 0)
    first, beside = seen[5, 10:22, 10:22], seen[6, 10:22, 10:22]
    shifted = seen[6, 10:22, 8:20]  # the beam two pixels on, so the shadow two pixels back
    assert (first - shifted).std() < 0.5 * (first - beside).std()


def test_counting_noise_falls_with_the_dose() -> None:
    exact, many, few = (whole_sample(scans(1, electrons=dose)["x"], 0) for dose in (1e12, 1e4, 1e2))
    assert (many - exact).std() < 0.2 * (few - exact).std()


def test_any_box_of_a_scan_is_the_wholes() -> None:
    check_boxes(WORKLOAD.data(2, seed=3, size=16, scan=2))


@pytest.mark.parametrize("sizes", [{"height": 2}, {"height": 2, "width": 2}, {"data": 2, "height": 2}], ids=str)
def test_cut_training_is_that_of_one_rank(sizes: dict[str, int]) -> None:
    check_cut(WORKLOAD, {"patterns": 4, "growth": 4, "kernel": 3, "pools": 2}, {"size": 16, "scan": 2}, sizes)
