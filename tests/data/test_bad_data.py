"""Data that are damaged, missing or odd: refused with file, sample and box, and never read as something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

from halocline.data.stores.generated import Generated
from halocline.data.stores.hdf5 import HDF5
from halocline.data.stores.npy import Npy
from halocline.data.stores.store import Store
from halocline.data.stores.zarr import COMPLETE, Zarr
from halocline.data.tools.convert import Wish, convert
from halocline.errors import BadSample, DataError
from halocline.geometry import Box, Interval, whole
from halocline.testing import StoreTests

ARRAY = (np.arange(3 * 8 * 8, dtype="float32") + 1).reshape(3, 8, 8)
BOX = (Interval(0, 4), Interval(0, 8))

Damage = Callable[[bytes], bytes]


def damage(path: Path, how: Damage) -> None:
    path.write_bytes(how(path.read_bytes()))


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def nothing(content: bytes) -> bytes:
    return b""


def longer(content: bytes) -> bytes:
    return content + bytes(16)


def flipped(content: bytes) -> bytes:
    place = len(content) // 3
    return content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :]


def refuses(store: Store, sample: int, *words: str, box: Box = BOX) -> None:
    with pytest.raises(BadSample) as caught:
        store.read_new(sample, box)
    place = store.where(sample)
    for word in (f"sample {sample} ", place, "H[0:4] W[0:8]" if box == BOX else "", *words):
        assert word in str(caught.value)


def files_of(suffix: str, folder: Path, count: int = 3) -> list[Path]:
    for number in range(count):
        path = folder / f"{number}{suffix}"
        if suffix == ".npy":
            np.save(path, ARRAY[number])
        else:
            with h5py.File(path, "w") as file:
                file["x"] = ARRAY[number]
    return [folder / f"{number}{suffix}" for number in range(count)]


def open_files(suffix: str, paths: list[Path]) -> Store:
    return Npy(paths, "HW") if suffix == ".npy" else HDF5(paths, "x", "HW")


@pytest.mark.parametrize("suffix", [".npy", ".h5"])
@pytest.mark.parametrize("how", [half, nothing])
def test_a_truncated_file(tmp_path: Path, suffix: str, how: Damage) -> None:
    paths = files_of(suffix, tmp_path)
    store = open_files(suffix, paths)
    damage(paths[1], how)
    refuses(store, 1, str(paths[1]))
    np.testing.assert_array_equal(store.read_new(2), ARRAY[2])
    store.close()
    damage(paths[0], how)
    with pytest.raises(DataError, match=str(paths[0])):
        open_files(suffix, paths)


@pytest.mark.parametrize("suffix", [".npy", ".h5"])
def test_a_file_of_another_dtype_or_shape_among_many(tmp_path: Path, suffix: str) -> None:
    paths = files_of(suffix, tmp_path)
    odd = {1: ARRAY[1].astype("float64"), 2: ARRAY[2, :, :7]}
    for number, content in odd.items():
        paths[number].unlink()
        if suffix == ".npy":
            np.save(paths[number], content)
        else:
            with h5py.File(paths[number], "w") as file:
                file["x"] = content
    store = open_files(suffix, paths)
    refuses(store, 1, "float64")
    refuses(store, 2, "[8, 7]")


def test_odd_files_with_many_samples_are_found_at_once(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", ARRAY)
    for content in (ARRAY[0], ARRAY[:, :, :7], ARRAY.astype(">f4"), np.float32(1)):
        np.save(tmp_path / "1.npy", content)
        with pytest.raises(DataError, match=r"1\.npy.*first file"):
            Npy(tmp_path, "NHW")


def test_files_that_are_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "zip.npz", ARRAY)
    (tmp_path / "zip.npz").rename(tmp_path / "zip.npy")
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    (tmp_path / "text.h5").write_text("no numbers")
    cases: list[Callable[[], Store]] = [
        lambda: Npy(tmp_path / "zip.npy", "N"),
        lambda: Npy(tmp_path / "words.npy", "N"),
        lambda: Npy(tmp_path / "nowhere.npy", "N"),
        lambda: Npy(tmp_path / "*.none", "N"),
        lambda: HDF5(tmp_path / "text.h5", "x", "N"),
        lambda: Zarr(tmp_path / "zip.npy", "N"),
        lambda: Zarr(tmp_path / "nowhere.zarr", "N"),
    ]
    for make in cases:
        with pytest.raises(DataError, match=str(tmp_path)):
            make()


def test_a_missing_dataset_is_told_with_what_is_there(tmp_path: Path) -> None:
    paths = files_of(".h5", tmp_path)
    with h5py.File(paths[1], "w") as file:
        file["group/y"] = ARRAY[1]
    refuses(HDF5(paths, "x", "HW"), 1, "'x'", "group/y")
    with pytest.raises(DataError, match="there: x"):
        HDF5(paths, "y", "HW")


def h5(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=ARRAY, **options)
    return path


def flip_chunk(path: Path, number: int = 0) -> None:
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info(number).byte_offset + 9
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize("options", [{"fletcher32": True}, {"compression": "gzip"}])
def test_flipped_bytes_in_an_hdf5_chunk(tmp_path: Path, options: dict[str, Any]) -> None:
    path = h5(tmp_path / "a.h5", chunks=(1, 4, 8), **options)
    flip_chunk(path)
    store = HDF5(path, "x", "NHW")
    refuses(store, 0, "index 0", "filter")
    np.testing.assert_array_equal(store.read_new(0, (Interval(4, 8), whole(8))), ARRAY[0, 4:])
    np.testing.assert_array_equal(store.read_new(1), ARRAY[1])


def test_hdf5_that_was_never_written_in_full(tmp_path: Path) -> None:
    """HDF5 itself reads zeros."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("none", (3, 8), "f4")
        file.create_dataset("some", (3, 8), "f4", chunks=(1, 4))[:2] = 1
        file.create_dataset("short", data=ARRAY[0, :3], chunks=(1, 8)).id.write_direct_chunk((1, 0), b"1234")
        file.create_dataset("empty", (0, 8), "f4", maxshape=(None, 8))
    for name, words in (("none", "nothing of it"), ("some", "2 of 6 chunks"), ("short", "too short")):
        with pytest.raises(DataError, match=words):
            HDF5(tmp_path / "a.h5", name, "NW")
    assert HDF5(tmp_path / "a.h5", "some", "NW", complete=False).read_new(2).sum() == 0
    assert len(HDF5(tmp_path / "a.h5", "empty", "NW")) == 0


