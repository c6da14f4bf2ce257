"""Every kind of store passes the tests that a store of the user's own would inherit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from halocline.data.stores.generated import Generated
from halocline.data.stores.hdf5 import HDF5
from halocline.data.stores.npy import Npy
from halocline.data.stores.store import Store
from halocline.data.stores.zarr import Zarr
from halocline.errors import DataError
from halocline.geometry import Box, Interval, slices, whole
from halocline.testing import StoreTests
from halocline.workloads import climate

Array = NDArray[Any]


def halves(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, -(-size // 2)) for size in shape)


class TestHDF5(StoreTests):
    """Many samples in one dataset, as it comes."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def make(self, array: Array, dims: str, folder: Path) -> Store:
        with h5py.File(folder / "a.h5", "w") as file:
            chunks = halves(array.shape) if self.options else None
            file.create_dataset("group/x", data=array, chunks=chunks, **self.options)
        return HDF5(folder / "a.h5", "group/x", dims)


class TestHDF5Compressed(TestHDF5):
    options = {"compression": "gzip", "shuffle": True, "fletcher32": True}  # noqa: RUF012


class TestHDF5OddOrder(StoreTests):
    """Big-endian, the samples last but one: WHDNC."""

    def make(self, array: Array, dims: str, folder: Path) -> Store:
        lies = "".join(letter for letter in "WHDNC" if letter in dims)
        turned = array.transpose([dims.index(letter) for letter in lies])
        with h5py.File(folder / "a.h5", "w") as file:
            data = turned if turned.dtype == bool else turned.astype(turned.dtype.newbyteorder(">"))
            file.create_dataset("x", data=data, chunks=halves(turned.shape))
        return HDF5(str(folder / "a.h5"), "x", lies)


class TestHDF5Files(StoreTests):
    """A file a sample."""

    def make(self, array: Array, dims: str, folder: Path) -> Store:
        for number, sample in enumerate(array):
            with h5py.File(folder / f"{number}.h5", "w") as file:
                file["x"] = sample
        return HDF5(folder, "x", dims.replace("N", ""))


class TestHDF5Uneven(StoreTests):
    """Some samples in one file, the others in the next."""

    def make(self, array: Array, dims: str, folder: Path) -> Store:
        for name, part in (("a", array[:1]), ("b", array[1:])):
            with h5py.File(folder / f"{name}.hdf5", "w") as file:
                file["x"] = part
        return HDF5(str(folder / "*.hdf5"), "x", dims)


class TestHDF5Virtual(StoreTests):
    def make(self, array: Array, dims: str, folder: Path) -> Store:
        layout = h5py.VirtualLayout(array.shape, array.dtype)
        for number, sample in enumerate(array):
            with h5py.File(folder / f"{number}.h5", "w") as file:
                file["x"] = sample
            layout[number] = h5py.VirtualSource(f"{number}.h5", "x", sample.shape)
        with h5py.File(folder / "all.h5", "w") as file:
            file.create_virtual_dataset("x", layout)
        return HDF5(folder / "all.h5", "x", dims)


class TestNpy(StoreTests):
    def make(self, array: Array, dims: str, folder: Path) -> Store:
        np.save(folder / "a.npy", array)
        return Npy(folder / "a.npy", dims)


class TestNpyFortran(StoreTests):
    def make(self, array: Array, dims: str, folder: Path) -> Store:
        np.save(folder / "a.npy", np.asfortranarray(array))
        return Npy(folder / "a.npy", dims)


class TestNpyFiles(StoreTests):
    def make(self, array: Array, dims: str, folder: Path) -> Store:
        for number, sample in enumerate(array):
            np.save(folder / f"{number}.npy", sample)
        return Npy([folder / f"{number}.npy" for number in range(len(array))], dims.replace("N", ""))


class TestZarr(StoreTests):
    options: dict[str, Any] = {"compressors": None}  # noqa: RUF012

    def make(self, array: Array, dims: str, folder: Path) -> Store:
        data = zarr.create_array(
            folder / "a.zarr", shape=array.shape, chunks=halves(array.shape), dtype=array.dtype, **self.options
        )
        data[...] = array
        return Zarr(folder / "a.zarr", dims)


class TestZarrCompressed(TestZarr):
    options = {"compressors": [ZstdCodec(level=1), Crc32cCodec()]}  # noqa: RUF012


