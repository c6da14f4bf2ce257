"""The built-in networks are those of their papers, at full width by their parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halocline.program import record
from halocline.workloads import WORKLOADS
from halocline.workloads.cosmoflow import CosmoFlow, pool_count
from halocline.workloads.unet3d import UNet3d
from halocline.world import Mesh


def count(model: nn.Module, leave_out: type[nn.Module] | tuple[()] = ()) -> int:
    kept = (module for module in model.modules() if not isinstance(module, leave_out))
    return sum(p.numel() for module in kept for p in module.parameters(recurse=False))


def test_unet3d_has_the_published_weights() -> None:
    with torch.device("meta"):
        model = UNet3d(channels_in=3)
    assert count(model, leave_out=nn.BatchNorm3d) == 19_069_955
    assert round(count(model) / 1e6, 2) == 19.07


@pytest.mark.parametrize(("size", "pools"), [(128, 5), (256, 6), (512, 7)])
def test_cosmoflow_has_the_published_weights_at_every_size(size: int, pools: int) -> None:
    with torch.device("meta"):
        model = CosmoFlow(size=size)
    assert round(count(model) / 1e6, 2) == 9.44
    assert sum(isinstance(module, nn.AvgPool3d) for module in model.modules()) == pools == pool_count([size])


GIB = 2**30


def map_bytes(model: CosmoFlow, size: int) -> int:
    """float32 bytes of the input and of all that convolutions, norms, activations and pools of the features put out."""
    sizes = [4 * 4 * size**3]
    kinds = (nn.Conv3d, nn.BatchNorm3d, nn.LeakyReLU, nn.AvgPool3d)
    for module in model.features.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(lambda module, inputs, output: sizes.append(4 * output.numel()))
    model(torch.zeros(1, 4, size, size, size, device="meta"))
    return sum(sizes)


@pytest.mark.parametrize(
    ("size", "gigaflops", "memory", "with_norm"),
    [(128, 55.6, 0.824, 1.15), (256, 443.8, 6.59, 9.22), (512, 3550, 52.7, 73.8)],
)
def test_cosmoflow_takes_the_published_work_and_memory(
    size: int, gigaflops: float, memory: float, with_norm: float
) -> None:
    """Work: three times forward. Memory: every map and its gradient, and the input with its own once more."""
    volume = torch.zeros(1, 4, size, size, size, device="meta")
    for batch_norm, published in ((False, memory), (True, with_norm)):
        with torch.device("meta"):
            model = CosmoFlow(size=size, batch_norm=batch_norm)
        held = 2 * (map_bytes(model, size) + 4 * volume.numel())
        assert held / GIB == pytest.approx(published, rel=5e-3)
    found = record(lambda: model(volume), Mesh(data=1))
    work = sum(one.flops for one in found.operations if "convolution" in one.name or "mm" in one.name)
    assert 3 * work / 1e9 == pytest.approx(gigaflops, rel=2e-3)


ANSWERS = {"unet3d": (1, 3, 32, 32, 32), "cosmoflow": (1, 4), "stemdl": (1, 1, 32, 32)}


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_small_one_fits_its_default_input(name: str) -> None:
    workload = WORKLOADS[name]
    model, volume = workload.factory(**workload.fit(workload.shapes)), torch.randn(workload.shapes[0])
    if workload.tokens is not None:
        volume = torch.randint(workload.tokens, volume.shape)
    assert count(model) < 1_000_000
    output = model(volume)
    if name in ANSWERS:
        assert output.shape == ANSWERS[name]
    assert output.shape[0] == volume.shape[0] and output.isfinite().all()
    output.sum().backward()


@pytest.mark.parametrize("size", [8, 16, 31, 36, [16, 24, 40]])
def test_cosmoflow_takes_odd_sizes(size: int | list[int]) -> None:
    shape = [size] * 3 if isinstance(size, int) else size
    model = CosmoFlow(width=1, size=size, channels_in=2, parameters=3, batch_norm=True, dropout=0.2)
    assert model(torch.randn(2, 2, *shape)).shape == (2, 3)
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 2


def test_cosmoflow_starts_with_a_signal_that_reaches_its_output() -> None:
    torch.manual_seed(0)
    model = CosmoFlow(width=4, size=32)
    first, second = (model(torch.randn(1, 4, 32, 32, 32)) for _ in range(2))
    assert (first - second).abs().max() > 1e-3


def test_unet3d_says_which_sizes_it_takes() -> None:
    with pytest.raises(ValueError, match="use multiples of 8"):
        UNet3d(width=1)(torch.zeros(1, 1, 8, 8, 12))
