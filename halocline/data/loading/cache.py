"""Samples kept in host memory: each is read from disk once, and later fetched from the ranks that hold it.

Every sample has a *home*: the ranks that need it in epoch 0. Each of them holds its own part of the sample, as it lies
on disk. The home ranks read the sample when it is first needed and keep it, as far as the budget allows. From then on
they send boxes of it to the ranks that need them, and the disk is idle.

Who holds what follows from the order of epoch 0 and from the budget, so that every rank knows it without asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod

from ...geometry import Box, Partition, shape_of
from ..stores.store import Array, part_of
from .buffers import ALIGNED, Arena, Memory
from .fields import Field, Fields, Grid
from .order import Order

Coordinates = Mapping[str, int]


class SampleCache:
    """One rank's part of the cache.

    ``grid`` cuts samples as they lie on disk; ``budget`` is in bytes, for this rank.
    """

    def __init__(
        self, fields: Fields, grid: Grid, batch_axis: str | None, order: Order, budget: int, shared: bool = False
    ) -> None:
        self._fields, self._grid, self._axis = fields, grid, batch_axis
        self._mesh = grid.mesh
        self._groups = self._mesh.sizes[batch_axis] if batch_axis else 1
        self._me = self._mesh.coordinates
        self._tiles: dict[tuple[int, str], Array] = {}
        self._rooms: dict[tuple[int, str], tuple[Memory, Array]] = {}
        self._loaded: set[int] = set()
        self._arena = Arena(shared=shared)
        self._homes = self._settle(order, budget)

    def _settle(self, order: Order, budget: int) -> dict[int, int]:
        """The group in which each kept sample is at home."""
        room, homes = [budget] * self._groups, dict[int, int]()
        # Bytes of a sample on the rank that holds most of it, so that all ranks keep the same samples.
        cost = sum(map(self._largest_tile, self._fields.values()))
        places = list(order.permutation(0))
        for start in range(0, len(places), order.batch):
            batch = places[start : start + order.batch]
            for group, piece in enumerate(Partition.even(len(batch), self._groups).pieces()):
                for sample in batch[slice(*piece)]:
                    # In the order of epoch 0: what comes first stays, and what comes later is read each time.
                    if room[group] >= cost:
                        room[group] -= cost
                        homes[sample] = group
        return homes

    def _largest_tile(self, each: Field) -> int:
        """Bytes of a field's largest tile, rounded up as the arena does."""
        sizes = []
        for letter, size in zip(each.dims, each.source.shape, strict=True):
            cut = self._grid.cuts.get(letter)
            sizes.append(size if cut is None else max(piece.size for piece in cut.partition.pieces()))
        return -(-prod(sizes) * each.source.dtype.itemsize // ALIGNED) * ALIGNED

    @property
    def share(self) -> float:
        """How much of the data is kept, once all of it was read."""
        samples = next(len(each.store) for each in self._fields.values())
        return len(self._homes) / samples

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds now."""
        return sum(tile.nbytes for tile in list(self._tiles.values()))  # which grow in another thread

    def keeps(self, sample: int) -> bool:
        """Does any rank keep this sample?"""
        return sample in self._homes

    def home(self, sample: int) -> int:
        """The group that holds it."""
        return self._homes[sample]

    def part(self, sample: int, name: str, source: Box) -> Array:
        """A box of what this rank holds."""
        box = self.home_box(self._fields[name], self._me)
        own = tuple(interval.shift(-all_of.lo) for interval, all_of in zip(source, box, strict=True))
        return part_of(self._tiles[sample, name], own)

    def at_home(self, sample: int) -> bool:
        """Is this rank one of those that hold it?"""
        return self._homes.get(sample) == self.group(self._me)

    def first_time(self, sample: int) -> bool:
        """Must the home ranks read it now? Asked once for each batch it is in, on every rank."""
        new = sample not in self._loaded
        self._loaded.add(sample)
        return new

    def new_tile(self, sample: int, name: str) -> tuple[Box, Array, Memory]:
        """Which part of a sample this rank holds, and room for it."""
        each = self._fields[name]
        box = self.home_box(each, self._me)
        if (sample, name) not in self._rooms:  # else it was forgotten, and is read again
            self._rooms[sample, name] = self._arena.take(shape_of(box), each.kept_dtype)
        memory, self._tiles[sample, name] = self._rooms[sample, name]
        return box, self._tiles[sample, name], memory

    def forget(self, samples: Iterable[int]) -> None:
        """Mark samples as not read: the next batch that needs them reads them again."""
        self._loaded.difference_update(samples)

    def drop(self, sample: int) -> None:
        """Free the tiles of a bad sample; no rank asks for them any more."""
        for name in self._fields:
            self._tiles.pop((sample, name), None)

    def group(self, where: Coordinates) -> int:
        """Which part of the batch the rank at these coordinates works on."""
        return where[self._axis] if self._axis else 0

    def home_box(self, each: Field, where: Coordinates) -> Box:
        """The box of a field that the rank at these coordinates keeps, as it lies on disk."""
        return self._grid.box(each.dims, each.source.shape, where)

    def ranks(self, each: Field, group: int) -> Iterator[dict[str, int]]:
        """The ranks of a group among which a field is cut, and that stand as this one on all other axes."""
        axes = self._grid.axes(each.dims)
        for places in product(*(range(self._mesh.sizes[axis]) for axis in axes)):
            # Ranks that hold the same part on other axes each serve their own peers.
            where = {**self._me, **dict(zip(axes, places, strict=True))}
            yield {**where, self._axis: group} if self._axis else where
