"""The contribution of a piece of the input to a convolution, which is what ``rules/halo.py`` needs to know.

Everything outside the piece counts as zero. A slab beside the tile reaches few outputs through few taps of the kernel.
The tile itself reaches all outputs, in one call, with torch's own padding where that is the same on both sides.

Example in one dim, kernel 3, padding 1, tile 8..16: the slab [7, 8) reaches output 8 through tap 0 alone.
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
    """A batched convolution as a linear map, of which parts can be taken: the
    arguments of the call, also if transposed.
    """

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
            return LinearPart(nothing, nothing, NoContribution())
        # Slabs are often one plane thick; the tile never is.
        thin = self._thin(along, piece[2:]) if not main else None
        sees = (slice(None), slice(None), *(slice(a.taps.lo, a.taps.hi) for a in along))
        local = [a.out.shift(-o.lo) for a, o in zip(along, out[2 : 2 + len(along)], strict=True)]
        # All of batch and channels; outputs counted from the rank's box.
        where = (slice(None), slice(None), *(slice(i.lo, i.hi) for i in local))
        kept = [i for i in range(len(along)) if i != thin]
        part = PartialConvolution(
            function=self.function if thin is None else _FLAT[self.function],
            stride=[self.stride[i] for i in kept],
            padding=[along[i].padding for i in kept],
            dilation=[self.dilation[i] for i in kept],
            extra=[along[i].extra for i in kept],
            groups=self.groups,
            transposed=self.transposed,
            pads=[side for i in reversed(kept) for side in along[i].more],
            thin=None if thin is None else 2 + thin,
        )
        return LinearPart(where, sees, part)

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
        """The outputs that ``piece`` reaches, the taps that reach them, and the padding between piece and taps.

        Output ``i`` reads inputs ``stride * i - padding + dilation * tap``. Solving for ``i`` gives the outputs, and
        for ``tap`` the taps.
        """
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
        """The same for a transposed convolution, where input ``i`` adds to outputs
        ``stride * i - padding + dilation * tap``.
        """
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


class NoContribution:
    """The part of a slab that a dilated kernel steps over: it adds nothing, and has no gradient."""

    def forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Zero, whatever it is added to."""
        return piece.new_zeros(())

    def backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        """Zeros, so that they can be sent and added up as those of any other part."""
        return torch.zeros_like(piece), torch.zeros_like(weight), None


@dataclass(frozen=True)
class PartialConvolution:
    """A convolution of one piece with some taps of the kernel, and its first derivative.

    ``pads`` are zeros that torch's call cannot add (negative: rows that it cannot leave out), as F.pad takes them:
    around the piece or, where the convolution is transposed, around the result. ``thin`` is a dim in which one plane
    meets one tap: it is left out, and ``function`` has one spatial dim less.
    """

    function: Callable[..., Tensor]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    extra: list[int]  # torch's output_padding
    groups: int
    transposed: bool
    pads: list[int]
    thin: int | None

    def forward(self, piece: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the piece adds to the result, with the bias if it is given."""
        piece, weight = self._flat(piece), self._flat(weight)
        if not self.transposed:
            options = (self.stride, self.padding, self.dilation, self.groups)
            return self._full(self.function(self._padded(piece), weight, bias, *options))
        late_bias = bias is not None and any(self.pads)  # outputs that nothing reaches have the bias too
        call = (self.stride, self.padding, self.extra, self.groups, self.dilation)
        made = self._padded(self.function(piece, weight, None if late_bias else bias, *call))
        return self._full(made + bias.view(-1, *[1] * len(self.stride)) if late_bias else made)  # type: ignore[union-attr]

    def backward(
        self, gradient: Tensor, piece: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Gradients:
        """The gradients of piece, weight and bias, as far as they are ``needed``."""
        gradient, piece, weight = self._flat(gradient), self._flat(piece), self._flat(weight)
        needs_bias = needed[2] and bias is not None
        late_bias = self.transposed and any(self.pads)
        trimmed = self._padded(gradient, -1) if self.transposed else gradient
        padded = piece if self.transposed else self._padded(piece)
        mine, slope, offset = torch.ops.aten.convolution_backward(
            trimmed,
            padded,
            weight,
            None if bias is None or late_bias else list(bias.shape),
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.extra,
            self.groups,
            [needed[0], needed[1], needs_bias and not late_bias],
        )
        if late_bias and needs_bias:
            offset = gradient.sum((0, *range(2, gradient.ndim)))
        if mine is not None:
            mine = self._full(mine if self.transposed else self._padded(mine, -1))
        return mine, None if slope is None else self._full(slope), offset

    def _padded(self, tensor: Tensor, sign: int = 1) -> Tensor:
        return F.pad(tensor, [sign * side for side in self.pads]) if any(self.pads) else tensor

    def _flat(self, tensor: Tensor) -> Tensor:
        return tensor if self.thin is None else tensor.squeeze(self.thin)

    def _full(self, tensor: Tensor) -> Tensor:
        return tensor if self.thin is None else tensor.unsqueeze(self.thin)
