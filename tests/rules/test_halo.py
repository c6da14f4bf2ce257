"""Halos that are not glued on: exact to the second derivative, no copy of the tile, half precision too."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.rules import boxes, executor, halo
from halocline.testing import check_rule, peak_bytes, shared_pool
from halocline.testing.compare import relative_error
from halocline.world import mesh as mesh_module
from halocline.world import run_local


def _counted(calls: list[int], run: Callable[..., Tensor], *args: Any) -> Tensor:
    calls.append(1)
    return run(*args)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Small tiles go the way of large ones; the list has an entry for each call that did."""
    calls: list[int] = []
    for module, name in ((halo, "with_halo"), (boxes, "in_boxes")):
        monkeypatch.setattr(executor, name, partial(_counted, calls, getattr(module, name)))
    monkeypatch.setattr(mesh_module, "DEFAULT_CHOICES", hc.Choices(halo_beside=0))
    executor._plans.clear()
    yield calls
    executor._plans.clear()


CUTS = [
    ({2: "a"}, {"a": 2}),
    ({2: "a"}, {"a": 4}),
    ({2: "a", 3: "b"}, {"a": 2, "b": 2}),
    ({0: "b", 2: "a"}, {"a": 2, "b": 2}),
]
#: kernel, stride, padding, dilation
DIRECT = [
    (3, 1, 1, 1),
    (5, 1, 2, 1),
    (3, 2, 1, 1),
    (4, 2, 1, 1),
    (3, 1, 2, 2),
    (3, 1, 0, 1),
    (2, 1, 0, 1),
    (7, 3, 2, 1),
    (3, 3, 0, 2),
]
#: kernel, stride, padding, output padding, dilation
BACKWARDS = [(3, 2, 1, 1, 1), (4, 2, 1, 0, 1), (3, 1, 1, 0, 1), (5, 3, 2, 1, 1), (3, 2, 0, 0, 2), (3, 3, 2, 0, 1)]


@pytest.mark.parametrize(("setup", "cut"), list(itertools.product(DIRECT, CUTS)))
def test_convolution(apart: list[int], setup: tuple[int, ...], cut: tuple[dict[int, str], dict[str, int]]) -> None:
    kernel, stride, padding, dilation = setup
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 17, 12), (6, 2, kernel, kernel), (6,)))
    found = check_rule(
        lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, 2),
        *(x, w, b),
        cuts=[cut[0], None, None],
        mesh=cut[1],
        second_order=True,
    )
    assert found.verdict == "exact", found
    assert apart


@pytest.mark.parametrize(("setup", "cut"), list(itertools.product(BACKWARDS, CUTS)))
def test_transposed_convolution(
    apart: list[int], setup: tuple[int, ...], cut: tuple[dict[int, str], dict[str, int]]
) -> None:
    kernel, stride, padding, extra, dilation = setup
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 13, 9), (4, 3, kernel, kernel), (6,)))
    found = check_rule(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, extra, 2, dilation),
        *(x, w, b),
        cuts=[cut[0], None, None],
        mesh=cut[1],
        second_order=True,
    )
    assert found.verdict == "exact", found
    assert apart


POOLS = {
    "max 3/2/1": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max 3/1/1": lambda x: F.max_pool2d(x, 3, 1, 1),
    "max 2/1, ceil": lambda x: F.max_pool2d(x, 2, 1, 0, 1, True),
    "average 3/2/1": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average 3/1/1 without padding": lambda x: F.avg_pool2d(x, 3, 1, 1, False, False),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", POOLS)
