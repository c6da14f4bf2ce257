"""How a global tensor lies on a mesh: for each dim, whole or cut along one axis at given points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from ..errors import ShardingError
from ..geometry import Box, Interval, Partition, shape_of, whole
from ..world import Mesh
from .guard import close_holes


@dataclass(frozen=True)
class Cut:
    """How one dim is cut: along a mesh axis, at the points of a partition."""

    axis: str
    partition: Partition


class Sharding:
    """Immutable. ``cuts[dim]`` is None where every rank of every axis has the dim whole.

    Equal shardings are one object, so that looking up a plan compares identities only.
    """

    _made: ClassVar[WeakValueDictionary[Any, Sharding]] = WeakValueDictionary()

    mesh: Mesh
    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    def __new__(cls, mesh: Mesh, shape: Sequence[int], cuts: Sequence[Cut | None]) -> Sharding:
        key = (tuple(shape), tuple(cuts), mesh)
        made = cls._made.get(key)
        if made is None:
            made = super().__new__(cls)
            made.shape, made.cuts, made.mesh = key
            made._check()
            # Before the first sharded tensor can exist.
            close_holes()
            cls._made[key] = made
        return made

    def __deepcopy__(self, memo: object) -> Sharding:
        return self

    def _check(self) -> None:
        """Raise for cuts that do not fit the shape or the mesh."""
        for dim, cut in enumerate(self.cuts):
            if cut is None:
                continue
            self.mesh.check_axis(cut.axis)
            parts, size = self.mesh.sizes[cut.axis], self.shape[dim]
            if cut.partition.parts != parts or cut.partition.size != size:
                raise ShardingError(
                    f"dim {dim} of size {size} is cut at {cut.partition.points}, "
                    f"which does not fit the {parts} ranks of axis {cut.axis!r}"
                )
        used = [cut.axis for cut in self.cuts if cut]
        if len(set(used)) != len(used):
            raise ShardingError(f"an axis may cut one dim only; got {used}")

    def __repr__(self) -> str:
        cuts = [f"{dim}: {c.axis} at {list(c.partition.points)}" for dim, c in enumerate(self.cuts) if c]
        return f"Sharding({list(self.shape)}, {{{', '.join(cuts)}}}, {self.mesh})"

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes on which this tensor is cut."""
        return frozenset(cut.axis for cut in self.cuts if cut)

    @cached_property
    def box(self) -> Box:
        """What this rank owns."""
        return tuple(self.owned(dim) for dim in range(len(self.shape)))

    @cached_property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of this rank's tile."""
        return shape_of(self.box)

    def owned(self, dim: int) -> Interval:
        """This rank's interval of a dim."""
        cut = self.cuts[dim]
        return cut.partition.piece(self.mesh.coordinates[cut.axis]) if cut else whole(self.shape[dim])

    def dims_by_axis(self) -> dict[int, str]:
        """The axis of each dim that is cut."""
        return {dim: cut.axis for dim, cut in enumerate(self.cuts) if cut}


def make_sharding(
    mesh: Mesh,
    shape: Sequence[int],
    dims: Mapping[int, str],
    points: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
) -> Sharding:
    """A sharding from ``{dim: axis}``; cuts are even, on multiples of ``multiple``, or at the given ``points``."""
    cuts: list[Cut | None] = [None] * len(shape)
    given = {_checked_dim(dim, len(shape)): at for dim, at in (points or {}).items()}
    for dim, axis in dims.items():
        place = _checked_dim(dim, len(shape))
        if cuts[place] is not None:
            raise ShardingError(f"dim {place} is cut twice in {dict(dims)}; each dim is cut along one axis")
        mesh.check_axis(axis)
        at = given.get(place)
        step = multiple if place > 0 else 1  # the batch has no stride to keep to
        even = Partition.even(shape[place], mesh.sizes[axis], step)
        cuts[place] = Cut(axis, even if at is None else Partition(tuple(at)))
    return Sharding(mesh, shape, [cut if cut and mesh.sizes[cut.axis] > 1 else None for cut in cuts])


def _checked_dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ShardingError(f"dim {dim} does not exist in a tensor of {ndim} dims")
    return dim % ndim
