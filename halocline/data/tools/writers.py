"""New arrays in files, written box by box: npy, HDF5, Zarr."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import DataError
from ..stores.files import Index
from ..stores.hdf5 import HDF5
from ..stores.npy import Npy, map_file
from ..stores.store import Array, Store
from ..stores.zarr import COMPLETE, Zarr


@dataclass(frozen=True)
class ArraySpec:
    """An array to be written: all its dims by letter, as they will lie."""

    dims: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None = None
    level: int = 0  # of compression; 0: none
    dataset: str = ""


class ArrayWriter(Protocol):
    """Writes one new array, box by box, and opens it again."""

    def write(self, index: Index, numbers: Array) -> None:
        """Write the part of the array that ``index`` names."""

    def close(self) -> None:
        """All is written."""

    def opened(self) -> Store:
        """What was written, as a store, to be read back."""


class NpyWriter:
    """A mapped file, its room on the disk reserved at once."""

    def __init__(self, path: Path, plan: ArraySpec) -> None:
        self._path, self._plan = path, plan
        np.lib.format.open_memmap(path, "w+", plan.dtype, plan.shape)
        _reserve(path)

    def write(self, index: Index, numbers: Array) -> None:
        """Mapped anew each time: what is mapped counts as memory of this process."""
        map_file(self._path, "r+")[index] = numbers

    def close(self) -> None:
        """Nothing is open."""

    def opened(self) -> Store:
        """With the dims as they were written."""
        return Npy([self._path], self._plan.dims, self._plan.dims.replace("N", ""))


class HDF5Writer:
    """With a checksum of every chunk."""

    def __init__(self, path: Path, plan: ArraySpec) -> None:
        import h5py

        self._path, self._plan = path, plan
        self._file = h5py.File(path, "w", libver=("v110", "v110"))  # since when the file's own tables have checksums
        compressed = {"compression": "gzip", "compression_opts": plan.level, "shuffle": True} if plan.level else {}
        # Empty and scalar datasets cannot be chunked.
        options = {"chunks": plan.chunks, "fletcher32": True, **compressed} if prod(plan.shape) and plan.shape else {}
        self._data = self._file.create_dataset(plan.dataset, plan.shape, plan.dtype, **options)
        for dim, letter in zip(self._data.dims, plan.dims, strict=True):
            dim.label = letter

    def write(self, index: Index, numbers: Array) -> None:
        """Chunks are compressed as they are complete."""
        self._data[index] = numbers

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def opened(self) -> Store:
        """With the dims as they were written."""
        return HDF5([self._path], self._plan.dataset, self._plan.dims, self._plan.dims.replace("N", ""))


class ZarrWriter:
    """With a checksum of every chunk, every chunk written, and a word that says so."""

    def __init__(self, path: Path, plan: ArraySpec) -> None:
        import zarr
        from zarr.codecs import Crc32cCodec, ZstdCodec

        self._path, self._plan = path, plan
        codecs = [*([ZstdCodec(level=plan.level)] if plan.level else []), Crc32cCodec()]
        self._data: Any = zarr.create_array(
            str(path),
            name=plan.dataset or None,
            shape=plan.shape,
            chunks=plan.chunks,
            shards=plan.shards,
            dtype=plan.dtype,
            compressors=codecs,
            fill_value=0,
            dimension_names=list(plan.dims),
            config={"write_empty_chunks": True},
        )

    def write(self, index: Index, numbers: Array) -> None:
        """Also chunks that hold nothing but zeros."""
        self._data[index] = numbers

    def close(self) -> None:
        """Mark the array as complete."""
        self._data.attrs[COMPLETE] = True

    def opened(self) -> Store:
        """With the dims as they were written."""
        order = self._plan.dims.replace("N", "")
        return Zarr([self._path], self._plan.dims, order, array=self._plan.dataset)


WriterType = type[NpyWriter] | type[HDF5Writer] | type[ZarrWriter]
WRITERS: dict[str, WriterType] = {".npy": NpyWriter, ".h5": HDF5Writer, ".hdf5": HDF5Writer, ".zarr": ZarrWriter}


def writer_of(path: Path) -> WriterType:
    """The writer for a path, by the end of its name."""
    if path.suffix not in WRITERS:
        raise DataError(f"{path}: its name must end with one of {', '.join(WRITERS)}, which says what to write")
    return WRITERS[path.suffix]


def _reserve(path: Path) -> None:
    """Take the room on the disk now: a mapped file that finds none later ends the process."""
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
