"""Conversions keep every number, and leave nothing half done under the final name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from halocline.data.stores.generated import Generated
from halocline.data.stores.hdf5 import HDF5
from halocline.data.stores.nifti import Nifti
from halocline.data.stores.npy import Npy
from halocline.data.stores.open import open_store
from halocline.data.stores.store import Store
from halocline.data.stores.zarr import COMPLETE, Zarr
from halocline.data.tools import convert as converting
from halocline.data.tools.advise import LARGEST, SMALLEST, advised_chunks, reading, tiles
from halocline.data.tools.convert import Wish, convert
from halocline.data.tools.writers import HDF5Writer
from halocline.errors import BadSample, DataError

ARRAY = np.random.default_rng(1).standard_normal((3, 2, 8, 10, 12)).astype("float32")


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "_AT_A_TIME", 2000)


@pytest.fixture
def source(tmp_path: Path) -> Store:
    np.save(tmp_path / "source.npy", ARRAY)
    return Npy(tmp_path / "source.npy", "NCDHW")


def same(store: Store, array: NDArray[Any] = ARRAY) -> None:
    assert len(store) == len(array)
    for sample in range(len(store)):
        np.testing.assert_array_equal(store.read_new(sample), array[sample])


@pytest.mark.parametrize("name", ["a.npy", "a.h5", "a.zarr"])
@pytest.mark.parametrize("dims", [None, "WHDNC"])
def test_every_kind(tmp_path: Path, source: Store, name: str, dims: str | None) -> None:
    convert(source, tmp_path / name, Wish(dims=dims))
    found = open_store(tmp_path / name, (dims or "NCDHW") if name == "a.npy" else None)  # the others say their dims
    assert found.stored == (dims or "NCDHW").replace("N", "")
    same(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "source.npy"])


def test_there_and_back(tmp_path: Path, source: Store) -> None:
    convert(source, tmp_path / "a.h5", Wish(level=4, chunks={"D": 4}))
    convert(open_store(tmp_path / "a.h5"), tmp_path / "b.zarr", Wish(level=1, dims="DHWCN"))
    convert(open_store(tmp_path / "b.zarr"), tmp_path / "c.npy")
    assert (tmp_path / "c.npy").read_bytes() == (tmp_path / "source.npy").read_bytes()


def test_hdf5_has_checksums_and_labels(tmp_path: Path, source: Store) -> None:
    convert(source, tmp_path / "a.h5", Wish(level=3, chunks={"D": 3, "C": 1}, dataset="group/x"))
    with h5py.File(tmp_path / "a.h5") as file:
        data = file["group/x"]
        assert data.fletcher32 and data.shuffle and data.compression == "gzip" and data.compression_opts == 3
        assert data.chunks == (1, 1, 3, 10, 12) and [dim.label for dim in data.dims] == list("NCDHW")


def test_zarr_has_checksums_and_every_chunk(tmp_path: Path) -> None:
    zeros = Generated(lambda sample, box: 0, 2, (4, 4), "HW")
    wish = Wish(chunks={"H": 2, "W": 2}, shards={"W": 4, "H": 2})
    convert(zeros, tmp_path / "a.zarr", wish)
    data = zarr.open_array(tmp_path / "a.zarr")
    assert data.shards == (1, 2, 4) and data.chunks == (1, 2, 2) and data.attrs[COMPLETE]
    assert data.metadata.dimension_names == ("N", "H", "W")
    assert len(list((tmp_path / "a.zarr").rglob("c/*/*/0"))) == 4
    (tmp_path / "a.zarr/c/1/1/0").unlink()
    with pytest.raises(BadSample, match="missing"):
        open_store(tmp_path / "a.zarr").read_new(1)


def test_a_file_a_sample_both_ways(tmp_path: Path, source: Store) -> None:
    paths = convert(source, tmp_path / "each/s{}.h5")
    assert [path.name for path in paths] == ["s0.h5", "s1.h5", "s2.h5"]
    each = open_store(tmp_path / "each")
    same(each)
    assert [path.name for path in convert(each, tmp_path / "other/{}.npy")] == ["s0.npy", "s1.npy", "s2.npy"]
    convert(open_store(str(tmp_path / "other/*.npy"), "CDHW"), tmp_path / "all.zarr")
    same(open_store(tmp_path / "all.zarr"))


def test_nifti(tmp_path: Path) -> None:
    """The first dim of a NIfTI file is the fastest, and the width."""
    nibabel = pytest.importorskip("nibabel")
    volume = np.arange(4 * 3 * 2, dtype="int16").reshape(4, 3, 2)  # W, H, D
    for number, name in enumerate(("a.nii", "b.nii.gz")):
        nibabel.save(nibabel.Nifti1Image(volume + number, np.eye(4)), tmp_path / name)
    store = Nifti(tmp_path, "WHD")
    assert store.dims == "DHW" and store.shape == (2, 3, 4) and store.dtype == np.int16
    convert(open_store(tmp_path), tmp_path / "all.h5")
    same(open_store(tmp_path / "all.h5"), np.stack([volume.T, volume.T + 1]))
    scaled = nibabel.Nifti1Image(volume, np.eye(4))
    scaled.header.set_slope_inter(0.5, 10)
    nibabel.save(scaled, tmp_path / "scaled.nii")
    truth = np.asarray(nibabel.load(tmp_path / "scaled.nii").dataobj)
    store = Nifti(tmp_path / "scaled.nii", "WHD")
    assert store.dtype == np.float64 and truth.dtype == np.float64
    np.testing.assert_array_equal(store.read_new(0), truth.T)


def test_dtypes(tmp_path: Path, source: Store) -> None:
    convert(source, tmp_path / "a.npy", Wish(dtype="float16"))
    same(open_store(tmp_path / "a.npy", "NCDHW"), ARRAY.astype("float16"))
    with pytest.raises(DataError, match=r"float32.*int16"):
        convert(source, tmp_path / "b.npy", Wish(dtype="int16"))
    with pytest.raises(DataError, match="floaty"):
        convert(source, tmp_path / "b.npy", Wish(dtype="floaty"))
    np.save(tmp_path / "i.npy", np.array([[1, 300], [2**25 + 1, 4]]))
    for dtype, word in (("uint8", "300"), ("float32", "loses digits")):
        with pytest.raises(DataError, match=word):
            convert(Npy(tmp_path / "i.npy", "NW"), tmp_path / "b.npy", Wish(dtype=dtype))
    assert not (tmp_path / "b.npy").exists() and not list(tmp_path.glob(".*"))
    convert(Npy(tmp_path / "i.npy", "NW"), tmp_path / "big.npy", Wish(dtype=">i4"))
    assert np.load(tmp_path / "big.npy").dtype == np.dtype("int32")


@pytest.mark.parametrize("name", ["a.npy", "a.h5", "a.zarr"])
def test_small_and_empty_ones(tmp_path: Path, name: str) -> None:
    for number, array in enumerate((np.float32(3), np.zeros((0, 4), "float32"), np.ones((2, 1), "bool"))):
        np.save(tmp_path / "s.npy", array)
        dims = "NW" if array.ndim else ""
        convert(Npy(tmp_path / "s.npy", dims), tmp_path / str(number) / name)
        store = open_store(tmp_path / str(number) / name, dims)
        same(store, np.asarray(array) if array.ndim else np.asarray(array)[None])


def test_wishes_that_make_no_sense(tmp_path: Path, source: Store) -> None:
    for name, wish, words in (
        ("a.tif", Wish(), "must end with"),
        ("a.h5", Wish(dims="NCDH"), "letters CDHW and N"),
        ("a.h5", Wish(dims="CDHW"), "3 samples"),
        ("{}.h5", Wish(dims="NCDHW"), "letters CDHW"),
        ("a.npy", Wish(level=3), "no chunks"),
        ("a.h5", Wish(chunks={"X": 3}), "X is no dim"),
        ("a.h5", Wish(cut={"X": 3}), "no dim X"),
        ("a.h5", Wish(level=11), "from 0"),
        ("a.h5", Wish(shards={"D": 4}), "Zarr"),
        ("a.zarr", Wish(chunks={"D": 4}, shards={"D": 6}), "take a multiple"),
        ("source.npy", Wish(), "exists"),
    ):
        with pytest.raises(DataError, match=words):
            convert(source, tmp_path / name, wish)
    with pytest.raises(DataError, match="source itself"):
        convert(source, tmp_path / "source.npy", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source.npy"]


@pytest.mark.parametrize("name", ["a.npy", "a.h5", "a.zarr"])
def test_over_what_exists_only_when_told(tmp_path: Path, source: Store, name: str) -> None:
    convert(Generated(lambda sample, box: 1, 1, (3,), "W"), tmp_path / name)
    with pytest.raises(DataError, match="--force"):
        convert(source, tmp_path / name)
    convert(source, tmp_path / name, force=True)
    same(open_store(tmp_path / name, "NCDHW"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["a.npy", "a.h5", "a.zarr"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, source: Store, name: str) -> None:
    def fails(sample: int, box: Any) -> int:
        if sample == 1:
            raise OSError("gone")
        return 0

    convert(source, tmp_path / name)
    with pytest.raises(BadSample, match="gone"):
        convert(Generated(fails, 2, (3,), "W"), tmp_path / name, force=True)
    same(open_store(tmp_path / name, "NCDHW"))
    assert not list(tmp_path.glob(".*"))


def test_what_was_written_wrongly_is_found(tmp_path: Path, source: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written = HDF5Writer.write
    monkeypatch.setattr(HDF5Writer, "write", lambda self, index, numbers: written(self, index, numbers + 1))
    with pytest.raises(DataError, match="reads back differently"):
        convert(source, tmp_path / "a.h5")
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.long
def test_killed_on_the_way(tmp_path: Path) -> None:
    """Nothing has the final name."""
    code = f"""
