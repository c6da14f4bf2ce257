"""How a script's batches are cut: the first dim over ``data``, and the last dims over the axes of ``--cut``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused
from ..geometry import Partition
from ..rules import from_tile, shard
from ..tensor import ShardedTensor, make_sharding
from ..tree import map_tensors, tensors_in
from ..world import Mesh

#: The dims that the spatial axes of a mesh cut, counted from the end.
SPATIAL_DIMS = {"depth": -3, "height": -2, "width": -1}


class BatchCutter:
    """Cuts the tensors of a batch. Any cut gives the same result; which tensors are cut is a question of speed.

    The tensor with most dims is the sample: spatial axes cut it, and tensors that end in the same sizes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._space = {SPATIAL_DIMS[axis]: axis for axis in mesh.names if axis in SPATIAL_DIMS and mesh.sizes[axis] > 1}

    @property
    def cuts_space(self) -> bool:
        """Are samples cut, too?"""
        return bool(self._space)

    def dims(self, shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> dict[int, str]:
        """The dims to cut of a tensor in a batch of these shapes, with the axis of each."""
        sample = max(shapes, key=len)
        cut: dict[int, str] = {}
        if len(shape) and shape[0] > 1 and shape[0] == sample[0]:
            cut[0] = "data"
        if not self._space:
            return cut
        trailing = tuple(sample[min(self._space) :])
        if len(sample) < 1 - min(self._space):
            raise Refused(
                f"--cut {', '.join(self._space.values())}",
                "the script",
                f"its samples have {len(sample) - 1} dims beside the batch, and the cut needs {-min(self._space)}",
                "leave that axis out of --cut",
            )
        if len(shape) > len(trailing) and tuple(shape[-len(trailing) :]) == trailing:
            cut |= {dim % len(shape): axis for dim, axis in self._space.items()}
        return cut

    def whole(self, batch: Any) -> Any:
        """A batch that every rank holds, cut. Beside tensors that are cut already, those that share their size."""
        tensors = tensors_in(batch)
        sizes = {size for tensor in tensors if isinstance(tensor, ShardedTensor) for size in _data_sizes(tensor)}
        shapes = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, ShardedTensor)]
        if not any(shapes):
            return batch

        def cut(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ShardedTensor) or (sizes and (not tensor.ndim or tensor.shape[0] not in sizes)):
                return tensor
            dims = self.dims(tensor.shape, shapes)
            return shard(tensor, self.mesh, dims) if dims else tensor

        return map_tensors(cut, batch)

    @property
    def share(self) -> Callable[[int], range]:
        """Which samples this rank loads of a batch of so many. The function can be pickled."""
        return partial(_share, self.mesh.coordinates["data"], self.mesh.sizes["data"])

    def tiles(self, batch: Any, count: int) -> Any:
        """A batch of which this rank holds its share of ``count`` samples, as cut tensors."""
        shapes = [(count, *tensor.shape[1:]) for tensor in tensors_in(batch)]

        def cut(tensor: Tensor) -> Tensor:
            shape = (count, *tensor.shape[1:])
            dims = self.dims(shape, shapes)
            sharding = make_sharding(self.mesh, shape, dims)
            inner = [slice(None), *(slice(piece.lo, piece.hi) for piece in sharding.box[1:])]
            tile = tensor[tuple(inner)].contiguous()
            return from_tile(tile, self.mesh, dims, shape=shape) if dims else tensor

        return map_tensors(cut, batch)


def _share(place: int, places: int, count: int) -> range:
    """The samples of a batch that one place loads; a single sample is loaded everywhere, and cut in space."""
    piece = Partition.even(count, places).piece(place)
    return range(piece.lo, piece.hi) if count > 1 else range(count)


def _data_sizes(tensor: ShardedTensor) -> list[int]:
    """The sizes of the dims that the data axis cuts."""
    cuts = zip(tensor.sharding.shape, tensor.sharding.cuts, strict=True)
    return [size for size, cut in cuts if cut is not None and cut.axis == "data"]


def empty_share(batch: Any) -> Any:
    """The batch without its samples, for a rank that has none of them."""
    return map_tensors(lambda tensor: tensor[:0], batch)


def number_of(words: bytes) -> int:
    """63 bits that depend on all of them."""
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1


def described(batch: Any) -> str:
    """What must be alike on all ranks in a batch of shares: dtypes, and all sizes but the first."""
    return repr([(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors_in(batch)] + [torch.get_default_dtype()])
