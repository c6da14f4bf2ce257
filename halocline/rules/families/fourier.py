"""Fourier transforms: a transformed dim is needed whole. Of several dims, those that are cut are transformed one by
one.

A transform over several dims is a product of transforms over one, in any order. Dims that are not cut go together, in
one call of torch. Each cut dim goes by itself; it is gathered or, usually, its cut moves to a dim that is not being
transformed. A transform from real numbers halves its last dim first, one to real numbers fills it last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recipe import Operand, Recipe, Work
from ..table import composite, refuse, rule, run_for
from .view import bound, flat_ints, normal
from .whole_axis import along

Dims = int | Sequence[int] | None
Sizes = Sequence[int] | None


def _transform(function: Any, input: Operand, n: Any = None, dim: Any = -1, norm: str | None = None) -> Recipe:
    """Over one dim, or over several that are all needed whole."""
    recipe = along(function, input, dim, n, dim, norm)

    def local(work: Work, tile: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """torch's transform of the tile; an empty batch goes through a batch of zeros."""
        if tile.numel():
            return function(tile, n, dim, norm)
        # Libraries of transforms know no empty batch: one of zeros is made, and cut down again.
        some = tile.new_zeros([max(1, size) for size in tile.shape]) + tile.sum()
        result = function(some, n, dim, norm)
        for place, interval in enumerate(work.box):
            result = result.narrow(place, 0, interval.size)
        return result

    return replace(recipe, local=local)


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _function = getattr(torch.fft, _name)
    rule(_function, family="fourier")(bound(_transform, _function))


def _asked(input: Tensor, s: Sizes, dim: Dims) -> dict[int, int | None]:
    """The size of each transformed dim, in order; None where it stays. Without dims, the last ones or all."""
    sizes = None if s is None else list(flat_ints((s,)))
    if dim is None:
        dims = list(range(input.ndim))[0 if sizes is None else -len(sizes) :]
    else:
        dims = [normal(d, input.ndim) for d in flat_ints((dim,))]
    # torch's own error, which one-dim calls would not raise.
    if len(set(dims)) != len(dims):
        raise RuntimeError("FFT dims must be unique")
    if sizes is not None and len(sizes) != len(dims):
        raise RuntimeError("When given, dim and shape arguments must have the same length")
    wanted = [None] * len(dims) if sizes is None else [None if size == -1 else size for size in sizes]
    return dict(zip(dims, wanted, strict=True))


def _cut(input: Tensor, dims: dict[int, Any]) -> list[int]:
    sharding = getattr(input, "sharding", None)
    return [] if sharding is None else [dim for dim in dims if sharding.cuts[dim] is not None]


def _together(function: Any, input: Tensor, asked: dict[int, int | None], norm: str | None) -> Tensor:
    """All these dims at once; sizes that stay are said, since torch takes all or none of them."""
    if not asked:
        return input
    sizes = [input.shape[dim] if size is None else size for dim, size in asked.items()]
    if function is torch.fft.irfftn and [*asked.values()][-1] is None:
        sizes[-1] = 2 * (sizes[-1] - 1)
    call = (input, tuple(sizes), tuple(asked), norm)
    # An earlier step may have made it whole.
    if getattr(input, "sharding", None) is None:
        return function(*call)
    return run_for(function, _transform, *call)


def _complex(inverse: bool, input: Tensor, asked: dict[int, int | None], norm: str | None) -> Tensor:
    """A complex transform: uncut dims together, then each cut dim by itself."""
    one, several = (torch.fft.ifft, torch.fft.ifftn) if inverse else (torch.fft.fft, torch.fft.fftn)
    cut = _cut(input, asked)
    result = _together(several, input, {dim: n for dim, n in asked.items() if dim not in cut}, norm)
    for dim in cut:
        result = one(result, asked[dim], dim, norm)
    return result


