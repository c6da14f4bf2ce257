"""What a batch is made of: fields, their dims by letter, and the sizes that fields share.

All fields of a sample are cut and augmented together. Dims are known by letters (C, T, D, H, W), so that a label map
without channels follows its volume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ...errors import DataError
from ...geometry import Box, Interval, Partition, SampleView, whole
from ...tensor import Cut, Sharding
from ...world import Mesh
from ..stores.derived import ChannelSubset
from ..stores.store import SAMPLES, Store, can_hold
from .augment import ViewChange
from .values import Value

#: torch computes little with these: the next wider that it computes with.
_WIDER = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}


@dataclass(frozen=True)
class Field:
    """One tensor of a batch: where it is read, and what is done to its values.

    ``dtype`` is the tensor's; by default that of the store, but int64 for integers without channels, which torch's
    losses take for class numbers. ``channels`` are those that are read, by number. ``fill`` stands where a shift leaves
    nothing. ``rim`` is how much of the neighbours' part is read as well, by letter, so that the first layer need not
    exchange it.

        Field(store, dtype=torch.bfloat16, values=[Normalize((0.5,), (0.25,))], rim={"D": 1})
    """

    store: Store
    dtype: torch.dtype | None = None
    channels: Sequence[int] | None = None
    values: Sequence[Value] = ()
    fill: float = 0
    rim: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not can_hold(self.store.dtype, self.array_dtype):
            remedy = "; for labels that are stored as floats use hc.data.Labels(store)" if self.is_integer else ""
            raise DataError(
                f"{self.store.name}: {self.store.dtype} does not fit {self.tensor_dtype} without loss{remedy}"
            )
        for letter, width in self.rim.items():
            if letter not in self.dims or width < 0 or width != int(width):
                raise DataError(
                    f"{self.store.name}: rim={dict(self.rim)} gives {letter!r} {width}; give dims of {self.dims}, "
                    "and the width of the halo to read"
                )
        if self.array_dtype.type(np.nan_to_num(self.fill)) != self.fill or not np.isfinite(self.fill):
            raise DataError(f"{self.store.name}: fill={self.fill} is not a number that {self.tensor_dtype} can hold")

    @property
    def dims(self) -> str:
        """Letters of the dims of a sample, as they are delivered."""
        return self.store.dims

    @cached_property
    def tensor_dtype(self) -> torch.dtype:
        """The dtype of the batch's tensor."""
        if self.dtype is not None:
            return self.dtype
        if self.store.dtype.kind in "iu" and "C" not in self.store.dims:
            return torch.int64  # class numbers, in the dtype that torch's losses want
        name = self.store.dtype.newbyteorder("=").name
        return _WIDER.get(name) or torch.from_numpy(np.empty(0, name)).dtype

    @property
    def is_integer(self) -> bool:
        """Are the delivered numbers integers?"""
        return not (self.tensor_dtype.is_floating_point or self.tensor_dtype.is_complex)

    @cached_property
    def array_dtype(self) -> np.dtype[np.generic]:
        """numpy's name for it; bfloat16, which numpy has not, is read as float32."""
        return torch.empty(0, dtype=self.wide_dtype).numpy().dtype

    @property
    def kept_dtype(self) -> np.dtype[np.generic]:
        """In which samples are held in memory: the store's own, in this machine's order of bytes."""
        return self.source.dtype.newbyteorder("=")

    @property
    def wide_dtype(self) -> torch.dtype:
        """In which values are transformed, and in which the buffers are."""
        return torch.float32 if self.tensor_dtype == torch.bfloat16 else self.tensor_dtype

    @cached_property
    def source(self) -> Store:
        """The store, or the asked-for channels of it."""
        return self.store if self.channels is None else ChannelSubset(self.store, self.channels)

    def moved(self, moves: Iterable[ViewChange]) -> SampleView:
        """A sample after these moves."""
        view = SampleView.of(self.source.shape)
        for move in moves:
            view = move.on(view, self.dims)
        return view