def test_hdf5_whose_numbers_lie_elsewhere(tmp_path: Path) -> None:
    """HDF5 itself reads zeros where a source is missing or too short."""
    (source,) = files_of(".h5", tmp_path, 1)
    layout = h5py.VirtualLayout((3, 8, 8), "f4")
    layout[0] = h5py.VirtualSource(source.name, "x", (8, 8))
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
        file.create_dataset("raw", data=ARRAY, external=[(tmp_path / "raw", 0, ARRAY.nbytes)])
    with pytest.raises(DataError, match="64 of its 192"):
        HDF5(path, "x", "NHW")
    np.testing.assert_array_equal(HDF5(path, "x", "NHW", complete=False).read_new(0), ARRAY[0])
    source.unlink()
    with pytest.raises(DataError, match=r"0\.h5 does not exist"):
        HDF5(path, "x", "NHW", complete=False)
    with pytest.raises(DataError, match="in another file"):
        HDF5(path, "raw", "NHW")


def test_packed_numbers_are_refused(tmp_path: Path) -> None:
    h5(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["x"].attrs.update({"scale_factor": np.float32(1), "add_offset": 0.0})
    assert len(HDF5(tmp_path / "a.h5", "x", "NHW")) == 3
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["x"].attrs["scale_factor"] = 0.01
    z = zarr_of(tmp_path)
    zarr.open(z).attrs["add_offset"] = 273.15
    for make in (lambda: HDF5(tmp_path / "a.h5", "x", "NHW"), lambda: Zarr(z, "NHW")):
        with pytest.raises(DataError, match="packed"):
            make()


def zarr_of(folder: Path, array: NDArray[Any] = ARRAY, **options: Any) -> Path:
    options = {"compressors": None, "fill_value": 0, **options}
    data = zarr.create_array(folder / "a.zarr", shape=array.shape, chunks=(1, 4, 8), dtype=array.dtype, **options)
    data[...] = array
    return folder / "a.zarr"


SHARDED = {"shards": (1, 8, 8), "config": {"write_empty_chunks": True}}


@pytest.mark.parametrize("options", [{}, {"compressors": "auto"}, {"zarr_format": 2}, {**SHARDED}])
@pytest.mark.parametrize("how", [half, nothing, longer])
def test_a_zarr_chunk_of_another_length(tmp_path: Path, options: dict[str, Any], how: Damage) -> None:
    """A shard of no bytes Zarr itself reads as fill values."""
    path = zarr_of(tmp_path, **options)
    key = "0.0.0" if "zarr_format" in options else "c/0/0/0"
    store = Zarr(path, "NHW")
    damage(path / key, how)
    refuses(store, 0, str(path))
    np.testing.assert_array_equal(store.read_new(1), ARRAY[1])


@pytest.mark.parametrize("options", [{}, SHARDED])
def test_flipped_bytes_in_a_crc32c_chunk(tmp_path: Path, options: dict[str, Any]) -> None:
    path = zarr_of(tmp_path, **options, compressors=Crc32cCodec())
    damage(path / "c/0/0/0", flipped)
    refuses(Zarr(path, "NHW"), 0, "checksum")


def test_a_missing_zarr_chunk(tmp_path: Path) -> None:
    path = zarr_of(tmp_path)
    (path / "c/1/0/0").unlink()
    assert Zarr(path, "NHW").read_new(1)[:4].sum() == 0  # what Zarr says of it
    refuses(Zarr(path, "NHW", complete=True), 1, "c/1/0/0")
    zarr.open(path).attrs[COMPLETE] = True
    store = Zarr(path, "NHW")
    refuses(store, 1, "c/1/0/0")
    np.testing.assert_array_equal(store.read_new(1, (Interval(4, 8), whole(8))), ARRAY[1, 4:])
    assert Zarr(path, "NHW", complete=False).read_new(1)[:4].sum() == 0


@pytest.mark.parametrize("location", ["start", "end"])
def test_a_missing_chunk_of_a_shard(tmp_path: Path, location: str) -> None:
    array = ARRAY.copy()
    array[1, :4] = 0  # not written, since it is all fill values
    inner = ShardingCodec(chunk_shape=(1, 4, 8), codecs=[BytesCodec()], index_location=location)
    data = zarr.create(
        array.shape, store=tmp_path / "a.zarr", chunks=(1, 8, 8), dtype="f4", codecs=[inner], fill_value=0
    )
    data[...] = array
    store = Zarr(tmp_path / "a.zarr", "NHW", complete=True)
    refuses(store, 1, "chunk (0, 0, 0) of shard c/1/0/0")
    np.testing.assert_array_equal(store.read_new(1, (Interval(4, 8), whole(8))), array[1, 4:])
    damage(tmp_path / "a.zarr/c/0/0/0", lambda content: content[:-8])
    refuses(store, 0, box=(whole(8), whole(8)))


def test_a_group_is_no_array(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g.zarr")
    group.create_array("x", shape=(3, 8), dtype="f4")
    with pytest.raises(DataError, match=r"\(x\); name one"):
        Zarr(tmp_path / "g.zarr", "NW")
    with pytest.raises(DataError, match="array 'y'"):
        Zarr(tmp_path / "g.zarr", "NW", array="y")


def test_numbers_too_large_for_the_dtype(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 70000], [-3, 2]]))
    store = Npy(tmp_path / "a.npy", "NW")
    box = (whole(2),)
    for sample, dtype, word in ((0, "int16", "70000"), (1, "uint8", "-3"), (0, "float16", "too large")):
        with pytest.raises(BadSample, match=word):
            store.read(sample, box, np.empty(2, dtype))


