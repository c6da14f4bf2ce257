"""The built-in networks are those of their papers, at full width by their parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halocline.workloads import WORKLOADS
from halocline.workloads.cosmoflow import CosmoFlow, pool_count
from halocline.workloads.unet3d import UNet3d


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


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_small_one_fits_its_default_input(name: str) -> None:
    workload = WORKLOADS[name]
    model, volume = workload.factory(**workload.fit(workload.shapes)), torch.randn(workload.shapes[0])
    assert count(model) < 1_000_000
    output = model(volume)
    assert output.shape == ((1, 3, *volume.shape[2:]) if name == "unet3d" else (1, 4))
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
