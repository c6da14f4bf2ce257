"""The parts of a convolution that is done in chunks: a box of the output each, and what it needs of the input.

Boxes have the batch and the spatial dims; channels are never cut. Where a dim is cut, outputs that reach into the
padding are parts of their own, computed from a small padded piece; all others come from views of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..geometry import Box, Interval, Transposed, Window, chunks_of, cut_at, shape_of, slices, whole

_FEW = 8  # channels: with fewer cuDNN pads its operands, into a workspace several times their size


class Call(NamedTuple):
    """The arguments of a convolution but for its tensors, one for each spatial dim."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    extra: list[int]
    groups: int

    @classmethod
    def of(cls, dims: int, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int) -> Call:
        """From the arguments of ATen's convolution."""
        stride, padding, dilation, extra = (
            list(value) * (dims if len(value) == 1 else 1) for value in (stride, padding, dilation, extra)
        )
        return cls(stride, padding, dilation, transposed, extra, groups)

    def shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Of the output."""
        channels = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        return (x.shape[0], channels, *self._spatial(x.shape[2:], weight.shape[2:]))

    @property
    def legal(self) -> bool:
        """Would torch take these sizes?"""
        extra = zip(self.extra, self.stride, self.dilation, strict=True)
        return min(self.padding) >= 0 and all(e < max(s, d) for e, s, d in extra)

    def reach(self, kernel: Sequence[int]) -> list[int]:
        """From the first to the last tap, of each dim."""
        return [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]

    def _spatial(self, spatial: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """The spatial sizes of the output."""
        each = zip(spatial, self.stride, self.padding, self.reach(kernel), self.extra, strict=True)
        if self.transposed:
            return [(n - 1) * s - 2 * p + r + e + 1 for n, s, p, r, e in each]
        return [(n + 2 * p - r - 1) // s + 1 for n, s, p, r, _ in each]

    def parts(self, x: Sequence[int], y: Sequence[int], kernel: Sequence[int], most: int) -> Iterator[ConvolutionPart]:
        """For an input and an output of these shapes, of which the largest has at most ``most`` elements."""
        if min(x[1], y[1]) // self.groups < _FEW:
            most = max(1, most // 16)
        return (_transposed_parts if self.transposed else _direct_parts)(x, y, kernel, self, most)

    def each(self, kernel: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """The access of each spatial dim."""
        return zip(kernel, self.stride, self.dilation, self.padding, strict=True)


class ConvolutionPart(NamedTuple):
    """A box of the output, from ``need`` of the input with zeros round it (``pads``) and the padding torch adds.

    Of what that makes, ``keep`` is the box. Without ``need`` nothing of the input reaches it.
    """

    box: Box
    need: Box | None
    padding: list[int]
    pads: list[int]
    keep: Box | None = None

    def read(self, x: Tensor) -> Tensor:
        """What the part reads, padded where torch does not."""
        piece = at(x, self.need)  # type: ignore[arg-type]
        return F.pad(piece, self.pads) if any(self.pads) else piece

    def kept(self, made: Tensor) -> Tensor:
        """The box out of what was computed."""
        return made if self.keep is None else at(made, (whole(made.shape[0]), *self.keep))


def at(tensor: Tensor, box: Box) -> Tensor:
    """All channels of a box."""
    batch, *spatial = slices(box)
    return tensor[(batch, slice(None), *spatial)]


def _chunks(
    x: Sequence[int],
    y: Sequence[int],
    need: Callable[[Box], Box],
    most: int,
    made: Callable[[Box], Box] = lambda box: box,
) -> list[Box]:
    """``made`` is the box that is computed for a box, which may be larger."""

    def elements(box: Box) -> int:
        return max(x[1] * prod(shape_of(need(box))), y[1] * prod(shape_of(made(box))))

    box = tuple(map(whole, (y[0], *y[2:])))
    return chunks_of(box, range(len(box)), elements, most)


# A convolution ------------------------------------------------------------------------------------------------------


def _direct_parts(
    x: Sequence[int], y: Sequence[int], kernel: Sequence[int], call: Call, most: int
) -> Iterator[ConvolutionPart]:
    """The parts of a convolution."""
    windows = [Window(*setting) for setting in call.each(kernel)]

    def need(box: Box) -> Box:
        """Of the input and the padding round it."""
        return (box[0], *(window.need(out)[0] for window, out in zip(windows, box[1:], strict=True)))

    chunks = _chunks(x, y, need, most)
    native = [_natively(*dim) for dim in zip(chunks[0][1:], y[2:], x[2:], windows, strict=True)]
    for chunk in chunks:
        for box in _edges_apart(chunk, native, windows, x[2:]):
            yield _direct_part(box, need(box), x[2:], call.padding, native)


def _natively(chunk: Interval, out: int, size: int, window: Window) -> bool:
    """Is this dim not cut, and would torch make just these outputs of it?"""
    made = (size + 2 * window.padding - window.reach - 1) // window.stride + 1
    return chunk.size == out == made


def _edges_apart(chunk: Box, native: list[bool], windows: list[Window], spatial: Sequence[int]) -> Iterator[Box]:
    """The chunk split so that outputs which reach into the padding are boxes of their own, where torch does not pad."""
    dims = [[chunk[0]]]
    for interval, natively, window, size in zip(chunk[1:], native, windows, spatial, strict=True):
        # The first output, and the one after the last, whose window lies inside the sample.
        first = -(-window.padding // window.stride)
        last = (size - 1 + window.padding - window.reach) // window.stride + 1
        dims.append([interval] if natively else cut_at(interval, [first, last]))
    yield from product(*dims)


def _direct_part(
    box: Box, need: Box, spatial: Sequence[int], padding: list[int], native: list[bool]
) -> ConvolutionPart:
    """One box: what it reads inside the input, and zeros where it reaches into the padding."""
    inside: list[Interval] = [box[0]]
    pads: list[int] = []
    for wanted, size, natively in zip(need[1:], spatial, native, strict=True):
        read = whole(size) if natively else wanted.intersect(whole(size))
        if read.empty:  # padding alone
            read = Interval(0, 0)
        before = read.lo - wanted.lo if read.size and not natively else 0
        inside.append(read)
        pads = [before, 0 if natively else wanted.size - read.size - before, *pads]
    kept = [amount if natively else 0 for amount, natively in zip(padding, native, strict=True)]
    return ConvolutionPart(box, tuple(inside), kept, pads)


# A transposed convolution -------------------------------------------------------------------------------------------


def _transposed_parts(
    x: Sequence[int], y: Sequence[int], kernel: Sequence[int], call: Call, most: int
) -> Iterator[ConvolutionPart]:
    """The parts of a transposed convolution."""
    accesses = [Transposed(*setting) for setting in call.each(kernel)]

    def need(box: Box) -> Box:
        dims = zip(accesses, box[1:], x[2:], strict=True)
        return (box[0], *(access.need(out)[0].intersect(whole(size)) for access, out, size in dims))

    def made(box: Box) -> Box:
        return (box[0], *map(_made, accesses, need(box)[1:]))

    for box in _chunks(x, y, need, most, made):
        yield from _transposed_part(box, need(box), accesses)


def _made(access: Transposed, inputs: Interval) -> Interval:
    """All outputs that these inputs reach."""
    first = access.stride * inputs.lo - access.padding
    return Interval(first, first + access.stride * (inputs.size - 1) + access.reach + 1 if inputs.size else first)


def _transposed_part(box: Box, need: Box, accesses: list[Transposed]) -> Iterator[ConvolutionPart]:
    """What the inputs reach beyond the box is left out, by torch where it is as much on both sides."""
    reached, padding, keep = [box[0]], [], []
    for access, wanted, inputs in zip(accesses, box[1:], need[1:], strict=True):
        made = _made(access, inputs)
        inside = wanted.intersect(made) if inputs.size else Interval(wanted.lo, wanted.lo)
        # torch's padding trims both sides alike; ``keep`` takes off the rest.
        trim = min(inside.lo - made.lo, made.hi - inside.hi) if inside.size else 0
        reached.append(inside)
        padding.append(trim)
        keep.append(inside.shift(-made.lo - trim))
    if reached != list(box):
        yield ConvolutionPart(box, None, [], [])
    if all(interval.size for interval in reached):
        yield ConvolutionPart(tuple(reached), need, padding, [], tuple(keep))
