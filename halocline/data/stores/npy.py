"""npy files, mapped into memory: the kernel reads the pages that are touched, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import DataError
from .files import FileStore, Index
from .store import Array


class Npy(FileStore):
    """npy files, mapped into memory. The format has no checksum: bytes that change on the disk go unnoticed.

    A file that shrinks while it is read ends the process (SIGBUS), as with every mapped file: write a new file and
    rename it.
    """

    suffixes = (".npy",)

    def open_file(self, path: Path) -> OpenedNpy:
        """The mapped file."""
        return OpenedNpy(path)


class OpenedNpy:
    """A mapped file."""

    chunks = None

    def __init__(self, path: Path) -> None:
        # Nothing is read yet but the header.
        data = np.lib.format.open_memmap(path, mode="r")
        if data.dtype.kind not in "biufc":
            raise DataError(f"{path} holds {data.dtype}, and not numbers")
        self._data, self.shape, self.dtype = data, data.shape, data.dtype

    def read(self, index: Index, out: Array) -> None:
        """Copies the box; the kernel reads its pages."""
        out[...] = self._data[index]

    def close(self) -> None:
        """The mapping goes with its last user, who may be in another thread."""
