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
        """The most elements of any operand. Of the results the arguments tell where torch makes them larger."""
        return max(self._result_elements(args), *(args[place].numel() for place in self.maps))

    def _result_elements(self, args: Sequence[Any]) -> int:
        batch, channels = args[self.maps[0]].shape[:2]
        if self.sizes is not None:
            return prod(args[self.sizes])
        return batch * channels * prod(grown(self.name, args))

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
            found = original(*self._chosen(args, samples, some))
            parts = (found,) if isinstance(found, Tensor) else found
            results = results or [_room(part, batch, channels) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[samples.lo : samples.hi, some.lo : some.hi] = part
        return tuple(results) if len(results) > 1 else results[0]

    def _chosen(self, args: Sequence[Any], samples: Interval, channels: Interval) -> Iterator[Any]:
        for place, value in enumerate(args):
            if place in self.maps:
                yield _dense(value[samples.lo : samples.hi, channels.lo : channels.hi])
            elif place == self.sizes:
                yield [samples.size, channels.size, *value[2:]]
            else:
                yield value


def grown(name: str, args: Sequence[Any]) -> Sequence[int]:
    """Spatial sizes of a result that may be larger than its operand: resampled or padded."""
    spatial = args[0].shape[2:]
    if name.startswith("upsample"):
        return args[1] if "backward" not in name else spatial
    if "_pad" in name and "backward" not in name:
        pads = list(args[1])
        sides = zip(pads[::2][::-1], pads[1::2][::-1], strict=True)
        return [n + before + after for n, (before, after) in zip(spatial, sides, strict=True)]
    return spatial


def _too_large(name: str, plane: int) -> Refused:
    return Refused(
        name,
        "torch's kernel",
        f"one channel of one sample has {plane} elements, and its indices are 32-bit numbers",
        "cut the sample over a mesh of ranks",
    )


def _dense(piece: Tensor) -> Tensor:
    """Some channels of a tensor with channels last lie far apart, and some kernels count the gaps."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(piece.dim(), torch.contiguous_format)
    return piece if piece.is_contiguous() or piece.is_contiguous(memory_format=last) else piece.clone()


def _room(part: Tensor, batch: int, channels: int) -> Tensor:
    """For all chunks of a result, laid out as the first: some kernels rely on the layout of what others made."""
    shape = (batch, channels, *part.shape[2:])
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(part.dim())
    if last is None or part.is_contiguous() or not part.is_contiguous(memory_format=last):
        return part.new_empty(shape)
    return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=last)


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
