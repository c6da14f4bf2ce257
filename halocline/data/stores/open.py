"""A path as a store: its name says of which kind."""

from __future__ import annotations

import glob
from pathlib import Path

from ...errors import DataError, did_you_mean
from .contents import Contents, Kind, contents, kind_of
from .files import FileStore, expand, visible
from .hdf5 import HDF5
from .nifti import Nifti
from .npy import Npy
from .zarr import Zarr

_SAMPLES_IN_ONE = {1: "N", 2: "NC", 3: "NHW", 4: "NDHW", 5: "NCDHW", 6: "NCTDHW"}
_A_FILE_EACH = {1: "C", 2: "HW", 3: "DHW", 4: "CDHW", 5: "CTDHW"}


def dims_example(count: int, files: int) -> str:
    """Letters for an array of so many dims, as an example; several files hold a sample each, more often than not.

    >>> dims_example(4, 1), dims_example(4, 10)
    ('NDHW', 'CDHW')
    """
    return (_SAMPLES_IN_ONE if files == 1 else _A_FILE_EACH).get(count, "NCDHW")


def open_store(
    path: str | Path, dims: str | None = None, dataset: str | None = None, order: str | None = None
) -> FileStore:
    """A file, a folder of files or a pattern, of HDF5, Zarr, npy or NIfTI.

    ``dims`` may be left out where the file names its dims, and ``dataset`` where there is only one.
    """
    dataset = dataset.strip("/") if dataset is not None else None
    paths, kind = files_of(path)
    # The file is looked into only where something is left to find out.
    chosen = _chosen(paths[0], dataset) if dims is None or (dataset is None and kind in (HDF5, Zarr)) else None
    name = dataset if dataset is not None else (chosen.name if chosen is not None else "")
    if dims is None:
        dims = chosen.dims if chosen is not None else None
    if dims is None:
        shape = list(chosen.shape) if chosen is not None else []
        raise DataError(
            f"{paths[0]} does not name its dims {shape}; name them in the order in which they are stored, "
            f"such as --dims {dims_example(len(shape), len(paths))} (N: samples, C: channels, T: time, D, H, W: space)"
        )
    if kind is HDF5:
        return HDF5(paths, name, dims, order)
    if kind is Zarr:
        return Zarr(paths, dims, order, array=name)
    if dataset:
        raise DataError(f"{paths[0]} holds one array, without a name; leave out the name {dataset!r}")
    return Nifti(paths, dims, order) if kind is Nifti else Npy(paths, dims, order)


def files_of(path: str | Path) -> tuple[tuple[Path, ...], Kind]:
    """The files that a path names, all of one kind."""
    if Path(path).is_dir() and kind_of(Path(path)) is None:
        files = [file for file in visible(Path(path)) if kind_of(file) is not None]
    elif Path(path).exists() or not glob.has_magic(str(path)):
        files = [Path(path)]
    else:
        files = [file for file in expand(path, ()) if kind_of(file) is not None]
    if not Path(path).exists() and not glob.has_magic(str(path)):
        folder = Path(path).parent
        there = [file.name for file in visible(folder)] if folder.is_dir() else []
        near = did_you_mean(Path(path).name, there)
        raise DataError(f"{path}: no such file or folder in {Path.cwd()}{near}")
    if not files:
        raise DataError(f"{path}: there is no .npy, .h5, .zarr or .nii here")
    kinds = {kind_of(file) for file in files}
    kind = kinds.pop()
    if kinds or kind is None:
        what = "holds files of several kinds" if kinds else "cannot be read: give a .npy, .h5, .zarr or .nii file"
        raise DataError(f"{path} {what}; name the files you want, such as 'folder/*.h5'")
    return tuple(files), kind


def _chosen(path: Path, dataset: str | None) -> Contents:
    """The one dataset that is meant, or an error that lists them."""
    there = contents(path)
    named = [each for each in there if dataset is None or each.name == dataset]
    if len(named) == 1:
        return named[0]
    names = ", ".join(each.name for each in there[:12]) or "none"
    if dataset is not None:
        raise DataError(f"{path} has no dataset {dataset!r}; there: {names}")
    raise DataError(f"{path} holds {len(there)} datasets ({names}); name one with --dataset")