def test_pools_in_boxes(apart: list[int], name: str, cut: tuple[dict[int, str], dict[str, int]]) -> None:
    x = torch.randn(2, 3, 20, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = check_rule(POOLS[name], x, cuts=[cut[0]], mesh=cut[1], second_order=True)
    assert found.verdict == "exact", found
    assert apart


def kept_by_pool(size: int) -> float:
    """What stays after the forward of a pool with a halo, over its output."""
    mesh = hc.Mesh(depth=2)
    tile = torch.randn(1, 8, size // 2, size, size, requires_grad=True)
    x = hc.from_tile(tile, mesh, {2: "depth"}, shape=(1, 8, size, size, size))
    kept: list[Tensor] = []
    stays = peak_bytes(lambda: kept.append(F.max_pool3d(x, 3, 2, 1))).end
    return stays / kept[0]._tile.nbytes  # type: ignore[attr-defined]


def test_a_pool_keeps_its_output_and_a_slab() -> None:
    """Its input is somebody else's already: no copy of it with a halo stays."""
    assert max(shared_pool(2).run(kept_by_pool, 32, deadline=60)) < 1.6


def test_three_cut_dims_with_corners(apart: list[int]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 2, 8, 9, 10, dtype=torch.float64), torch.randn(3, 2, 3, 5, 3, dtype=torch.float64)
    mesh, cuts = {"a": 2, "b": 2, "c": 2}, {2: "a", 3: "b", 4: "c"}
    found = check_rule(lambda x, w: F.conv3d(x, w, None, 1, (1, 2, 1)), x, w, cuts=[cuts, None], mesh=mesh)
    assert found.verdict == "exact", found
    assert apart


def test_a_halo_that_spans_several_neighbours(apart: list[int]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(3, 2, 7, dtype=torch.float64)
    found = check_rule(lambda x, w: F.conv1d(x, w, None, 1, 3), x, w, cuts=[{2: "a"}, None], mesh={"a": 4})
    assert found.verdict == "exact", found
    assert apart


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(inplace=True), nn.ConvTranspose2d(8, 2, 3, 2, 1, 1))


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    return y, [p.grad for p in model.parameters()]  # type: ignore[misc]


def test_autocast_computes_in_half_precision_as_on_one_rank(apart: list[int]) -> None:
    x = torch.randn(1, 2, 16, 12, generator=torch.Generator().manual_seed(1))
    built = network()  # once: ranks that are threads share torch's generator
    true, true_gradients = step(copy.deepcopy(built), x)

    def on_rank() -> tuple[Tensor, list[Tensor]]:
        mesh = hc.Mesh(height=2)
        model = hc.distribute(copy.deepcopy(built), mesh)
        y, gradients = step(model, hc.shard(x, mesh, {2: "height"}))
        return hc.gather(y), gradients

    for y, gradients in run_local(2, on_rank):
        assert relative_error(y.float(), true.float()) < 2e-2
        for found, gradient in zip(gradients, true_gradients, strict=True):
            assert found.dtype == torch.float32
            assert relative_error(found, gradient) < 3e-2
    assert apart


def test_channels_last_stays(apart: list[int]) -> None:
    x = torch.randn(1, 4, 16, 12, dtype=torch.float64).to(memory_format=torch.channels_last)
    w = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    true = F.conv2d(x, w, padding=1)

    def on_rank() -> tuple[bool, Tensor]:
        tile = hc.shard(x, hc.Mesh(height=2), {2: "height"})
        y = F.conv2d(tile, w, padding=1)
        return y._tile.is_contiguous(memory_format=torch.channels_last), hc.gather(y)  # type: ignore[attr-defined]

    for kept, y in run_local(2, on_rank):
        assert kept
        assert relative_error(y, true) < 1e-12


def test_the_first_layer_sends_nothing_back(apart: list[int]) -> None:
    """Its input needs no gradient, so there is none to return."""

    def on_rank() -> int:
        mesh = hc.Mesh(height=2)
        model = hc.distribute(nn.Conv2d(2, 3, 3, padding=1), mesh)
        loss = model(hc.shard(torch.ones(1, 2, 8, 8), mesh, {2: "height"})).sum()
        before = mesh.world.traffic.moved_bytes
        with hc.no_sync(model):
            loss.backward()
        return mesh.world.traffic.moved_bytes - before

    assert run_local(2, on_rank) == [0, 0]


def peak_of_convolution(channels: int, size: int, form: torch.memory_format) -> tuple[float, float]:
    """Input and output while the convolution runs, in bytes over theirs: with halo, and torch's own on the tile."""
    mesh = hc.Mesh(depth=2)
    plain, cut = nn.Conv3d(channels, channels, 3, padding=1), nn.Conv3d(channels, channels, 3, padding=1)
    cut = hc.distribute(cut, mesh)
    tile = torch.randn(1, channels, size // 2, size, size).to(memory_format=form).requires_grad_()
    x = hc.from_tile(tile, mesh, {2: "depth"}, shape=(1, channels, size, size, size))
    peaks = [peak_bytes(run).peak for run in (lambda: cut(x), lambda: plain(tile))]
    ours, torchs = ((peak + tile.nbytes) / (2 * tile.nbytes) for peak in peaks)
    return ours, torchs


def test_a_convolution_holds_input_and_output_and_little_else() -> None:
    """Channels last; laid out otherwise, torch's CPU convolution makes a copy of its own."""
    found = shared_pool(2).run(peak_of_convolution, 32, 48, torch.channels_last_3d, deadline=60)
    print(f"peak over input and output tile: {max(found)[0]:.3f}")
    assert max(found)[0] <= 1.25
    for ours, torchs in shared_pool(2).run(peak_of_convolution, 32, 48, torch.contiguous_format, deadline=60):
        assert ours <= 1.05 * torchs


def test_operands_may_be_given_by_name() -> None:
    x, weight = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
    for function in (F.conv1d, F.conv_transpose1d):
        found = check_rule(
            lambda x, w, function=function: function(input=x, weight=w, stride=2),
            x,
            weight,
            cuts=[{2: "height"}, None],
            mesh={"height": 2},
        )
        assert found.verdict == "exact", found
