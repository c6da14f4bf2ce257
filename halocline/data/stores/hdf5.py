"""HDF5 by h5py: one sample a file, or many samples in a dataset; chunked, compressed, with dims in any order."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from ...errors import DataError
from .files import FileStore, Index, Paths, refuse_packed
from .store import Array

_SMALLEST_CACHE, _LARGEST_CACHE = 1 << 20, 1 << 26
_MOST_LINKS = 16  # on the way to a dataset
_FEW = 1 << 13  # chunks that are looked at one by one when a file is opened


class HDF5(FileStore):
    """Dataset ``dataset`` of each file. The library reads one box at a time in a process, whatever its threads do.

    HDF5 reads what was never written as fill values. So a dataset is refused that has chunks missing (a writer that
    was killed), unless ``complete=False`` says that they are meant; so is one that lies in other files that are not
    there. External links and the sources of virtual datasets must lie in the file's own folder, or below it: a file
    from elsewhere could otherwise show numbers of any other file that you can read. ``outside=True`` allows them.

    Numbers that its fletcher32 finds changed are refused; without it, changes on the disk go unnoticed, and
    with it a whole chunk of zeros still passes. The file's own tables have checksums since version 1.10 of the format
    (``libver="v110"``), which ``halocline data convert`` writes. netCDF's ``_FillValue`` is a number like any other.
    """

    locks = True
    suffixes = (".h5", ".hdf5", ".hdf", ".he5", ".nc")

    def __init__(
        self,
        paths: Paths,
        dataset: str,
        dims: str,
        order: str | None = None,
        *,
        complete: bool = True,
        outside: bool = False,
    ) -> None:
        self.dataset, self.complete, self.outside = dataset, complete, outside
        super().__init__(paths, dims, order)

    def place(self, file: int) -> str:
        """The file and the dataset."""
        return f"{self.paths[file]}, dataset {self.dataset!r}"

    def open_file(self, path: Path) -> OpenedHDF5:
        """The dataset, checked for missing parts."""
        return OpenedHDF5(path, self.dataset, self.complete, self.outside)


class OpenedHDF5:
    """A dataset of an open file, checked for what HDF5 would silently fill in."""

    def __init__(self, path: Path, dataset: str, complete: bool, outside: bool = False) -> None:
        import h5py

        self._file = h5py.File(path, "r")
        try:
            folder = None if outside else path.resolve().parent
            self._data = _dataset(self._file, dataset, folder)
            _refuse_what_is_not_there(self._data, complete, folder)
            cache = _cache_size(self._data)
            # The size of the chunk cache can be given only when a file is opened.
            if cache > _SMALLEST_CACHE:
                self._file.close()
                self._file = h5py.File(path, "r", rdcc_nbytes=cache)
                self._data = self._file[dataset]
        except BaseException:
            self._file.close()
            raise
        self.shape, self.dtype, self.chunks = tuple(self._data.shape), self._data.dtype, self._data.chunks

    def read(self, index: Index, out: Array) -> None:
        """Straight into ``out``, without a copy in between."""
        self._data.read_direct(out, index if index else None)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def datasets(file: Any) -> list[str]:
    """The names of all datasets in an open file."""
    import h5py

    names: list[str] = []
    file.visititems(lambda path, item: names.append(path) if isinstance(item, h5py.Dataset) else None)
    return names


def _dataset(file: Any, name: str, folder: Path | None) -> Any:
    """A dataset of numbers by name; the error lists what the file holds. Links lead nowhere outside ``folder``."""
    import h5py

    _check_links(file, name, folder)
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        there = ", ".join(datasets(file)[:12]) or "none"
        raise DataError(f"{file.filename} has no dataset {name!r}; there: {there}")
    if dataset.shape is None or dataset.dtype.kind not in "biufc":
        raise DataError(f"dataset {name!r} of {file.filename} holds {dataset.dtype}, and not numbers")
    refuse_packed(_named(dataset), dataset.attrs)
    return dataset


def _check_links(file: Any, name: str, folder: Path | None, depth: int = 0) -> None:
    """Raise if an external link on the way to ``name`` leads to a file outside ``folder``."""
    import h5py

    if depth > _MOST_LINKS:
        raise DataError(f"{name!r} of {file.filename} is behind more than {_MOST_LINKS} links; copy it with h5repack")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for count in range(1, len(parts) + 1):
        where, rest = "/".join(parts[:count]), parts[count:]
        link = file.get(where, getlink=True)
        if isinstance(link, h5py.SoftLink):  # within the file, where it may meet another link
            above = [] if link.path.startswith("/") else parts[: count - 1]
            return _check_links(file, "/".join([*above, link.path, *rest]), folder, depth + 1)
        if isinstance(link, h5py.ExternalLink):
            target = _found(Path(file.filename), link.filename)
            if target is None:
                return None  # the link leads nowhere, and nothing is read
            _check_inside(target, folder, f"{where!r} of {file.filename}")
            with h5py.File(target, "r") as other:
                return _check_links(other, "/".join([link.path, *rest]), folder, depth + 1)
    return None


def _found(own: Path, name: str) -> Path | None:
    """The file that HDF5 opens for a name in the file ``own``: beside it first, then at the path as it is written."""
    places = [own] if name == "." else [own.parent / name, Path(name)]
    return next((place for place in places if place.exists()), None)


def _check_inside(path: Path, folder: Path | None, who: str) -> None:
    """Raise DataError if the path lies outside ``folder``."""
    if folder is not None and not path.resolve().is_relative_to(folder):
        raise DataError(
            f"{who} leads to {path}, outside the folder of its file, and a file from elsewhere could show any other; "
            "copy the numbers into one file with h5repack, or say HDF5(..., outside=True)"
        )


def _refuse_what_is_not_there(data: Any, complete: bool, folder: Path | None) -> None:
    """Raise where HDF5 would silently read fill values."""
    if data.external:
        raise DataError(
            f"{_named(data)} keeps its numbers in another file ({data.external[0][0]}), and HDF5 reads "
            "what is missing there as zeros; copy them into the file with h5repack"
        )
    if data.is_virtual:
        _look_at_sources(data, complete, folder)
    elif complete and data.size:
        missing = _chunks_never_written(data)
        if missing:
            raise DataError(
                f"{_named(data)} was never written in full ({missing}), and would read as {data.fillvalue} there; "
                "write it again, or give complete=False if that is intended"
            )


def _chunks_never_written(data: Any) -> str:
    """What is missing of a dataset, in words; empty where nothing is."""
    if data.chunks is None:
        return "" if data.id.get_storage_size() else "nothing of it is there"
    wanted = prod(-(-size // chunk) for size, chunk in zip(data.shape, data.chunks, strict=True))
    there = _chunks_there(data) if wanted <= _FEW else data.id.get_num_chunks()
    if there < wanted:
        return f"{wanted - there} of {wanted} chunks are missing"
    plain = data.id.get_create_plist().get_nfilters() == 0
    short = plain and data.id.get_storage_size() < wanted * prod(data.chunks) * data.dtype.itemsize
    return "some of its chunks are too short" if short else ""


def _chunks_there(data: Any) -> int:
    """Counted by their places: in older files the list of chunks has no checksum, and one may be in none."""
    places: set[tuple[int, ...]] = set()
    data.id.chunk_iter(lambda chunk: places.add(chunk.chunk_offset))
    inside = (
        all(lo < size and lo % step == 0 for lo, size, step in zip(place, data.shape, data.chunks, strict=True))
        for place in places
    )
    return sum(inside)


def _look_at_sources(data: Any, complete: bool, folder: Path | None) -> None:
    """A virtual dataset reads fill values for every source that is not found, and where it has none."""
    import h5py

    own = Path(data.file.filename)
    mapped = 0
    for source in data.virtual_sources():
        mapped += source.vspace.get_select_npoints()
        present = _found(own, source.file_name)
        if present is None:
            raise DataError(f"{_named(data)} is made of other files, of which {source.file_name} does not exist")
        _check_inside(present, folder, _named(data))
        with h5py.File(present, "r") as file:
            _refuse_what_is_not_there(_dataset(file, source.dset_name, folder), complete, folder)
    if complete and mapped < data.size:
        raise DataError(
            f"{_named(data)} is made of other files, which hold {mapped} of its {data.size} numbers; the others would "
            f"read as {data.fillvalue}: give complete=False if that is intended"
        )


def _named(data: Any) -> str:
    return f"dataset {data.name.lstrip('/')!r} of {data.file.filename}"


def _cache_size(data: Any) -> int:
    """A chunk whose rows lie apart in the box that is read should fit into the cache, or it is read row by row."""
    if data.chunks is None:
        return _SMALLEST_CACHE
    size = prod(data.chunks) * data.dtype.itemsize
    in_slabs = data.chunks[2:] == data.shape[2:]
    return _SMALLEST_CACHE if in_slabs or size > _LARGEST_CACHE else max(_SMALLEST_CACHE, size)
