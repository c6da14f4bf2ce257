"""npy files, mapped into memory: the kernel reads the pages that are touched, and no others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import DataError
from .files import FileStore, Index
from .store import Array

# Headers are Python literals, and in CPython 3.11 two threads that parse one at the same time may fail with a
# SystemError.
_HEADER = threading.Lock()


def map_file(path: Path, mode: Literal["r", "r+"]) -> np.memmap[Any, Any]:
    """Maps an existing file; only its header is read. Any thread may call it."""
    with _HEADER:
        return np.lib.format.open_memmap(path, mode)


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
        data = map_file(path, "r")
        if data.dtype.kind not in "biufc":
            raise DataError(f"{path} holds {data.dtype}, and not numbers")
        self._data, self.shape, self.dtype = data, data.shape, data.dtype

    def read(self, index: Index, out: Array) -> None:
        """Copies the box; the kernel reads its pages."""
        out[...] = self._data[index]

    def close(self) -> None:
        """The mapping goes with its last user, who may be in another thread."""