def test_what_a_maker_raises_is_a_bad_sample() -> None:
    def broken(sample: int, box: Box) -> NDArray[Any]:
        raise ZeroDivisionError("no such universe")

    refuses(Generated(broken, 3, (8, 8), "HW"), 2, "no such universe")


@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
def test_a_byte_that_changes_anywhere_in_converted_data_changes_no_number(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "a.npy", ARRAY)
    convert(Npy(tmp_path / "a.npy", "NHW"), tmp_path / name, Wish(chunks={"H": 4}))
    path, refusals = tmp_path / name, 0
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        content = file.read_bytes()
        for place in range(3, len(content), 11):
            file.unlink()  # HDF5 knows files by their inode
            file.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
            try:
                with HDF5(path, "data", "NHW") if name == "a.h5" else Zarr(path, "NHW") as store:
                    found = [store.read_new(sample) for sample in range(len(store))]
                np.testing.assert_array_equal(found, ARRAY)
            except DataError:
                refusals += 1
        file.write_bytes(content)
    assert refusals > 100


class OffByOne(Npy):
    """A store with a fault."""

    def read_stored(self, sample: int, box: Box, out: NDArray[Any]) -> None:
        super().read_stored(sample, box, out)
        if box and box[-1].hi > 5:
            out[..., -1] = 0


def test_the_conformance_tests_find_a_faulty_store(tmp_path: Path) -> None:
    class Suite(StoreTests):
        def make(self, array: NDArray[Any], dims: str, folder: Path) -> Store:
            np.save(folder / "a.npy", array)
            return OffByOne(folder / "a.npy", dims)

    with pytest.raises(AssertionError):
        Suite().test_random_boxes_into_arrays_with_any_strides(tmp_path)
