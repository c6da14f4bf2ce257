"""Twenty bad inputs of every kind of file: each is refused with one line that names the file, and none hangs."""

import io
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import zarr
from checkpoint_run import saved

from halocline.data.staging.listing import Listing
from halocline.data.stores.open import open_store
from halocline.errors import HaloclineError
from halocline.geometry import whole
from halocline.plan.machine import load_machine
from halocline.plan.plan_file import read_plan
from halocline.train.checkpoints import Folder
from halocline.train.checkpoints.files import MANIFEST, METADATA, STATE
from halocline.train.checkpoints.inspect import verify_checkpoint
from halocline.train.config import load_settings, read_settings
from halocline.train.inputs import INPUT, Input

COUNT = 20
SUMMIT = Path(load_machine.__code__.co_filename).parent / "machines/summit.json"


def refused(name: str, call: Callable[..., object], *arguments: object) -> None:
    """One line, of the library's own, that names the file."""
    with pytest.raises(HaloclineError) as caught:
        call(*arguments)
    words = str(caught.value)
    assert name in words and "\n" not in words.strip() and len(words) < 2000, words


def no_text() -> list[bytes]:
    """What is no text of any format."""
    return [b"\xff\xfe\x00", bytes(64), "x = 1".encode("utf-16"), b"\x1f\x8b\x08" + bytes(9), b"x = \x80\x81", b"{"]


