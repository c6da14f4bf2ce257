"""Which samples of a batch, and which box of each, belong to the rank at given coordinates.

Everything here follows from the arguments of the loader, so that any rank can work out any other rank's part: exchanges
need no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...errors import DataError
from ...geometry import Box, Interval, Partition, SampleView
from ...tensor import Cut, Sharding
from ...world import Mesh
from ..stores.store import SAMPLES
from .augment import Augmentation, AugmentationDraws, Rotate90, drawn_moves
from .fields import Fields, Grid, frame_of, with_rim
from .values import At

Coordinates = Mapping[str, int]


class BatchLayout:
    """Fields on a mesh. The same on every rank, and the same for all samples: only views differ."""

    def __init__(
        self,
        fields: Fields,
        mesh: Mesh,
        cut: Mapping[str, str],
        augment: Sequence[Augmentation],
        seed: int,
        multiple: int = 1,
        points: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.fields, self.mesh, self.seed = fields, mesh, seed
        self._augment = tuple(augment)
        _check_letters(cut, augment)
        _check_planes(fields, augment)
        shared = {*cut, *(letter for each in augment for letter in each.letters())} - {SAMPLES}
        self._frame = frame_of(fields, "".join(sorted(shared)))
        # The sizes after augmentation, from the first sample; all others must agree.
        self._sizes = drawn_moves(self._augment, self._frame, AugmentationDraws(seed, 0, 0))[1]
        spatial = {letter: axis for letter, axis in cut.items() if letter != SAMPLES}
        self.grid = Grid.of(mesh, spatial, self._sizes, multiple, points)
        #: Of samples as they lie, for those that are kept in memory.
        self.home = Grid.of(mesh, spatial, self._frame)
        axis = cut.get(SAMPLES)
        if axis is not None:
            mesh.check_axis(axis)
        self.batch_axis = axis if axis is not None and mesh.sizes[axis] > 1 else None
        self.groups = mesh.sizes[axis] if axis is not None else 1
        # Asked for several times in a step: for the reads, the exchange and the values.
        self._views = lru_cache(maxsize=1024)(self._new_views)
        self._shapes = {name: self.views(0, 0)[name].shape for name in fields}

    @property
    def augmented(self) -> bool:
        """May a sample be seen otherwise in another epoch?"""
        return bool(self._augment)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one sample, after all augmentation."""
        return self._shapes[name]

    def views(self, epoch: int, sample: int) -> Mapping[str, SampleView]:
        """Which box of the source each field of a sample shows, after the augmentation of that epoch."""
        return self._views(epoch if self._augment else 0, sample if self._augment else 0)

    def _new_views(self, epoch: int, sample: int) -> Mapping[str, SampleView]:
        """Draw the augmentation of one sample; raises where it leads to another size than that of the first sample."""
        moves, sizes = drawn_moves(self._augment, self._frame, AugmentationDraws(self.seed, epoch, sample))
        if sizes != self._sizes:
            raise DataError(f"augmentation gives samples of {self._sizes} and of {sizes}; a batch has one size")
        return {name: each.moved(moves) for name, each in self.fields.items()}

    def tile(self, name: str, where: Coordinates) -> Box:
        """The part of every sample that a rank owns."""
        return self.grid.box(self.fields[name].dims, self.shape(name), where)

    def needed(self, name: str, where: Coordinates) -> Box:
        """The part that it reads: its own, and the rim."""
        each = self.fields[name]
        return with_rim(self.tile(name, where), each.dims, self.shape(name), each.rim)

    def batch(self, samples: int) -> Partition:
        """How a batch of that size is cut over the batch axis."""
        return Partition.even(samples, self.groups)

    def group(self, where: Coordinates) -> int:
        """Which part of the batch the rank at these coordinates works on."""
        return where[self.batch_axis] if self.batch_axis else 0

    def positions(self, samples: int, where: Coordinates) -> Interval:
        """This rank's places in a batch of that size."""
        return self.batch(samples).piece(self.group(where))

    def at(self, name: str, sample: int, epoch: int, box: Box) -> At:
        """The place of a box, for transformations that depend on global indices."""
        return At(self.fields[name].dims, self.shape(name), box, sample, epoch, self.seed)

    def sharding(self, name: str, batch: Partition) -> Sharding:
        """Of a batch whose samples are divided among the groups like that."""
        inner = self.grid.sharding(self.fields[name].dims, self.shape(name))
        first = Cut(self.batch_axis, batch) if self.batch_axis else None
        return Sharding(self.mesh, (batch.size, *inner.shape), (first, *inner.cuts))


def _check_letters(cut: Mapping[str, str], augment: Sequence[Augmentation]) -> None:
    """Raise for augmentations of channels or samples, and for an axis that would cut two dims."""
    for each in augment:
        if set(each.letters()) & {"C", SAMPLES}:
            raise DataError(f"{type(each).__name__} moves {each.letters()}: channels and samples are not space")
    axes = list(cut.values())
    if len(set(axes)) != len(axes):
        raise DataError(f"an axis of the mesh can cut only one dim; got {dict(cut)}")


def _check_planes(fields: Fields, augment: Sequence[Augmentation]) -> None:
    """A plane turns as a whole: refused now, and not at the first sample that happens to be turned."""
    for plane in (each.letters() for each in augment if isinstance(each, Rotate90)):
        for name, each in fields.items():
            if len(set(plane) & set(each.dims)) == 1:
                raise DataError(
                    f"Rotate90 of {' and '.join(plane)}: {name!r} has dims {each.dims}, of which one alone cannot "
                    "turn; turn another plane, or give the dim another letter where it is not the same"
                )
