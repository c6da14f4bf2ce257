"""Stores whose samples lie in files: which file holds a sample, with few files open at a time."""

from __future__ import annotations

import glob
import os
import threading
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import DataError
from ...geometry import Box, slices
from .store import SAMPLES, Array, Store, reason

Paths = str | Path | Sequence[str | Path]
Index = tuple[slice | int, ...]

_MOST_OPEN = 32


class OddFile(DataError):
    """A file that holds something else than the first."""


class Opened(Protocol):
    """An array in an open file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array in the file, all dims."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array in the file."""

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """What is decoded in one piece; None where the format has no chunks."""

    def read(self, index: Index, out: Array) -> None:
        """Fill ``out`` with the indexed part."""

    def close(self) -> None:
        """Close the file."""


class FileStore(Store):
    """Samples in files of one kind. ``dims`` names the dims as they lie ("NCDHW"); without N every file is one
    sample.

    All files hold arrays of one shape (but for N) and dtype. The first file is opened when the store is made; with N
    all files are opened, to learn how many samples each holds.
    """

    #: Names of files of this kind, for folders.
    suffixes: tuple[str, ...] = ()

    def __init__(self, paths: Paths, dims: str, order: str | None = None) -> None:
        self.paths = expand(paths, self.suffixes)
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._lock = threading.RLock()
        first = self._look(0)
        dims = dims or self.dims_of_first(first.shape)
        self._at = dims.find(SAMPLES)
        if len(first.shape) != len(dims):
            raise DataError(
                f"{self.place(0)} has {len(first.shape)} dims of sizes {list(first.shape)}, and dims={dims!r} names "
                f"{len(dims)}; name each by a letter, in the order in which they lie, with N for the dim of the samples"
            )
        super().__init__(dims.replace(SAMPLES, "", 1), self._without_samples(first.shape), first.dtype, order)
        self._chunks = None if first.chunks is None else self._without_samples(first.chunks)
        if first.chunks is not None and self._at >= 0:
            self.samples_in_chunk = first.chunks[self._at]
        self._lasts = list(accumulate(map(self._count, range(len(self.paths)))))

    @abstractmethod
    def open_file(self, path: Path) -> Opened:
        """Open one file for reading; its errors are reported with the file's name."""

    def dims_of_first(self, shape: tuple[int, ...]) -> str:
        """The dims where none are given, from the shape of the first file: a format may have a convention."""
        return ""

    @property
    def name(self) -> str:
        """The kind, the first path, and how many more there are."""
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{type(self).__name__} {self.paths[0]}{more}"

    @property
    def identity(self) -> str:
        """All paths, and how many samples each holds."""
        return f"{self.name}: {[str(path) for path in self.paths]}, {self._lasts}"

    @property
    def stored_chunks(self) -> tuple[int, ...] | None:
        """Those of the first file, without the dim of the samples."""
        return self._chunks

    def __len__(self) -> int:
        return self._lasts[-1]

    def place(self, file: int) -> str:
        """A file, and what in it, for errors."""
        return str(self.paths[file])

    def where(self, sample: int) -> str:
        """The file, and the index in it where a file holds several samples."""
        file, index = self._find(sample)
        return f"{self.place(file)}, index {index}" if self._at >= 0 else self.place(file)

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """Open the sample's file if need be and read the box from it."""
        file, index = self._find(sample)
        wanted: list[slice | int] = list(slices(box))
        if self._at >= 0:
            wanted.insert(self._at, index)
        if not self.locks:
            self._checked(file).read(tuple(wanted), out)
            return
        with self._lock:  # no other thread closes the file meanwhile
            self._checked(file).read(tuple(wanted), out)

    def close(self) -> None:
        """Close all open files."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the files by itself."""
        return {**{k: v for k, v in self.__dict__.items() if k != "_lock"}, "_open": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def _find(self, sample: int) -> tuple[int, int]:
        file = bisect_right(self._lasts, sample)
        return file, sample - (self._lasts[file - 1] if file else 0)

    def _count(self, file: int) -> int:
        """How many samples a file holds."""
        if self._at < 0:
            return 1
        try:
            return self._checked(file).shape[self._at]
        except OddFile as error:
            raise DataError(f"{self.place(file)}: {error}") from None

    def _without_samples(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(size for dim, size in enumerate(sizes) if dim != self._at)

    def _look(self, file: int) -> Opened:
        """Open, the most recently used last."""
        with self._lock:
            opened = self._open.pop(file, None)
            if opened is None:
                opened = self._opened(file)
            self._open[file] = opened
            # The least recently used.
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            return opened

    def _opened(self, file: int) -> Opened:
        """Open a file; any error of a format's library becomes a DataError that names the file."""
        try:
            return self.open_file(self.paths[file])
        except (DataError, MemoryError):
            raise
        except Exception as error:  # whatever the library of a format raises
            raise DataError(f"{self.place(file)} cannot be opened: {reason(error)}") from error

    def _checked(self, file: int) -> Opened:
        """An open file that holds what the first one holds, or an error that says the difference."""
        opened = self._look(file)
        shape = self._without_samples(opened.shape)
        if (
            opened.dtype != self.dtype
            or shape != self.stored_shape
            or len(opened.shape) - len(shape) != (self._at >= 0)
        ):
            raise OddFile(
                f"it holds {opened.dtype} of {list(opened.shape)} where the first file holds {self.dtype} "
                f"of {list(self.stored_shape)} a sample; samples of one store have one shape and dtype: crop, pad or "
                "resample the files first"
            )
        return opened


def refuse_packed(place: str, attributes: Mapping[str, Any]) -> None:
    """Packed numbers, as netCDF has them, would be read as what they are not."""
    packing = {"scale_factor": 1, "add_offset": 0}
    packed = [name for name, harmless in packing.items() if name in attributes and attributes[name] != harmless]
    if packed:
        raise DataError(
            f"{place} holds packed numbers (attributes {' and '.join(packed)}); write them unpacked first, since a "
            "store delivers numbers as they are stored"
        )


def visible(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without hidden files, of which archives made on a Mac leave one beside each."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def expand(paths: Paths, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """One file, a folder of them, a pattern or a list, in sorted order but for a list, which is taken as it is."""
    if not isinstance(paths, (str, Path)):
        files = [Path(path) for path in paths]
    elif Path(paths).is_dir() and Path(paths).suffix not in suffixes:
        files = sorted(path for path in visible(Path(paths)) if path.suffix in suffixes)
    elif glob.has_magic(str(paths)) and not Path(paths).exists():
        files = sorted(Path(path) for path in glob.glob(str(paths), recursive=True))  # noqa: PTH207  absolute patterns too
    else:
        files = [Path(paths)]
    if not files:
        raise DataError(f"{os.fspath(paths) if isinstance(paths, (str, Path)) else paths!r} matches no file")
    missing = next((path for path in files if not path.exists()), None)
    if missing is not None:
        raise DataError(f"{missing} does not exist")
    return tuple(files)
