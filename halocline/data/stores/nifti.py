"""NIfTI by nibabel, as the medical world has its volumes: read to be converted, for a compressed file has no chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from .files import FileStore, Index, Paths
from .store import Array


class Nifti(FileStore):
    """``dims`` as nibabel shows them: "WHD", or "WHDC" and "WHDT" with a fourth dim. In the file the first is fastest.

    Where the file says how to scale its numbers they are scaled, and are float64. Its affine is not looked at.
    """

    suffixes = (".nii", ".gz")
    locks = True  # one file position for all threads

    def __init__(self, paths: Paths, dims: str, order: str | None = None) -> None:
        super().__init__(paths, dims[::-1], order)  # as they lie: the last is fastest, as everywhere else

    def open_file(self, path: Path) -> OpenedNifti:
        return OpenedNifti(path)


class OpenedNifti:
    chunks = None

    def __init__(self, path: Path) -> None:
        try:
            import nibabel
        except ImportError as error:
            raise DataError(f"{path}: NIfTI is read by nibabel; pip install nibabel") from error
        image: Any = nibabel.load(path, keep_file_open=True)  # reading on in a compressed file is cheap; anew is not
        self._data = image.dataobj
        scaled = (self._data.slope, self._data.inter) != (1, 0)
        self.dtype = np.dtype("float64") if scaled else self._data.dtype
        if self._data.dtype.kind not in "biuf":
            raise DataError(f"{path} holds {self._data.dtype}, and not real numbers")
        self.shape = tuple(reversed(image.shape))

    def read(self, index: Index, out: Array) -> None:
        out[...] = np.asarray(self._data[tuple(reversed(index))]).transpose()

    def close(self) -> None:
        """The file goes with its last user."""