class TestZarrOlder(TestZarr):
    options = {"zarr_format": 2, "order": "F"}  # noqa: RUF012


class TestZarrSharded(StoreTests):
    """In a group, big-endian, complete, in shards that hold all of the sample."""

    def make(self, array: Array, dims: str, folder: Path) -> Store:
        chunks = halves(array.shape)
        group = zarr.create_group(folder / "g.zarr")
        data = group.create_array(
            "deep/x",
            shape=array.shape,
            shards=(chunks[0], *(2 * size for size in chunks[1:])),
            chunks=chunks,
            dtype=array.dtype,
            compressors=Crc32cCodec(),
            serializer=BytesCodec(endian="big") if array.dtype.itemsize > 1 else "auto",
            config={"write_empty_chunks": True},
        )
        data[...] = array
        return Zarr(folder / "g.zarr", dims, array="deep/x", complete=True)


@dataclass
class Kept:
    array: Array

    def __call__(self, sample: int, box: Box) -> Array:
        return self.array[sample][slices(box)]


class TestGenerated(StoreTests):
    def make(self, array: Array, dims: str, folder: Path) -> Store:
        return Generated(Kept(array), len(array), array.shape[1:], dims.replace("N", ""), array.dtype)


class Through(Store):
    """Reads by another store, as one that keeps copies would."""

    def __init__(self, source: Store) -> None:
        self.source = source
        super().__init__(source.dims, source.shape, "float64", source.dims)

    def __len__(self) -> int:
        return len(self.source)

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        self.source.read(sample, box, out)


def test_a_store_that_reads_by_another_shares_no_memory_with_it(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((1, 300, 400)).astype("float32")
    store = Through(TestHDF5OddOrder().make(array, "NHW", tmp_path))
    out = np.empty((400, 300), "float32").transpose()
    store.read(0, (whole(300), whole(400)), out)
    np.testing.assert_array_equal(out, array[0])


def test_dims_are_handed_out_in_one_order_or_in_that_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4, 5, 6)))
    path = tmp_path / "a.npy"
    assert Npy(path, "WHDNC").dims == "CDHW"
    assert Npy(path, "WHDNC", order="HWCD").shape == (3, 2, 6, 4)
    assert Npy(path, "WHDNC").chunks is None and Npy(path, "WHDNC").size("C") == 6
    for dims, order, words in (
        ("WHD", None, "names 3"),
        ("WWDNC", None, "by a different letter"),
        ("XYZNC", None, "order="),
        ("WHDNC", "WHDX", "each once"),
    ):
        with pytest.raises(DataError, match=words):
            Npy(path, dims, order)


def test_boxes_of_whole_samples_need_not_be_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    store = Npy(tmp_path / "a.npy", "N")
    assert store.shape == () and [int(store.read_new(sample)) for sample in range(3)] == [0, 1, 2]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = 7
    assert int(HDF5(tmp_path / "a.h5", "x", "").read_new(0)) == 7


def test_many_files_are_open_by_turns(tmp_path: Path) -> None:
    for number in range(40):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            file["x"] = np.full(3, number)
    store = HDF5(tmp_path, "x", "W")
    found = [int(store.read_new(sample, (Interval(1, 2),))[0]) for sample in [*range(40), *range(40)]]
    assert found == [*range(40), *range(40)] and len(store._open) <= 32


def test_headers_of_npy_files_are_parsed_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    parsing, together, original = threading.Semaphore(1), [], np.lib.format.open_memmap

    def parse(*arguments: Any, **options: Any) -> Any:
        alone = parsing.acquire(blocking=False)
        together.append(not alone)
        time.sleep(0.02)
        if alone:
            parsing.release()
        return original(*arguments, **options)

    monkeypatch.setattr(np.lib.format, "open_memmap", parse)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Npy(tmp_path / "a.npy", "NW"), range(8)))
    assert together == [False] * len(together) and len(together) >= 8


@pytest.mark.long
def test_the_library_of_tests_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import halocline.testing; halocline.testing.StoreTests"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_generated_samples_of_other_seeds_have_other_identities() -> None:
    first, second, again = (climate.fields(4, seed, 32, 48)["x"].store.identity for seed in (0, 1, 0))
    assert first == again != second
