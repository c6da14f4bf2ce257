"""Zarr by zarr-python 3: chunked, sharded, compressed, with its own checksums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...geometry import Box, Interval, slices
from .files import FileStore, Index, Paths, refuse_packed
from .store import Array, portions

#: Arrays that say so of themselves have every chunk: one that is not there is missing, and no run of fill values.
COMPLETE = "halocline_complete"

#: Bytes asked for at a time. Zarr decodes many chunks at once, each in memory of its own.
_AT_A_TIME = 1 << 23

_NOWHERE = np.iinfo(np.uint64).max  # in the index of a shard: this chunk is not there


class Zarr(FileStore):
    """The array ``array`` of each group, or the path itself where that is an array.

    A chunk that is not there reads as the fill value, as Zarr has it, unless ``complete`` (or the array's attribute
    ``halocline_complete``, which ``halocline data convert`` sets) says that all chunks were written. Numbers that its
    crc32c finds changed are refused; without that codec, and without compression, changes on the disk go unnoticed.
    """

    suffixes = (".zarr",)

    def __init__(
        self, paths: Paths, dims: str, order: str | None = None, *, array: str = "", complete: bool | None = None
    ) -> None:
        self.array, self.complete = array, complete
        super().__init__(paths, dims, order)

    def place(self, file: int) -> str:
        """The path, and the array in it."""
        return f"{self.paths[file]}, array {self.array!r}" if self.array else str(self.paths[file])

    def open_file(self, path: Path) -> OpenedZarr:
        """The array, checked for a dtype of numbers."""
        return OpenedZarr(path, self.array, self.complete)


class OpenedZarr:
    """An array of an open group.

    Zarr reads missing chunks as fill values. Where all chunks should be there, the files are looked at before each
    read.
    """

    def __init__(self, path: Path, name: str, complete: bool | None) -> None:
        import zarr

        node = zarr.open(str(path), path=name or None, mode="r")
        if not isinstance(node, zarr.Array):
            there = ", ".join(key for key, _ in node.arrays()) or "none"
            raise DataError(f"{path} is a group of arrays ({there}); name one with array=...")
        if node.dtype.kind not in "biufc":
            raise DataError(f"{path} holds {node.dtype}, and not numbers")
        refuse_packed(f"array {name!r} of {path}" if name else str(path), node.attrs)
        self._data: Any = node
        self._folder = path / name
        self.shape, self.dtype, self.chunks = tuple(node.shape), np.dtype(node.dtype), tuple(node.chunks)
        self._complete = bool(node.attrs.get(COMPLETE, False)) if complete is None else complete

    def read(self, index: Index, out: Array) -> None:
        """In portions of whole chunks, after a look at the files that hold them."""
        box = tuple(Interval(i.start, i.stop) if isinstance(i, slice) else Interval(i, i + 1) for i in index)
        if self._complete or self._data.shards:
            self._look_at_files(box)
        room: Any = out.reshape([i.size for i in box])  # contiguous, hence a view
        for part in portions(box, _AT_A_TIME // self.dtype.itemsize, self._grid):
            own = tuple(i.shift(-all_of.lo) for i, all_of in zip(part, box, strict=True))
            self._read(slices(part), room[(*slices(own), ...)])  # the dots: an array even of no dims

    def _read(self, index: tuple[slice, ...], out: Array) -> None:
        """Decode straight into ``out``."""
        from zarr.buffer import cpu

        room: Any = out
        self._data.get_basic_selection(index, out=cpu.NDBuffer.from_ndarray_like(room))

    @property
    def _grid(self) -> tuple[int, ...]:
        """What lies in one file: a shard, or a chunk."""
        return self._data.shards or self.chunks

    def _look_at_files(self, box: Box) -> None:
        """Zarr takes a chunk that is not there, and a shard of no bytes, for fill values."""
        for number in _touched(box, self._grid):
            key = self._data.metadata.encode_chunk_key(number)
            file = self._folder / key
            if not file.exists():
                if self._complete:
                    raise DataError(f"chunk {key} is missing, although the array was written completely")
            elif self._data.shards:
                self._look_into_shard(file, number, box)

    def _look_into_shard(self, file: Path, number: tuple[int, ...], box: Box) -> None:
        """Raise where a shard lacks a chunk that the box needs."""
        if not file.stat().st_size:
            raise DataError(f"shard {file.relative_to(self._folder)} is empty: it was not written completely")
        index = self._index_of(file) if self._complete else None
        if index is None:
            return
        origin = [n * size for n, size in zip(number, self._grid, strict=True)]
        inner = tuple(
            i.intersect(Interval(lo, lo + size)).shift(-lo) for i, lo, size in zip(box, origin, self._grid, strict=True)
        )
        for chunk in _touched(inner, self.chunks):
            if (index[chunk] == _NOWHERE).all():
                raise DataError(
                    f"chunk {chunk} of shard {file.relative_to(self._folder)} is missing, and the array says that all "
                    "were written"
                )

    def _index_of(self, file: Path) -> Array | None:
        """Offset and size of each chunk in a shard; Zarr itself checks their checksum. None: coded in another way."""
        from zarr.codecs import BytesCodec, Crc32cCodec

        codec = self._data.metadata.codecs[0]
        if [type(each) for each in codec.index_codecs] != [BytesCodec, Crc32cCodec]:
            return None
        counts = [shard // chunk for shard, chunk in zip(self._grid, self.chunks, strict=True)]
        size = 16 * prod(counts)
        with file.open("rb") as opened:
            if codec.index_location.value == "end":
                # The index ends with its checksum of four bytes.
                opened.seek(max(0, file.stat().st_size - size - 4))
            read = opened.read(size)
        return np.frombuffer(read, "<u8").reshape(*counts, 2) if len(read) == size else None

    def close(self) -> None:
        """Zarr keeps no file open."""


def _touched(box: Box, grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The numbers of the tiles of a grid that hold some of a box."""
    return product(*(range(i.lo // size, -(-i.hi // size)) for i, size in zip(box, grid, strict=True)))