import os, signal, numpy as np
from halocline.data.tools.convert import convert
from halocline.data.stores.generated import Generated
def make(sample, box):
    if sample == 3:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    return 0
convert(Generated(make, 5, (10,), "W"), {str(tmp_path / "a.h5")!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "a.h5").exists()
    assert all(path.name.startswith(".a.h5.") for path in tmp_path.iterdir())


def test_progress_counts_what_is_written_and_read_back(tmp_path: Path, source: Store) -> None:
    seen: list[int] = []
    convert(source, tmp_path / "a.zarr", progress=seen.append)
    assert sum(seen) == 2 * ARRAY.nbytes and len(seen) == 6


def test_what_a_cut_reads(tmp_path: Path) -> None:
    array = np.zeros((2, 4, 12, 10), "int16")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(2, 4, 4, 10))
        file.create_dataset("y", data=array, chunks=(1, 4, 3, 5))
        file["z"] = array
    x, y, z = (HDF5(tmp_path / "a.h5", name, "NCHW") for name in "xyz")
    found = reading(x, {"H": 2})  # tiles of 6 rows; each touches two chunks of 4, and each chunk holds two samples
    assert found.own == (480, 480) and found.read == (1280, 1280) and not found.aligned
    assert found.worst == pytest.approx(2 * 8 / 6)
    assert reading(y, {"H": 2, "W": 2}).aligned and reading(y, {"H": 4}).worst == 1
    assert reading(y, {"H": 3}).worst == 6 / 4
    assert reading(z, {"H": 2}).runs == 4 and reading(z, {"W": 2}).runs == 48 and reading(z, {}).runs == 1
    with pytest.raises(DataError, match="no dim X"):
        reading(z, {"X": 2})


