"""``halocline data`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from halocline.cli.data import data
from halocline.data.stores.npy import Npy
from halocline.data.stores.open import open_store
from halocline.data.tools.convert import Wish, convert
from halocline.data.tools.statistics import Statistics
from halocline.errors import DataError

ARRAY = np.random.default_rng(5).integers(0, 3, (4, 2, 8, 12)).astype("int16")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(data, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def answer(*arguments: object) -> dict[str, Any]:
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def refused(*arguments: object) -> str:
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1
    return err


@pytest.fixture
def universe(tmp_path: Path) -> Path:
    path = tmp_path / "universe.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("full", data=ARRAY, chunks=(1, 2, 8, 4), compression="gzip", fletcher32=True)
        file["redshift"] = np.arange(4.0)
        file["full"].attrs["unit"] = "counts [1/cell]"
    return path


def test_info_lists_what_is_in_a_file(universe: Path) -> None:
    found = answer("info", universe)
    assert found["kind"] == "HDF5" and found["files"] == 1 and "samples" not in found
    full = next(each for each in found["arrays"] if each["name"] == "full")
    assert full["shape"] == [4, 2, 8, 12] and full["chunks"] == [1, 2, 8, 4] and full["dims"] is None
    assert (full["compression"], full["checksum"]) == ("gzip", "fletcher32")
    code, out, _ = run("info", universe)
    assert code == 0 and "redshift" in out and "--dims" in out and "counts [1/cell]" in out


def test_info_of_a_cut(universe: Path) -> None:
    arguments = ("info", universe, "--dataset", "/full", "--dims", "NCHW", "--cut", "W=2")
    found = answer(*arguments)
    assert found["samples"] == {
        "count": 4,
        "dims": "CHW",
        "shape": [2, 8, 12],
        "dtype": "int16",
        "bytes": 384,
        "chunks": [2, 8, 4],
    }
    cut = found["cut"]
    assert cut["ranks"] == 2 and cut["own_bytes"] == [192, 192] and cut["read_bytes"] == [256, 256]
    assert cut["worst_amplification"] == pytest.approx(4 / 3, abs=1e-4) and not cut["aligned"]
    assert cut["advised_chunks"] == {"C": 2, "H": 8, "W": 6}
    code, out, _ = run(*arguments)
    assert code == 0 and "1.33 times" in out and "data convert" in out


def test_info_of_what_names_its_dims(tmp_path: Path, universe: Path) -> None:
    zarr.create_array(
        tmp_path / "z.zarr", data=ARRAY, chunks=(1, 1, 8, 12), dimension_names=["sample", "C", "lat", "lon"]
    )
    found = answer("info", tmp_path / "z.zarr", "--cut", "H=2,W=2")
    assert found["arrays"][0]["dims"] == "NCHW" and found["samples"]["count"] == 4 and found["cut"]["ranks"] == 4
    assert "lat" in found["arrays"][0]["attributes"]["dimension_names"]
    np.save(tmp_path / "a.npy", ARRAY)
    assert answer("info", tmp_path / "a.npy", "--dims", "NCHW", "--cut", "H=2")["cut"]["runs"] == 2
    assert "stretches" in run("info", tmp_path / "a.npy", "--dims", "NCHW", "--cut", "H=2")[1]


def test_info_of_many_files(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", ARRAY[number])
    assert answer("info", tmp_path)["files"] == 3
    assert answer("info", tmp_path / "*.npy", "--dims", "CHW")["samples"]["count"] == 3
    (tmp_path / "x.h5").touch()
    assert "several kinds" in refused("info", tmp_path)


def test_info_refuses_clearly(tmp_path: Path, universe: Path) -> None:
    assert "no such file" in refused("info", tmp_path / "nothing.h5")
    assert "there: full, redshift" in refused("info", universe, "--dataset", "empty")
    assert "2 datasets (full, redshift)" in refused("info", universe, "--cut", "D=2")
    assert "--dims NDHW" in refused("info", universe, "--dataset", "full", "--cut", "W=2")
    assert "no dim X" in refused("info", universe, "--dataset", "full", "--dims", "NCHW", "--cut", "X=2")
    for cut in ("W", "W=x", "W=0", "W=2,W=2", "WH=2"):
        assert "such as D=2,H=2" in refused("info", universe, "--cut", cut)
    (tmp_path / "text.h5").write_text("no")
    assert "cannot be opened" in refused("info", tmp_path / "text.h5")


def test_stats(universe: Path) -> None:
    found = answer("stats", universe, "--dataset", "full", "--dims", "NCHW", "--classes", "--jobs", 1)
    np.testing.assert_allclose(found["mean"], ARRAY.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found["std"], ARRAY.std((0, 2, 3)), rtol=1e-12)
    assert found["classes"] == {str(value): int(np.count_nonzero(value == ARRAY)) for value in range(3)}
    assert sum(found["frequencies"].values()) == pytest.approx(1)
    assert found["file"] == f"{universe}.stats.json"
    kept = Statistics.load(open_store(universe, "NCHW", "full"))
    assert list(kept.mean) == found["mean"]


def test_stats_for_people(universe: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere.json"
    arguments = ("stats", universe, "--dataset", "full", "--dims", "NCHW", "--jobs", 1, "--save", place)
    code, out, _ = run(*arguments, "--classes")
    assert code == 0 and "frequency" in out and f"kept in {place}" in out and place.exists()
    code, out, _ = run("stats", universe, "--dataset", "redshift", "--dims", "N", "--jobs", 1)
    assert code == 0 and "1.5" in out and "frequency" not in out


def test_stats_refuses_clearly(universe: Path) -> None:
    assert "name one with --dataset" in refused("stats", universe)
    assert "classes of integers" in refused("stats", universe, "--dataset", "redshift", "--dims", "N", "--classes")
    assert "names 2" in refused("stats", universe, "--dataset", "full", "--dims", "NC")


def test_convert(universe: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    arguments = ("convert", universe, new, "--dataset", "full", "--dims", "NCHW", "--cut", "W=2", "--compress", 3)
    found = answer(*arguments, "--dtype", "float32", "--to-dims", "NHWC")
    assert found["files"] == [str(new)] and found["samples"] == 4 and found["source_bytes"] == ARRAY.nbytes
    store = open_store(new)
    assert store.dtype == np.float32 and store.stored == "HWC"
    np.testing.assert_array_equal(store.read_new(2), ARRAY[2])
    assert "--force" in refused(*arguments)
    code, out, _ = run(*arguments, "--force", "--shards", "W=12")
    assert code == 0 and "read back and compared" in out
    cut = answer("info", new, "--cut", "W=2")
    assert cut["cut"]["aligned"] and cut["arrays"][0]["checksum"] == "crc32c" and cut["arrays"][0]["shards"]


def test_convert_each(universe: Path, tmp_path: Path) -> None:
    found = answer(
        "convert", universe, tmp_path / "s/{}.h5", "--dataset", "full", "--dims", "NCHW", "--to-dataset", "x"
    )
    assert len(found["files"]) == 4
    np.testing.assert_array_equal(open_store(tmp_path / "s", dataset="x").read_new(3), ARRAY[3])
    assert "and 3 more" in run("convert", tmp_path / "s", tmp_path / "t/{}.npy")[1]
    assert "must end with" in refused("convert", universe, tmp_path / "a.tif", "--dataset", "full", "--dims", "NCHW")


def test_paths_as_stores(tmp_path: Path, universe: Path) -> None:
    np.save(tmp_path / "a.npy", ARRAY)
    convert(Npy(tmp_path / "a.npy", "NCHW"), tmp_path / "named.zarr", Wish(dataset="deep/x"))
    assert open_store(tmp_path / "named.zarr").dims == "CHW"
    assert open_store(tmp_path / "named.zarr", order="WHC").shape == (12, 8, 2)
    with pytest.raises(DataError, match="without a name"):
        open_store(tmp_path / "a.npy", "NCHW", "full")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no \.npy"):
        open_store(tmp_path / "folder", "NCHW")


@pytest.mark.parametrize("command", ["info", "stats", "convert"])
def test_help_teaches_by_example(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and "Examples" in out and f"halocline data {command}" in out
