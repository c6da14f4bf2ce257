"""What is in a file: its arrays, how they lie, and what their makers say of the dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from .hdf5 import HDF5, datasets
from .nifti import NIFTI_DIMS, Nifti, OpenedNifti
from .npy import Npy, OpenedNpy
from .store import ORDER, SAMPLES, reason
from .zarr import Zarr

#: Words that the makers of files use for dims.
_WORDS = {
    word: letter
    for letter, words in {
        "N": "sample batch",
        "C": "channel",
        "T": "time",
        "D": "depth level lev z",
        "H": "height latitude lat y",
        "W": "width longitude lon x",
    }.items()
    for word in words.split()
}

Kind = type[HDF5] | type[Zarr] | type[Npy] | type[Nifti]


@dataclass(frozen=True)
class Contents:
    """One array of a file. ``dims``: its letters, where the file names its dims by letters or by words known here."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compression: str = ""
    checksum: str = ""
    dims: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)


def kind_of(path: Path) -> Kind | None:
    """By the name of a file; a folder is Zarr if it holds Zarr's metadata. None: nothing that can be read."""
    if path.is_dir():
        return Zarr if any((path / name).exists() for name in ("zarr.json", ".zarray", ".zgroup")) else None
    if path.name.endswith((".nii", ".nii.gz")):
        return Nifti
    return next((kind for kind in (HDF5, Npy) if path.suffix in kind.suffixes), None)


def contents(path: Path) -> list[Contents]:
    """All arrays in a file, without reading them."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    kind = kind_of(path)
    if kind is None:
        raise DataError(f"{path} cannot be read: give a .npy, .h5, .zarr or .nii file")
    readers = {HDF5: _in_hdf5, Zarr: _in_zarr, Npy: _in_npy, Nifti: _in_nifti}
    try:
        return list(readers[kind](path))
    except (DataError, MemoryError):
        raise
    except Exception as error:  # whatever the library of a format raises
        raise DataError(f"{path} cannot be opened: {reason(error)}") from error


def letters(names: Sequence[str | None]) -> str | None:
    """The letters that names of dims stand for, if all are known and differ.

    >>> letters(["sample", "C", "lat", "lon"]), letters(["a", "b"])
    ('NCHW', None)
    """
    letters = [_letter(name or "") for name in names]
    return "".join(letters) if all(letters) and len(set(letters)) == len(letters) else None


def _letter(name: str) -> str:
    """The letter that a file's name of a dim stands for; empty where the name is unknown."""
    if name in tuple(SAMPLES + ORDER):
        return name
    plain = name.lower()
    return _WORDS.get(plain) or _WORDS.get(plain.removesuffix("s"), "")


def _in_npy(path: Path) -> Iterator[Contents]:
    opened = OpenedNpy(path)
    yield Contents("", tuple(opened.shape), opened.dtype.name)


def _in_nifti(path: Path) -> Iterator[Contents]:
    opened = OpenedNifti(path)
    shape = tuple(reversed(opened.shape))
    yield Contents("", shape, opened.dtype.name, dims=NIFTI_DIMS.get(len(shape)))


def _in_hdf5(path: Path) -> Iterator[Contents]:
    """All datasets of numbers in an HDF5 file."""
    import h5py

    with h5py.File(path, "r") as file:
        for name in datasets(file):
            data = file[name]
            if data.shape is None or data.dtype.kind not in "biufc":
                continue
            yield Contents(
                name,
                tuple(data.shape),
                data.dtype.name,
                chunks=data.chunks,
                compression=str(data.compression or ""),
                checksum="fletcher32" if data.fletcher32 else "",
                dims=letters([dim.label for dim in data.dims]),
                attributes=_texts(data.attrs),
            )


def _in_zarr(path: Path) -> Iterator[Contents]:
    """All arrays of numbers in a Zarr group, or the array itself."""
    import zarr

    node = zarr.open(str(path), mode="r")
    if isinstance(node, zarr.Array):
        yield _zarr_array("", node)
        return
    for name, item in sorted(node.members(max_depth=None)):
        if isinstance(item, zarr.Array) and np.dtype(item.dtype).kind in "biufc":
            yield _zarr_array(name, item)


def _zarr_array(name: str, data: Any) -> Contents:
    """One Zarr array; its names of dims come from version 3 metadata or from xarray's attribute."""
    codecs = [type(codec).__name__.removesuffix("Codec").lower() for codec in data.compressors]
    # xarray writes its own attribute in version 2 of the format.
    named = getattr(data.metadata, "dimension_names", None) or data.attrs.get("_ARRAY_DIMENSIONS") or []
    return Contents(
        name,
        tuple(data.shape),
        np.dtype(data.dtype).name,
        chunks=tuple(data.chunks),
        shards=tuple(data.shards) if data.shards else None,
        compression=", ".join(codec for codec in codecs if codec != "crc32c"),
        checksum="crc32c" if "crc32c" in codecs else "",
        dims=letters(named) if len(named) == len(data.shape) else None,
        attributes={**({"dimension_names": ", ".join(map(str, named))} if named else {}), **_texts(data.attrs)},
    )


def _texts(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Short ones as they are; of references and long tables only that they are there."""
    return {str(name): str(value)[:80] for name, value in attributes.items() if name not in ("DIMENSION_LIST",)}
