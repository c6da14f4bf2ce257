"""The mesh: ranks arranged along named axes, the last axis fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from ..choices import Choices
from ..errors import MeshError, did_you_mean
from .base import World
from .dry import DryWorld
from .joined import DEFAULT_DEADLINE, JoinedWorld
from .joining import check_transport, connect
from .local import current_local_world
from .submesh import SubWorld

_process_world: list[JoinedWorld] = []
DEFAULT_CHOICES = Choices()


def init(deadline: float | None = None, transport: str | None = None) -> None:
    """Join the ranks. ``deadline`` is the seconds that a wait for another rank may take; later calls change it.

    By default it is 120, and after a successful wait of more than 30 it is four times that wait.

    ``transport`` is "torch" (gloo and NCCL) or "mpi"; by default the environment decides. ``Mesh`` joins by itself.
    """
    if _process_world:
        check_transport(_process_world[0], transport)
        _process_world[0].choose_deadline(deadline)
    elif current_local_world() is None:
        joined = connect(DEFAULT_DEADLINE if deadline is None else deadline, transport)
        if joined is not None:
            joined.choose_deadline(deadline)
            joined.compare_launches()
            _process_world.append(joined)


def joined_world() -> World | None:
    """The world of this rank if ranks have been joined already; this call does not join them."""
    return current_local_world() or (_process_world[0] if _process_world else None)


def forget() -> None:
    """Forget the joined world, when the process groups under it have been destroyed."""
    _process_world.clear()


def this_world() -> World:
    """The world of this rank. Joins the ranks if need be; a process alone gets a dry world of one rank."""
    if joined_world() is None:
        init()
    return joined_world() or DryWorld(0, 1)


class Mesh:
    """Named axes whose sizes multiply to the number of ranks; one size may be -1.

    ``Mesh(data=2, depth=4)`` on 8 ranks: two samples at a time, each cut in four along depth. ``choices`` say how
    operations on its tensors run. All ranks make the same mesh.
    """

    def __init__(self, choices: Choices | None = None, /, **sizes: int) -> None:
        self._arrange(this_world(), DEFAULT_CHOICES if choices is None else choices, sizes)

    def _arrange(self, world: World, choices: Choices, sizes: Mapping[str, int]) -> None:
        self.world, self.choices = world, choices
        self.sizes: Mapping[str, int] = _resolve(sizes, world.size)
        self.names = tuple(self.sizes)
        self._key = (self.names, tuple(self.sizes.values()), id(self.world), self.choices)
        self.channels_last = False  # whether any tensor of this mesh has that memory format
        self._ranks = lru_cache(maxsize=None)(self._ranks_along)
        self._parts: dict[object, Mesh] = {}

    def __getitem__(self, where: tuple[str, int | slice]) -> Mesh:
        """The sub-mesh at a place of an axis, over the other axes: ``mesh["stage", 0]``; a slice keeps the axis.

        All ranks have it as data; only its ``members`` compute on it.
        """
        axis, place = where
        self.check_axis(axis)
        at = range(self.sizes[axis])[place]
        places = at if isinstance(at, range) else (at,)
        key = (axis, tuple(places))
        if key not in self._parts:
            sizes = {name: size for name, size in self.sizes.items() if name != axis or isinstance(at, range)}
            sizes |= {axis: len(places)} if axis in sizes or not sizes else {}
            ranks = [rank for rank in range(self.size) if self.coordinates_of(rank)[axis] in places]
            part = self._parts[key] = Mesh.__new__(Mesh)
            part._arrange(SubWorld(self.world, tuple(ranks)), self.choices, sizes)
        return self._parts[key]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The numbers of its ranks in the world that all ranks joined."""
        return self.world.numbers_outside(tuple(range(self.size)))

    @property
    def is_member(self) -> bool:
        """Is this rank one of a sub-mesh's?"""
        return self.rank >= 0

    def __repr__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.sizes.items()]
        return f"Mesh({', '.join(sizes if self.choices == Choices() else [str(self.choices), *sizes])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled without its world: loading gives a mesh of the same axes over the ranks of the loading process."""
        return _loaded, (self.choices, dict(self.sizes))

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.world.size

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        if not self.is_member:
            raise MeshError(f"this rank is not in {self}, whose ranks are {', '.join(map(str, self.members))}")
        return self.coordinates_of(self.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis."""
        rest, found = rank, {}
        for name in reversed(self.names):
            rest, found[name] = divmod(rest, self.sizes[name])
        return {name: found[name] for name in self.names}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a place on each axis."""
        rank = 0
        for name in self.names:
            rank = rank * self.sizes[name] + coordinates[name]
        return rank

    def ranks_along(self, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from this one only on ``axes``, itself included."""
        return self._ranks(frozenset(axes))

    def _ranks_along(self, axes: frozenset[str]) -> tuple[int, ...]:
        found, stride, strides = [0], 1, {}
        for name in reversed(self.names):
            strides[name], stride = stride, stride * self.sizes[name]
        for name in self.names:
            places = range(self.sizes[name]) if name in axes else (self.coordinates[name],)
            found = [rank + place * strides[name] for rank in found for place in places]
        return tuple(found)

    def count(self, axes: Iterable[str]) -> int:
        """The number of ranks along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def check_axis(self, axis: str) -> None:
        """Raise MeshError for an axis that the mesh does not have."""
        if axis not in self.sizes:
            raise MeshError(
                f"no axis {axis!r} in {self}{did_you_mean(axis, self.names)}; its axes are {', '.join(self.names)}"
            )


def _loaded(choices: Choices, sizes: dict[str, int]) -> Mesh:
    return Mesh(choices, **sizes)


def _resolve(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The sizes with -1 replaced, checked against the number of ranks. Raises MeshError."""
    if not sizes:
        raise MeshError(f"a mesh needs at least one axis, such as Mesh(data={ranks})")
    bad = [name for name, size in sizes.items() if not isinstance(size, int) or (size < 1 and size != -1)]
    if bad or list(sizes.values()).count(-1) > 1:
        raise MeshError(f"axis sizes are whole numbers from 1, at most one of them -1; got {dict(sizes)}")
    known = math.prod(size for size in sizes.values() if size != -1)
    resolved = {name: ranks // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(resolved.values()) != ranks:
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise MeshError(f"a mesh of {shown} does not fit {ranks} ranks; start another number of ranks or use -1")
    return resolved
