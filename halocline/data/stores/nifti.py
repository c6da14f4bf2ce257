"""NIfTI volumes, read with nibabel.

A compressed file has no chunks: each rank decompresses it up to the end of its own box. Convert such files with
``halocline data convert`` where reading limits a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from .files import FileStore, Index, Paths
from .store import Array

HEADER_SIZES = (348, 540)  # of NIfTI-1 and 2: the first number of a file
#: What the dims of a file are, as nibabel shows them, by how many there are.
NIFTI_DIMS = {2: "WH", 3: "WHD", 4: "WHDC"}


class Nifti(FileStore):
    """One volume a file. ``dims`` as nibabel shows them: "WHD", or "WHDC" and "WHDT" with a fourth dim.

    Without ``dims`` a fourth dim is taken for channels. Numbers that the header scales are scaled, and are float64.
    Volumes are read as they lie: the affine changes nothing of what is read, and :meth:`header` hands it out.

        images = hc.data.Nifti("imagesTr/*.nii.gz")
    """

    suffixes = (".nii", ".gz")
    locks = True  # one file position for all threads

    def __init__(self, paths: Paths, dims: str | None = None, order: str | None = None) -> None:
        self._asked = dims
        super().__init__(paths, dims[::-1] if dims is not None else "", order)  # the last is fastest, as elsewhere

    def dims_of_first(self, shape: tuple[int, ...]) -> str:
        """The letters given, or those usual for so many dims; reversed, since nibabel shows the fastest dim first."""
        if self._asked is None and len(shape) not in NIFTI_DIMS:
            raise DataError(
                f"{self.place(0)} has {len(shape)} dims of sizes {list(reversed(shape))}; name them as nibabel shows "
                "them, such as dims='WHDC'"
            )
        return (self._asked or NIFTI_DIMS[len(shape)])[::-1]

    def open_file(self, path: Path) -> OpenedNifti:
        """A volume, opened lazily."""
        return OpenedNifti(path)

    def header(self, sample: int) -> Any:
        """The nibabel header of a sample, with its affine (``header.get_best_affine()``)."""
        file, _ = self._find(sample)
        opened: Any = self._look(file)
        return opened.header.copy()


class OpenedNifti:
    """A volume of an open file; scaled ones are float64."""

    chunks = None

    def __init__(self, path: Path) -> None:
        try:
            import nibabel
        except ImportError as error:
            raise DataError(f"{path}: NIfTI is read by nibabel; pip install nibabel") from error
        with nibabel.openers.ImageOpener(str(path)) as file:
            first = file.read(4)
        if all(int.from_bytes(first, order) not in HEADER_SIZES for order in ("little", "big")):
            raise DataError(f"{path} does not begin as a NIfTI file does")  # nibabel would guess the order of its bytes
        image: Any = nibabel.load(path, keep_file_open=True)  # reading on in a compressed file is cheap; anew is not
        self._data, self.header = image.dataobj, image.header
        # nibabel applies the header's scale when a slice is read.
        scaled = (self._data.slope, self._data.inter) != (1, 0)
        self.dtype = np.dtype("float64") if scaled else self._data.dtype
        if self._data.dtype.kind not in "biuf":
            raise DataError(f"{path} holds {self._data.dtype}, and not real numbers")
        self.shape = tuple(reversed(image.shape))

    def read(self, index: Index, out: Array) -> None:
        """The box, scaled as the header says."""
        out[...] = np.asarray(self._data[tuple(reversed(index))]).transpose()

    def close(self) -> None:
        """The file goes with its last user."""
