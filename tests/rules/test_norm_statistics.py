"""Statistics of a tile for norms: to the last digits of the tile's dtype, whichever kernel of torch computes them."""

import pytest
import torch

from halocline.rules.families.normalize import _moments_of_each_k

N = 1 << 15
SHAPES = [(N, 3), (N, 3, 1), (N, 3, 1, 1), (2, 3, 64, 64), (1, 3, 32, 32, 32), (40_000, 2, 2)]
DISTRIBUTIONS = [(0.0, 1.0), (3.0, 1.0), (300.0, 1.0), (1e6, 1.0), (0.0, 1e19), (5.0, 1e-8)]


def check(x: torch.Tensor, within: float = 1e-6) -> None:
    """Against float64, relative to the largest deviation's square."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    variance, mean = torch.var_mean(x.double(), dims, correction=0)
    elements, found, spread = _moments_of_each_k(x)
    count = x.numel() // x.shape[1]
    assert elements.tolist() == [count] * x.shape[1]
    assert ((found - mean).abs() <= within * (mean.abs() + variance.sqrt())).all()
    assert ((spread / count - variance).abs() <= within * variance).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last"])
@pytest.mark.parametrize(
    ("centre", "scale"), [(0.0, 1.0), (3.0, 1.0), (300.0, 1.0), (1e6, 1.0), (0.0, 1e19), (5.0, 1e-8)]
)
def test_statistics_keep_their_digits(shape: tuple[int, ...], layout: str, centre: float, scale: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale + centre
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif x.ndim >= 4 and layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    check(x)
    check(x.double(), within=1e-12 if centre < 1e6 else 1e-9)
    check(x.bfloat16())


def test_channels_without_deviation_and_with_no_number() -> None:
    x = torch.randn(2, 4, 96, 96)
    x[:, 0], x[:, 1] = 0.0, 7.0
    x[0, 2, 0, 0] = float("nan")
    _, mean, spread = _moments_of_each_k(x)
    assert mean[0] == 0.0 == spread[0]
    assert mean[1] == 7.0 and spread[1] == 0.0
    assert mean[2].isnan() and spread[2].isnan()
    assert spread[3].isfinite()