Fields = Mapping[str, Field]


def as_fields(given: Mapping[str, Store | Field]) -> dict[str, Field]:
    """Fields by name; a store alone becomes a field with defaults. Raises where sample counts differ."""
    fields = {name: each if isinstance(each, Field) else Field(each) for name, each in given.items()}
    if not fields:
        raise DataError("a batch needs a field, such as {'x': store}")
    counts = {name: len(each.store) for name, each in fields.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"fields have different numbers of samples: {counts}")
    return fields


def frame_of(fields: Fields, shared: str) -> dict[str, int]:
    """The sizes of the dims that are cut or moved: one for each letter, the same in all fields."""
    sizes: dict[str, int] = {}
    for name, each in fields.items():
        for letter, size in zip(each.dims, each.source.shape, strict=True):
            # Channels may differ by field, as may dims that are neither cut nor moved.
            if letter == "C" or (letter not in shared and sizes.get(letter, size) != size):
                continue
            if sizes.setdefault(letter, size) != size:
                raise DataError(
                    f"{letter} has {size} in {name!r} and {sizes[letter]} in another field; what is cut or moved "
                    "together must be of one size: give the dim another letter where it is not the same"
                )
    absent = [letter for letter in shared if letter not in sizes]
    if absent:
        raise DataError(f"no field has a dim {', '.join(absent)}; there are {', '.join(sizes) or 'none but channels'}")
    return sizes


@dataclass(frozen=True)
class Grid:
    """Where samples are cut: for each letter an axis of the mesh and a partition. Any rank's box follows."""

    mesh: Mesh
    cuts: Mapping[str, Cut]

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        cut: Mapping[str, str],
        sizes: Mapping[str, int],
        multiple: int = 1,
        points: Mapping[str, Sequence[int]] | None = None,
    ) -> Grid:
        """Cut every letter in ``cut`` along its axis, evenly at multiples, or at the given points."""
        cuts: dict[str, Cut] = {}
        for letter, axis in cut.items():
            mesh.check_axis(axis)
            if mesh.sizes[axis] > 1 and letter in sizes:
                given = (points or {}).get(letter)
                even = Partition.even(sizes[letter], mesh.sizes[axis], multiple if letter != SAMPLES else 1)
                cuts[letter] = Cut(axis, even if given is None else Partition(tuple(given)))
        return cls(mesh, cuts)

    def box(self, dims: str, shape: Sequence[int], coordinates: Mapping[str, int]) -> Box:
        """The box of the rank at these coordinates, in a tensor with these dims."""
        return tuple(self.piece(letter, size, coordinates) for letter, size in zip(dims, shape, strict=True))

    def piece(self, letter: str, size: int, coordinates: Mapping[str, int]) -> Interval:
        """The interval of one dim that belongs to these coordinates."""
        cut = self.cuts.get(letter)
        return whole(size) if cut is None else cut.partition.piece(coordinates[cut.axis])

    def axes(self, dims: str) -> tuple[str, ...]:
        """Those that cut one of ``dims``."""
        return tuple(self.cuts[letter].axis for letter in dims if letter in self.cuts)

    def sharding(self, dims: str, shape: Sequence[int]) -> Sharding:
        """How a tensor with these dims is cut over the mesh, without the batch dim."""
        return Sharding(self.mesh, shape, [self.cuts.get(letter) for letter in dims])


def with_rim(box: Box, dims: str, shape: Sequence[int], rim: Mapping[str, int]) -> Box:
    """Wider by the rim, and not beyond the sample; nothing stays nothing."""
    if any(interval.empty for interval in box):
        return box
    return tuple(
        Interval(max(0, i.lo - rim.get(letter, 0)), min(size, i.hi + rim.get(letter, 0)))
        for letter, i, size in zip(dims, box, shape, strict=True)
    )