def _from_real(input: Tensor, asked: dict[int, int | None], norm: str | None) -> Tensor:
    """The last dim is the one that is halved: it comes first."""
    *_, last = asked
    cut = _cut(input, asked)
    if last in cut:
        # Halved before anything else: half as much to move and compute.
        result, left = torch.fft.rfft(input, asked[last], last, norm), {d: n for d, n in asked.items() if d != last}
    else:
        result = _together(torch.fft.rfftn, input, {d: n for d, n in asked.items() if d not in cut}, norm)
        left = {dim: asked[dim] for dim in cut}
    return _complex(False, result, left, norm)


def _to_real(input: Tensor, asked: dict[int, int | None], norm: str | None) -> Tensor:
    """The halved dim comes last, together with those that are not cut."""
    *_, last = asked
    cut = _cut(input, asked)
    if last in cut:
        result = _complex(True, input, {d: n for d, n in asked.items() if d != last}, norm)
        return torch.fft.irfft(result, asked[last], last, norm)
    result = _complex(True, input, {dim: asked[dim] for dim in cut}, norm)
    return _together(torch.fft.irfftn, result, {d: n for d, n in asked.items() if d not in cut}, norm)


_OTHER_WAY = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}
_KINDS = {
    "fft": lambda x, asked, norm: _complex(False, x, asked, norm),
    "ifft": lambda x, asked, norm: _complex(True, x, asked, norm),
    "rfft": _from_real,
    "irfft": _to_real,
    "hfft": lambda x, asked, norm: _to_real(x.conj(), asked, _OTHER_WAY[norm]),
    "ihfft": lambda x, asked, norm: _from_real(x, asked, _OTHER_WAY[norm]).conj_physical(),
}


def _register(kind: str, transform: Any) -> None:
    """Register a transform over two dims and over any dims."""

    def over_two(input: Tensor, s: Sizes = None, dim: Dims = (-2, -1), norm: str | None = None) -> Tensor:
        return over_all(input, s, dim, norm)

    def over_all(input: Tensor, s: Sizes = None, dim: Dims = None, norm: str | None = None) -> Tensor:
        return transform(input, _asked(input, s, dim), norm)

    composite(getattr(torch.fft, f"{kind}2"), family="fourier")(over_two)
    composite(getattr(torch.fft, f"{kind}n"), family="fourier")(over_all)


for _name, _kind in _KINDS.items():
    _register(_name, _kind)


def _shifted(input: Tensor, dim: Dims, centre: int) -> Tensor:
    dims = list(range(input.ndim)) if dim is None else list(flat_ints((dim,)))
    return input.roll([(input.shape[d] + centre) // 2 for d in dims], dims)


@composite(torch.fft.fftshift, family="fourier")
def fftshift(input: Tensor, dim: Dims = None) -> Tensor:
    """A roll by half of each dim."""
    return _shifted(input, dim, 0)


@composite(torch.fft.ifftshift, family="fourier")
def ifftshift(input: Tensor, dim: Dims = None) -> Tensor:
    """The roll back."""
    return _shifted(input, dim, 1)


@composite(torch.stft, Tensor.stft, family="fourier")
def stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """Windows slide over the signal, which may be cut; each is transformed by itself."""
    if align_to_window is not None:
        raise refuse(torch.stft, "align_to_window shifts windows against the signal", "use center=True, or pad first")
    if return_complex is None and not input.is_complex():
        raise RuntimeError("stft requires the return_complex parameter be given for real inputs")
    length, hop = win_length or n_fft, hop_length or n_fft // 4
    # F.pad reflects tensors of three dims and more only.
    if center:
        wide = F.pad(input.reshape([1] * (3 - input.ndim) + list(input.shape)), (n_fft // 2, n_fft // 2), pad_mode)
        input = wide.reshape([*input.shape[:-1], wide.shape[-1]])
    shape = torch.ones(length, device=input.device, dtype=input.real.dtype) if window is None else window
    before = (n_fft - length) // 2
    frames = input.unfold(-1, n_fft, hop) * F.pad(shape, (before, n_fft - length - before))
    one_side = not frames.is_complex() if onesided is None else onesided
    norm = "ortho" if normalized else "backward"
    waves = (torch.fft.rfft if one_side else torch.fft.fft)(frames, norm=norm).transpose(-1, -2)
    return waves if return_complex or return_complex is None else torch.view_as_real(waves)