@pytest.mark.parametrize(
    ("dims", "shape", "cut"),
    [
        ("CDHW", (4, 512, 512, 512), {"D": 2, "H": 2}),
        ("CDHW", (4, 128, 128, 128), {"D": 2, "H": 2, "W": 2}),
        ("HWC", (768, 1152, 16), {"H": 4}),
        ("DHW", (96, 1000, 1000), {"H": 5}),
        ("W", (1 << 26,), {"W": 8}),
    ],
)
def test_advised_chunks_are_shared_by_no_two_ranks(dims: str, shape: tuple[int, ...], cut: dict[str, int]) -> None:
    chunks = advised_chunks(dims, shape, 4, cut)
    assert SMALLEST <= prod(chunks) * 4 <= LARGEST
    more = {letter: 2 * parts for letter, parts in cut.items()} if prod(shape) > 1 << 24 else cut
    for ranks in (cut, more):
        for box in tiles(dims, shape, ranks):
            assert all(i.lo % c == 0 for i, c in zip(box, chunks, strict=True))


def test_advised_chunks_of_odd_sizes() -> None:
    assert advised_chunks("DHW", (100, 100, 100), 4, {"D": 3})[1:] == (100, 100)
    assert advised_chunks("HW", (1021, 1021), 4, {}) == (1021, 1021)
    assert prod(advised_chunks("DHW", (1021, 1021, 1021), 8, {"D": 2})) * 8 <= LARGEST
    assert advised_chunks("HW", (3, 2), 4, {"H": 8}) == (1, 2)
    assert advised_chunks("", (), 4, {}) == ()


def test_convert_for_a_cut(tmp_path: Path, source: Store) -> None:
    convert(source, tmp_path / "a.zarr", Wish(cut={"D": 2, "H": 2}))
    store = open_store(tmp_path / "a.zarr")
    assert isinstance(store, Zarr) and reading(store, {"D": 2, "H": 2}).aligned
    assert os.listdir(tmp_path / "a.zarr") and store.chunks == (2, 4, 5, 12)  # noqa: PTH208
