"""What a piece of its input adds to a convolution: all that the halo form by linearity has to know.

Everything outside the piece counts as zero. A slab beside the tile reaches few outputs, through few taps of the kernel;
the tile itself reaches all, in one call, with torch's own padding where that is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Box, Interval
from ..recipe import LinearPart

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Along(NamedTuple):
    """One spatial dim of a part: outputs reached, taps used, padding that torch does, and what is left to us.

    ``more`` is added before and after: to the piece, or to the result where the convolution is transposed.
    """

    out: Interval
    taps: Interval
    padding: int = 0
    extra: int = 0
    more: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Convolve:
    """The arguments of a batched convolution over ``spatial`` dims, those of a transposed one included."""

    function: Callable[..., Tensor]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    transposed: bool = False

    def linear_part(self, out: Box, piece: Box, main: bool) -> LinearPart:
        """What ``piece`` adds to the output box ``out`` (both global). The ``main`` piece reaches all of it."""
        find = self._transposed if self.transposed else self._direct
        along = [find(i, out[2 + i], piece[2 + i], main) for i in range(len(self.kernel))]
        if any(line.taps.empty or line.out.empty for line in along):
            nothing = (slice(0, 0),)
            return LinearPart(nothing, nothing, _Nothing())
        thin = self._thin(along, piece[2:]) if not main else None
        sees = (slice(None), slice(None), *(slice(a.taps.lo, a.taps.hi) for a in along))
        local = [a.out.shift(-o.lo) for a, o in zip(along, out[2:], strict=True)]
        where = (slice(None), slice(None), *(slice(i.lo, i.hi) for i in local))
        kept = [(i, a) for i, a in enumerate(along) if i != thin]
        options = _Options(
            stride=[self.stride[i] for i, _ in kept],
            padding=[a.padding for _, a in kept],
            dilation=[self.dilation[i] for i, _ in kept],
            extra=[a.extra for _, a in kept],
            groups=self.groups,
        )
        pads = [side for _, a in reversed(kept) for side in a.more]
        function = self.function if thin is None else _FLAT[self.function]
        kind = _TransposedPart if self.transposed else _DirectPart
        return LinearPart(where, sees, kind(function, options, pads, None if thin is None else 2 + thin))

    def _thin(self, along: list[Along], piece: Box) -> int | None:
        """A dim along which one plane meets one tap: without it torch's 2D code is two to four times faster."""
        if self.function not in _FLAT:
            return None
        planes = (
            i
            for i, a in enumerate(along)
            if piece[i].size == a.taps.size == a.out.size == 1 and not (a.padding or a.extra or any(a.more))
        )
        return next(planes, None)

    def _direct(self, i: int, out: Interval, piece: Interval, main: bool) -> Along:
        k, s, d, pad = self.kernel[i], self.stride[i], self.dilation[i], self.padding[i]
        taps = Interval(0, k)
        if not main:
            first, last = -(-(piece.lo + pad - d * (k - 1)) // s), (piece.hi - 1 + pad) // s
            out = out.intersect(Interval(first, last + 1))
            low = -(-(piece.lo + pad - s * (out.hi - 1)) // d)
            high = (piece.hi - 1 + pad - s * out.lo) // d
            taps = taps.intersect(Interval(low, high + 1))
        before = piece.lo - (s * out.lo - pad + d * taps.lo)
        after = s * (out.hi - 1) - pad + d * (taps.hi - 1) + 1 - piece.hi
        made = (piece.size + 2 * before - d * (taps.size - 1) - 1) // s + 1
        if before >= 0 and made == out.size:  # torch pads both sides alike, and drops what is left over
            return Along(out, taps, padding=before)
        return Along(out, taps, more=(before, after))

    def _transposed(self, i: int, out: Interval, piece: Interval, main: bool) -> Along:
        k, s, d, pad = self.kernel[i], self.stride[i], self.dilation[i], self.padding[i]
        taps, reach = Interval(0, k), d * (k - 1)
        if main:
            trim = out.lo + pad - s * piece.lo
            extra = out.size - ((piece.size - 1) * s - 2 * trim + reach + 1)
            if trim >= 0 and 0 <= extra < max(s, d):
                return Along(out, taps, padding=trim, extra=extra)
        else:
            out = out.intersect(Interval(s * piece.lo - pad, s * (piece.hi - 1) - pad + reach + 1))
            low, high = -(-(out.lo + pad - s * (piece.hi - 1)) // d), (out.hi - 1 + pad - s * piece.lo) // d
            taps = taps.intersect(Interval(low, high + 1))
        first = s * piece.lo - pad + d * taps.lo
        last = s * (piece.hi - 1) - pad + d * (taps.hi - 1) + 1
        return Along(out, taps, more=(first - out.lo, out.hi - last))


_FLAT: dict[Any, Callable[..., Tensor]] = {F.conv3d: F.conv2d, F.conv_transpose3d: F.conv_transpose2d}


class _Options(NamedTuple):
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    extra: list[int]
    groups: int


def _padded(tensor: Tensor, pads: Sequence[int]) -> Tensor:
    return F.pad(tensor, list(pads)) if any(pads) else tensor


def _unpadded(tensor: Tensor, pads: Sequence[int]) -> Tensor:
    return F.pad(tensor, [-side for side in pads]) if any(pads) else tensor


def _backward(
    gradient: Tensor,
    piece: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    o: _Options,
    transposed: bool,
    needed: Sequence[bool],
) -> Gradients:
    sizes = None if bias is None else list(bias.shape)
    mask = [needed[0], needed[1], needed[2] and bias is not None]
    gradients: Any = torch.ops.aten.convolution_backward(
        gradient, piece, weight, sizes, o.stride, o.padding, o.dilation, transposed, o.extra, o.groups, mask
    )
    return gradients


@dataclass(frozen=True)
class _Compute:
    """``thin`` is a dim of one plane that is left out."""

    function: Callable[..., Tensor]
    options: _Options
    pads: list[int]
    thin: int | None

    def forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.thin is None:
            return self._forward(piece, weight, bias)
        return self._forward(piece.squeeze(self.thin), weight.squeeze(self.thin), bias).unsqueeze(self.thin)

    def backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        thin = self.thin
        if thin is None:
            return self._backward(gradient, piece, weight, bias, needed)
        flat = gradient.squeeze(thin), piece.squeeze(thin), weight.squeeze(thin)
        mine, slope, offset = self._backward(*flat, bias, needed)
        return None if mine is None else mine.unsqueeze(thin), None if slope is None else slope.unsqueeze(thin), offset

    def _forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        raise NotImplementedError


class _Nothing:
    """A dilated kernel can step over all of a slab."""

    def forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return piece.new_zeros(())

    def backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        return torch.zeros_like(piece), torch.zeros_like(weight), None


class _DirectPart(_Compute):
    def _forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        o = self.options
        return self.function(_padded(piece, self.pads), weight, bias, o.stride, o.padding, o.dilation, o.groups)

    def _backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        gradients = _backward(gradient, _padded(piece, self.pads), weight, bias, self.options, False, needed)
        return (None if gradients[0] is None else _unpadded(gradients[0], self.pads)), gradients[1], gradients[2]


class _TransposedPart(_Compute):
    """Where torch cannot trim the result, we do, or add the outputs that nothing reaches: they have the bias too."""

    def _forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        o = self.options
        if not any(self.pads):
            return self.function(piece, weight, bias, o.stride, o.padding, o.extra, o.groups, o.dilation)
        made = self.function(piece, weight, None, o.stride, o.padding, o.extra, o.groups, o.dilation)
        trimmed = _padded(made, self.pads)
        return trimmed if bias is None else trimmed + bias.view(-1, *(1,) * len(o.stride))

    def _backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        if not any(self.pads):
            return _backward(gradient, piece, weight, bias, self.options, True, needed)
        mine, slope, _ = _backward(_unpadded(gradient, self.pads), piece, weight, None, self.options, True, needed)
        offset = gradient.sum((0, *range(2, gradient.ndim))) if needed[2] and bias is not None else None
        return mine, slope, offset