def no_table(good: dict) -> list[bytes]:
    """JSON that is not what the file holds: other values, keys that are missing, unknown, or of another type."""
    name = next(iter(good))
    values: list[object] = [None, [], 3, "text", {}, {"x": 1}, [good], {**good, "unknown": 1}, {**good, name: [[]]}]
    values += [dict.fromkeys(good), {key: {} for key in good}]
    text = json.dumps(good).encode()
    return [*(json.dumps(value).encode() for value in values), b"", text[: len(text) // 2], text + b"}", b"[" * 100_000]


SETTINGS = [
    b"steps = ", b"steps = 'three'", b"steps = -1", b"steps = [1]", b"stepz = 3", b"[optimizer]\nlr = 'fast'", b"[data",
    b"steps = 1\nsteps = 2", b"a = " + b"[" * 100_000, b"seed = nan", b"batch = 0", b"optimizer = 3", b"workload = 7",
    b"{}",
]  # fmt: skip


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    inputs = [*no_text(), *SETTINGS]
    assert len(inputs) >= COUNT
    for each in inputs:
        file.write_bytes(each)
        refused("run.toml", load_settings, file)
    refused(tmp_path.name, load_settings, tmp_path)
    refused("none.toml", load_settings, tmp_path / "none.toml")
    refused(tmp_path.name, read_settings, tmp_path)


def test_machine_files(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    inputs = [*no_text(), *no_table(json.loads(SUMMIT.read_bytes()))]
    assert len(inputs) >= COUNT
    for each in inputs:
        file.write_bytes(each)
        refused("m.json", load_machine, str(file))
    refused("none.json", load_machine, str(tmp_path / "none.json"))


def test_plans(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    inputs = [*no_text(), *no_table({"version": 1, "network": "x:Y", "batch": 1, "mesh_sizes": {"data": 2}})]
    assert len(inputs) >= COUNT
    for each in inputs:
        file.write_bytes(each)
        refused("plan.json", read_plan, file)
    refused("none.json", read_plan, tmp_path / "none.json")


def test_descriptions_of_inputs(tmp_path: Path) -> None:
    inputs = [*no_text(), *no_table({"mean": [0.0], "std": [1.0], "dims": "NCDHW"})]
    assert len(inputs) >= COUNT
    for each in inputs:
        (tmp_path / INPUT).write_bytes(each)
        refused(tmp_path.name, Input.read, tmp_path)


def test_listings_to_stage() -> None:
    good = zlib.compress(b"{}")
    contents = [
        b"",
        b"null",
        b"3",
        b"[]",
        b'"x"',
        b"{",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b"[[]]",
        b"[1, 2]",
        b'{"root": 1}',
    ]
    damage = [b"", b"\xff" * 9, bytes(64), good[:-1], good[2:], b"x" + good, good[:3], b"[]"]
    inputs = [*map(zlib.compress, contents), *damage]
    assert len(inputs) >= COUNT
    for each in inputs:
        refused("", Listing.decoded, each)


# ---- data ----


def damaged(whole_file: bytes) -> list[bytes]:
    """A file that was cut, overwritten, or never was one."""
    size = len(whole_file)
    cuts = [whole_file[:keep] for keep in (0, 1, 4, 8, 16, 60, size // 4, size // 2, size - 1)]
    over = [bytes(8) + whole_file[8:], b"\xff" * 16 + whole_file[16:], whole_file[4:], whole_file[1:], whole_file[::-1]]
    others = [b"text", b"\n" * 99, bytes(size), b"\xff" * size, b"PK\x03\x04" + bytes(99), b"<html></html>", b"{}"]
    return [*cuts, *over, *others]


def npy_files() -> Iterator[bytes]:
    for value in (np.zeros((2, 4), object), np.array("text"), np.zeros((2, 4), [("a", "f4")])):
        memory = io.BytesIO()
        np.save(memory, value, allow_pickle=True)
        yield memory.getvalue()
    yield b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99999999, 4), }".ljust(128)
    yield b"\x93NUMPY\x01\x00\x76\x00{'descr': __import__('os').system('x'), 'shape': (2, 4), }".ljust(128)


def read_all(path: Path, dims: str, dataset: str | None = None) -> None:
    """Open a store and read each of its samples."""
    store = open_store(path, dims, dataset)
    for sample in range(len(store)):
        store.read_new(sample, tuple(whole(size) for size in store.shape))


@pytest.mark.parametrize("kind", ["npy", "h5", "nii"])
def test_arrays(tmp_path: Path, kind: str) -> None:
    path, array = tmp_path / f"data.{kind}", np.arange(64, dtype="f4").reshape(4, 4, 4)
    if kind == "npy":
        np.save(path, array)
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            file["x"] = array
    else:
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)
    dataset, dims = ("x" if kind == "h5" else None), ("DHW" if kind == "nii" else "NHW")
    read_all(path, dims, dataset)
    good = path.read_bytes()
    inputs = [*damaged(good), *(npy_files() if kind == "npy" else ())]
    if kind == "nii":
        inputs += [good[:40] + b"\x63\x00" + good[42:], good[:70] + b"\xff\x7f" + good[72:]]  # dims, dtype
    assert len(inputs) >= COUNT
    for each in inputs:
        path.write_bytes(each)
        refused(path.name, read_all, path, dims, dataset)
    refused(f"none.{kind}", read_all, tmp_path / f"none.{kind}", dims, dataset)


def test_zarr_folders(tmp_path: Path) -> None:
    good, path = tmp_path / "good.zarr", tmp_path / "data.zarr"
    made = zarr.create_array(good, shape=(4, 4, 4), chunks=(1, 4, 4), dtype="f4", zarr_format=3)
    made[:] = np.arange(64, dtype="f4").reshape(4, 4, 4) + 1
    read_all(good, "NHW")
    head = (good / "zarr.json").read_bytes()
    heads = [*no_text(), *no_table(json.loads(head))]
    chunk = (good / "c" / "2" / "0" / "0").read_bytes()
    chunks = [chunk[:9], b"", bytes(8), b"\xff" * 40, b"text", chunk[1:]]
    assert len(heads) + len(chunks) >= COUNT
    for name, contents in (("zarr.json", heads), ("c/2/0/0", chunks)):
        for each in contents:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good, path)
            (path / name).write_bytes(each)
            refused("data.zarr", read_all, path, "NHW")


# ---- checkpoints ----


@pytest.mark.parametrize("name", [MANIFEST, STATE, METADATA, "__0_0.distcp"])
def test_checkpoints(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 3).close()
    folder = Folder(tmp_path)
    file = folder.path(3) / name
    good = file.read_bytes()
    assert not verify_checkpoint(folder, 3).problems
    inputs = [each for each in damaged(good) if each != good]
    assert len(inputs) >= COUNT
    for each in inputs:
        file.write_bytes(each)
        problems = verify_checkpoint(folder, 3).problems
        assert problems and all("\n" not in words for words in problems), problems
