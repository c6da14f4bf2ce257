"""Fourier transforms over cut dims, complex tensors, and networks that work between them."""

from __future__ import annotations

import pytest
import torch
from layouts import compared, evaluated, lines, number
from torch import Tensor

from halocline.testing.compare import check_rule

#: Real results; of complex ones, both parts.
CALLS = """
torch.fft.fft(x)
torch.fft.fft(x, 8, 1, "ortho")
torch.fft.ifft(x, dim=0)
torch.fft.rfft(x, dim=1)
torch.fft.irfft(torch.fft.rfft(x, dim=1), 6, dim=1)
torch.fft.irfft(x, n=7, dim=0)
torch.fft.hfft(x, dim=1)
torch.fft.ihfft(x, dim=1)
torch.fft.fft2(x)
torch.fft.ifft2(x, (4, -1), (0, 1), norm="forward")
torch.fft.rfft2(x)
torch.fft.rfftn(x)
torch.fft.rfftn(x, (6, 5), norm="ortho")
torch.fft.irfftn(torch.fft.rfftn(x), x.shape)
torch.fft.irfftn(x)
torch.fft.irfft2(torch.fft.rfft2(x, dim=(0, 1)), dim=(0, 1))
torch.fft.fftn(x, dim=(2, 0))
torch.fft.ifftn(torch.fft.fftn(x))
torch.fft.hfftn(x)
torch.fft.hfft2(x)
torch.fft.ihfftn(x)
torch.fft.ihfft2(x)
torch.fft.fftshift(x)
torch.fft.ifftshift(x, dim=(1, 2))
torch.fft.fftn(x).real + torch.fft.fftn(x).imag
torch.fft.fftn(x).abs() * torch.fft.fftn(x).angle()
torch.complex(x, 2 * x).conj()
torch.polar(x.exp(), x)
torch.fft.fft(x, dim=1).var(1)
torch.view_as_complex(torch.stack([x, x * x], -1)).mul(1j)
torch.einsum("bij,bkj->bik", torch.fft.fft(x), torch.fft.fft(x).conj())
torch.stft(x[:, :, 0], 4, 1, window=torch.hann_window(4).double(), return_complex=True)
torch.stft(x.flatten(1), 8, 3, 6, torch.ones(6).double(), normalized=True, return_complex=True)
torch.stft(x.flatten(1), 8, window=torch.ones(8).double(), center=False, onesided=False, return_complex=True)
"""


@pytest.mark.parametrize("call", lines(CALLS))
def test_as_on_one_rank(call: str) -> None:
    function = evaluated(call)

    def parts(x: Tensor) -> Tensor:
        result = function(x)
        return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result

    compared(call, parts, number(4, 6, 5))


def test_one_cut_dim_is_whole_at_a_time() -> None:
    """Of three transformed dims, two cut: a rank never has more than one of them whole."""
    x = number(8, 8, 8)
    found = check_rule(torch.fft.fftn, x, cuts=[{0: "a", 1: "b"}], mesh={"a": 2, "b": 2})
    assert found.verdict == "exact"
    assert found.gathered_bytes <= 2 * x.numel() * 16 // 2


def spectral(x: Tensor, weight: Tensor, modes: int) -> Tensor:
    """A layer of a Fourier neural operator: the lowest modes are mixed over channels, all others dropped.

    Of the last dim half the modes are there; of each other the low ones lie at both ends.
    """
    space = tuple(range(2, x.ndim))
    waves = torch.fft.rfftn(x, dim=space)
    mixed = torch.zeros_like(waves)
    letters = "xyz"[: len(space)]
    for corner in range(2 ** (len(space) - 1)):
        ends = [slice(None, modes) if corner >> i & 1 else slice(-modes, None) for i in range(len(space) - 1)]
        part = (slice(None), slice(None), *ends, slice(None, modes))
        mixed[part] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", waves[part], weight[corner])
    return torch.fft.irfftn(mixed, s=x.shape[2:], dim=space)


@pytest.mark.parametrize(
    ("size", "cut", "mesh"),
    [
        ((2, 3, 11), {2: "a"}, {"a": 3}),
        ((2, 3, 10), {0: "data", 2: "a"}, {"data": 2, "a": 2}),
        ((2, 2, 8, 7), {2: "a"}, {"a": 3}),
        ((2, 2, 8, 7), {2: "a", 3: "b"}, {"a": 2, "b": 2}),
        ((3, 2, 6, 6), {0: "data", 3: "a"}, {"data": 2, "a": 2}),
        ((1, 2, 6, 5, 6), {2: "a", 3: "b"}, {"a": 2, "b": 3}),
        ((1, 2, 6, 5, 6), {4: "a"}, {"a": 4}),
    ],
)
def test_fourier_neural_operator(size: tuple[int, ...], cut: dict[int, str], mesh: dict[str, int]) -> None:
    modes, spatial = 2, len(size) - 2
    real = number(2 ** (spatial - 1), size[1], size[1], *[modes] * spatial, 2)
    skip = number(size[1], size[1], seed=4)

    def block(x: Tensor, real: Tensor, skip: Tensor) -> Tensor:
        beside = torch.einsum("bi...,io->bo...", x, skip)
        return torch.nn.functional.gelu(spectral(x, torch.view_as_complex(real), modes) + beside)

    found = check_rule(block, number(*size), real, skip, cuts=[cut], mesh=mesh, second_order=True)
    assert found.verdict == "exact", found
