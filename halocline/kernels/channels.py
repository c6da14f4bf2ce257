"""Kernels that treat each channel by itself, in chunks of samples and channels: pools, resampling, padding.

Nothing is needed of other channels, so every chunk gets exactly what the whole would have got.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused
from ..geometry import Interval, chunks_of, shape_of, whole
from .layout import CHANNELS_LAST, span
from .replace import Original, kernel
from .sizes import LARGEST, sizes


@dataclass(frozen=True)
class ByChannel:
    """Which arguments of an operator have channels.

    ``maps``: tensors of batch, channels and ``spatial`` dims, as all results are; ``sizes``: a list of such sizes.
    """

    name: str
    spatial: int
    maps: tuple[int, ...] = (0,)
    sizes: int | None = None
    fits: bool = False  # one channel must have fewer than 2^31 elements, or torch crashes

    def large(self, *args: Any) -> bool:
        """Not without a batch, where dim 0 is the channels."""
        first: Tensor = args[self.maps[0]]
        batched = first.dim() == self.spatial + 2
        return batched and self._largest(args) > sizes(first.device, "channels").whole

    def _largest(self, args: Sequence[Any]) -> int:
        """The most elements of any operand or result."""
        operands = max(span(args[place]) for place in self.maps)
        # Foreseeing the results takes longer than most small calls.
        if operands <= min(_SURELY, sizes(args[self.maps[0]].device, "channels").whole // 64):
            return operands
        return max(operands, *(result.numel() for result in self._foreseen(args)))

    def _foreseen(self, args: Sequence[Any]) -> list[Tensor]:
        """The results as torch would make them, sizes and layout, without their values."""
        operator = getattr(torch.ops.aten, self.name).default
        results = operator(*(_outline(value) if isinstance(value, Tensor) else value for value in args))
        return [results] if isinstance(results, Tensor) else list(results)

    def __call__(self, original: Original, *args: Any) -> Any:
        first: Tensor = args[self.maps[0]]
        most = sizes(first.device, "channels").chunk
        batch, channels = first.shape[:2]
        plane = self._largest(args) // max(1, batch * channels)
        if self.fits and plane > LARGEST:
            raise _too_large(self.name, plane)
        boxes = chunks_of((whole(batch), whole(channels)), (0, 1), lambda box: plane * prod(shape_of(box)), most)
        results: list[Tensor] = []
        for samples, some in boxes:
            result = original(*self._chosen(args, samples, some))
            parts = (result,) if isinstance(result, Tensor) else result
            # The first chunk shows the dtype and the layout that torch gives a result.
            results = results or [
                _room(foreseen, part) for foreseen, part in zip(self._foreseen(args), parts, strict=True)
            ]
            for result, part in zip(results, parts, strict=True):
                result[samples.lo : samples.hi, some.lo : some.hi] = part
        return tuple(results) if len(results) > 1 else results[0]

    def _chosen(self, args: Sequence[Any], samples: Interval, channels: Interval) -> Iterator[Any]:
        """The arguments of one chunk: these samples and channels of each map, and sizes to match."""
        for place, value in enumerate(args):
            if place in self.maps:
                yield _dense(value[samples.lo : samples.hi, channels.lo : channels.hi])
            elif place == self.sizes:
                yield [samples.size, channels.size, *value[2:]]
            else:
                yield value


_SURELY = LARGEST // 64  # elements of an operand that no result outgrows by far


def _outline(tensor: Tensor) -> Tensor:
    """The same sizes and strides without data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _too_large(name: str, plane: int) -> Refused:
    """The error for a single channel that is too large by itself: no chunk can be smaller."""
    return Refused(
        name,
        "torch's kernel",
        f"one channel of one sample has {plane} elements, and its indices are 32-bit numbers",
        "cut the sample over a mesh of ranks",
    )


def _dense(piece: Tensor) -> Tensor:
    """Some channels of a tensor with channels last lie far apart, and some kernels count the gaps."""
    last = CHANNELS_LAST.get(piece.dim(), torch.contiguous_format)
    return piece if piece.is_contiguous() or piece.is_contiguous(memory_format=last) else piece.clone()


def _room(foreseen: Tensor, part: Tensor) -> Tensor:
    """For all chunks of a result. Some kernels rely on the layout of what others made: where chunks lie as usual, so
    does the whole."""
    last = CHANNELS_LAST.get(part.dim())
    ambiguous = last is not None and part.is_contiguous(memory_format=last)  # contiguous and with channels last at once
    if part.is_contiguous() and not ambiguous:
        return part.new_empty(foreseen.shape)
    return torch.empty_strided(foreseen.shape, foreseen.stride(), dtype=part.dtype, device=part.device)


def _enter(*entries: ByChannel) -> None:
    for entry in entries:
        kernel(entry.name, entry.large)(entry)


for _n in (2, 3):
    _enter(
        ByChannel(f"max_pool{_n}d_with_indices", _n, fits=True),
        ByChannel(f"max_pool{_n}d_with_indices_backward", _n, maps=(0, 1, 7), fits=True),
        ByChannel(f"adaptive_max_pool{_n}d", _n, fits=True),
        ByChannel(f"adaptive_max_pool{_n}d_backward", _n, maps=(0, 1, 2), fits=True),
        ByChannel(f"avg_pool{_n}d", _n),
        ByChannel(f"avg_pool{_n}d_backward", _n, maps=(0, 1)),
    )

# In three dims torch resamples tensors of any size.
for _name in ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"):
    _enter(ByChannel(_name, 2), ByChannel(f"{_name}_backward", 2, sizes=2))

for _n in (1, 2, 3):
    for _mode in ("reflection", "replication"):
        _enter(
            ByChannel(f"{_mode}_pad{_n}d", _n),
            ByChannel(f"{_mode}_pad{_n}d_backward", _n, maps=(0, 1)),
        )
