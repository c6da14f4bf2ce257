"""Files of predictions, written box by box: HDF5, Zarr, NIfTI and npy.

A prediction may be larger than the memory of any rank, so every rank writes its own tile, and no rank ever holds a
whole sample. A file is written under a hidden name and renamed when it is complete: a reader never finds half of one.
"""

from __future__ import annotations

import gzip
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..data import Store
from ..data.stores.nifti import Nifti
from ..data.stores.npy import map_file
from ..errors import DataError
from ..geometry import slices, whole
from ..sizes import size_text
from ..tensor import ShardedTensor, Sharding, unwrap
from ..world import Label, Mesh
from ..world.agreement import agree

_LABEL = Label("write", "predictions", "control")
_CHUNK = 1 << 22  # bytes
ANSWERS = "p"  # the dataset in HDF5
_METADATA = 1 << 16  # bytes of a file beside its values
NIFTI = (".nii", ".nii.gz")


class AnswerFile(ABC):
    """One format. Rank 0 calls ``begin``, ``complete`` and ``discard``; all ranks ``put``, one after another or at
    once."""

    #: Whether ranks may put boxes at the same time, if no chunk belongs to two of them.
    side_by_side = False

    @abstractmethod
    def begin(self, first: int, count: int, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> None:
        """Make room for samples ``first`` to ``first + count``, each of ``shape``, before any is put."""

    @abstractmethod
    def put(self, place: tuple[slice, ...], tile: Any) -> None:
        """Write a box of values; the first slice is over samples."""

    @abstractmethod
    def complete(self) -> None:
        """All is written: rename the file to its final name."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written so far."""


class ArrayFile(AnswerFile):
    """All samples in one array: dataset ``p`` of an HDF5 file, or a Zarr array.

    Ranks write HDF5 files one after another, since the library allows one writer; Zarr arrays at the same time, where
    no chunk belongs to two ranks.
    """

    def __init__(self, out: Path, samples: int) -> None:
        self._out, self._samples = out, samples
        self._part = out.with_name(f".{out.name}.part")
        self._hdf5 = out.suffix != ".zarr"
        self.side_by_side = not self._hdf5
        self._begun = False

    def begin(self, first: int, count: int, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> None:
        """Create the array for all samples, at the first call; further calls do nothing."""
        if self._begun:
            return
        self._begun = True
        _remove(self._part)
        all_samples = (self._samples, *shape)
        _check_room(self._out, math.prod(all_samples) * dtype.itemsize)
        if self._hdf5:
            _reserve_hdf5(self._part, all_samples, dtype, (1, *chunks))
        else:
            import zarr

            zarr.create_array(str(self._part), shape=all_samples, dtype=dtype, chunks=(1, *chunks))

    def put(self, place: tuple[slice, ...], tile: Any) -> None:
        """Open the file, write the box and close it again, so that the next rank sees it."""
        if self._hdf5:
            import h5py

            with h5py.File(self._part, "r+") as file:
                file[ANSWERS][place] = tile
        else:
            import zarr

            zarr.open_array(str(self._part), mode="r+")[place] = tile

    def complete(self) -> None:
        _remove(self._out)
        self._part.rename(self._out)

    def discard(self) -> None:
        _remove(self._part)


class NpyFiles(AnswerFile):
    """An npy file a sample, in a folder, with the dims of the network's answer, such as CDHW; ``names`` by sample."""

    def __init__(self, out: Path, names: Sequence[str]) -> None:
        self._out, self._names = out, names
        self._folder = out.with_name(f".{out.name}.part")

    def begin(self, first: int, count: int, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> None:
        """Write files of zeros."""
        _check_room(self._out, count * math.prod(shape) * dtype.itemsize)
        self._folder.mkdir(exist_ok=True)
        for name in self._names[first : first + count]:
            np.lib.format.open_memmap(self._folder / name, "w+", dtype, shape).flush()

    def put(self, place: tuple[slice, ...], tile: Any) -> None:
        """Write a box into the mapped files of its samples."""
        for number, sample in enumerate(range(place[0].start, place[0].stop)):
            view = map_file(self._folder / self._names[sample], "r+")
            view[place[1:]] = tile[number]
            view.flush()

    def complete(self) -> None:
        """Move all files to their final names."""
        _move_into(self._out, self._folder, self._names)

    def discard(self) -> None:
        _remove(self._folder)


class NiftiFiles(AnswerFile):
    """A NIfTI file a sample, with the affine of the volume that the answer is about.

    Ranks write their boxes into uncompressed files in a hidden folder beside ``out``; rank 0 compresses them when they
    are complete. ``names`` are the final names, by sample.
    """

    def __init__(self, out: Path, store: Store, names: Sequence[str]) -> None:
        self._out, self._store, self._names = out, store, names
        self._folder = out.with_name(f".{out.name}.{names[0]}.part")
        space = [letter for letter in store.dims if letter in "DHW"]
        if len(space) not in (2, 3) or "T" in store.dims:
            raise DataError(f"{out}: samples with dims {store.dims} are not volumes; write to .h5 or .zarr")
        self._space = "".join(space)
        stored = store.stored if isinstance(store, Nifti) else store.dims
        self._nifti = "".join(letter for letter in reversed(stored) if letter in "DHW")  # nibabel's order of dims
        self._sizes = tuple(store.size(letter) for letter in self._space)
        self._raw: list[tuple[int, Path]] = []  # samples whose uncompressed files are being written

    def begin(self, first: int, count: int, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> None:
        """Write files of zeros with their final headers, and compress those of earlier samples."""
        self._compress()
        self._check(shape)
        _check_room(self._out, count * math.prod(shape) * dtype.itemsize)
        self._folder.mkdir(exist_ok=True)
        for sample in range(first, first + count):
            path = self._raw_path(sample)
            _write_zeros(path, self._header(sample), self._file_shape(shape), dtype)
            self._raw.append((sample, path))

    def _check(self, shape: tuple[int, ...]) -> None:
        """Raise DataError unless predictions have the volumes' own size, for which alone the affine holds."""
        if len(shape) - len(self._sizes) not in (0, 1) or shape[len(shape) - len(self._sizes) :] != self._sizes:
            raise DataError(
                f"{self._out}: the answers have the shape {list(shape)} and the volumes {list(self._sizes)}, so that "
                "the affine would not fit; write them to .h5 or .zarr"
            )

    def _letters(self, count: int) -> str:
        """The dims of a prediction with so many, in the network's order."""
        return self._space if count == len(self._space) else f"C{self._space}"

    def _file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file: space, then channels as the fourth dim or later, if there are several."""
        sizes = dict(zip(self._letters(len(shape)), shape, strict=True))
        space = tuple(sizes[letter] for letter in self._nifti)
        return space if sizes.get("C", 1) == 1 else (*space, *((1,) * (3 - len(space))), sizes["C"])

    def _header(self, sample: int) -> Any:
        """The header of the volume that a prediction is about, if that is a NIfTI file."""
        return self._store.header(sample) if isinstance(self._store, Nifti) else None

    def _raw_path(self, sample: int) -> Path:
        return self._folder / f"{sample}.nii"

    def put(self, place: tuple[slice, ...], tile: Any) -> None:
        """Write a box into the memory-mapped files of its samples."""
        import nibabel

        letters = self._letters(len(place) - 1)
        for number, sample in enumerate(range(place[0].start, place[0].stop)):
            image: Any = nibabel.load(self._raw_path(sample))
            view = np.memmap(
                self._raw_path(sample), image.get_data_dtype(), "r+", image.dataobj.offset, image.shape, order="F"
            )
            order = [letters.index(letter) for letter in self._nifti]
            box, part = place[1:], tile[number]
            index: list[Any] = [box[dim] for dim in order]
            if len(letters) == len(self._nifti):
                part = part.transpose(order)
            elif len(image.shape) == len(self._nifti):  # a single channel, which the file has no dim for
                part = part[0].transpose([dim - 1 for dim in order])
            else:
                part = part.transpose([*order, 0])  # channels are last in NIfTI
                index += [0] * (3 - len(self._nifti)) + [box[0]]
            view[tuple(index)] = part
            view.flush()

    def complete(self) -> None:
        """Compress the last files and move all to their final names, into a folder or as the one file ``out``."""
        self._compress()
        if self._out.name.endswith(NIFTI):
            (self._folder / self._names[0]).replace(self._out)
            _remove(self._folder)
        else:
            _move_into(self._out, self._folder, self._names)

    def _compress(self) -> None:
        """Compress files that are complete, where their names end in .gz."""
        for sample, path in self._raw:
            target = self._folder / self._names[sample]
            if target.name.endswith(".gz"):
                with path.open("rb") as source, gzip.open(target, "wb", compresslevel=1) as packed:
                    shutil.copyfileobj(source, packed, 1 << 20)
                path.unlink()
            else:
                path.replace(target)
        self._raw.clear()

    def discard(self) -> None:
        _remove(self._folder)


def _move_into(out: Path, folder: Path, names: Sequence[str]) -> None:
    """Move complete files from a hidden folder into ``out``."""
    out.mkdir(exist_ok=True)
    for name in names:
        (folder / name).replace(out / name)
    _remove(folder)


def _check_room(out: Path, needed: int) -> None:
    """Raise DataError if the disk cannot hold the file, before anything is written."""
    free = shutil.disk_usage(out.resolve().parent).free
    if free < needed + _METADATA:
        raise DataError(f"{out} needs {size_text(needed)}, and its disk has {size_text(free)} free; make room first")


def _reserve_hdf5(path: Path, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> None:
    """Create a dataset with all its blocks allocated: the HDF5 library crashes if a disk is full when it writes."""
    import h5py

    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_chunk(chunks)
    layout.set_fletcher32()
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    with h5py.File(path, "w") as file:
        kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(shape)
        h5py.h5d.create(file.id, ANSWERS.encode(), kind, space, layout)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as reserved:
            os.posix_fallocate(reserved.fileno(), 0, path.stat().st_size)


def _write_zeros(path: Path, header: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Write a NIfTI file of zeros, with the affine and the fields of ``header`` if there is one."""
    import nibabel

    affine = header.get_best_affine() if header is not None else np.eye(4)
    kind: Any = nibabel.Nifti1Image if max(shape) < 1 << 15 else nibabel.Nifti2Image
    image = kind(np.broadcast_to(np.zeros((), dtype), shape), affine, header, dtype=dtype)
    image.header["cal_min"] = image.header["cal_max"] = 0  # the display range was that of the input volume
    image.header.set_slope_inter(1, 0)
    nibabel.save(image, path)


class PredictionWriter:
    """Writes predictions from all ranks, each its own tile. If one rank fails, all raise.

    All ranks call ``write`` and ``close`` together; ``shape`` is that of one sample, once the first is written.
    """

    def __init__(self, file: AnswerFile, mesh: Mesh) -> None:
        self._file, self._mesh = file, mesh
        self.shape: tuple[int, ...] = ()

    def write(self, first: int, answer: Tensor) -> None:
        """Write the predictions of the samples from ``first`` on. By all ranks together.

        Of ranks that hold the same tile one writes. Formats that allow it are written by all ranks at once, others by
        one rank after another.
        """
        sharding = answer.sharding if isinstance(answer, ShardedTensor) else None
        tile = unwrap(answer).cpu().numpy()
        tile = tile.astype(np.uint8) if tile.dtype == bool else tile
        self.shape = tuple(answer.shape[1:])
        chunks = chunks_for(self.shape, tile.dtype.itemsize, sharding)
        self._on_first_rank(lambda: self._file.begin(first, len(answer), self.shape, tile.dtype, chunks))
        box = sharding.box if sharding is not None else tuple(map(whole, tile.shape))
        place = (box[0].shift(first), *box[1:])
        writes = self._is_first(sharding) and tile.size > 0

        def put() -> None:
            if writes:
                self._file.put(slices(place), tile)

        if self._file.side_by_side and self._apart(sharding, chunks):
            self._together(put)
            return
        for rank in range(self._mesh.size):
            self._together(put if rank == self._mesh.rank else _nothing)

    def _is_first(self, sharding: Sharding | None) -> bool:
        """Is this the one rank that writes, of those that hold the same tile?"""
        axes = sharding.axes if sharding is not None else frozenset()
        return all(place == 0 for axis, place in self._mesh.coordinates.items() if axis not in axes)

    def _apart(self, sharding: Sharding | None, chunks: tuple[int, ...]) -> bool:
        """Does every chunk belong to one rank?"""
        return sharding is None or all(
            point % chunk == 0 or point == size
            for cut, size, chunk in zip(sharding.cuts[1:], self.shape, chunks, strict=True)
            if cut is not None
            for point in cut.partition.points
        )

    def close(self) -> None:
        """Give the file its final name. By all ranks together."""
        self._on_first_rank(self._file.complete)

    def discard(self) -> None:
        """After an error: remove what was written. Waits for no other rank."""
        if self._mesh.rank == 0:
            self._file.discard()

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 while the others wait for it."""
        self._together(action if self._mesh.rank == 0 else _nothing)

    def _together(self, action: Callable[[], None]) -> None:
        """Run an action on every rank; if it raises on one, all raise."""
        agree(self._mesh.world, action, _LABEL, DataError)


def _nothing() -> None:
    """The action of a rank that only waits for the others."""


def chunks_for(shape: tuple[int, ...], itemsize: int, sharding: Sharding | None) -> tuple[int, ...]:
    """Sizes of chunks that no two ranks share, of a few megabytes at most.

    Along a cut dim, a chunk divides every cut point; chunks that are too large are halved or divided further.
    """
    cuts = sharding.cuts[1:] if sharding is not None else (None,) * len(shape)
    chunks = [math.gcd(size, *cut.partition.points) if cut else size for size, cut in zip(shape, cuts, strict=True)]
    chunks = [max(1, size) for size in chunks]
    while math.prod(chunks) * itemsize > _CHUNK and max(chunks) > 1:
        largest = chunks.index(max(chunks))
        chunks[largest] = max(d for d in range(1, chunks[largest] // 2 + 1) if chunks[largest] % d == 0)
    return tuple(chunks)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
