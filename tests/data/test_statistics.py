"""Statistics are those of the whole array, whoever computes them and in how many parts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from halocline.data import processes
from halocline.data.stores.generated import Generated
from halocline.data.stores.hdf5 import HDF5
from halocline.data.stores.npy import Npy
from halocline.data.stores.store import Store
from halocline.data.stores.zarr import Zarr
from halocline.data.tools import moments
from halocline.data.tools.statistics import Statistics, beside
from halocline.errors import BadSample, DataError
from halocline.geometry import Box, slices
from halocline.testing import run_local
from halocline.world import Mesh

Array = NDArray[Any]
DICE = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "_ELEMENTS", 500)


def h5(folder: Path, array: Array, dims: str, **options: Any) -> Store:
    (folder / "a.h5").unlink(missing_ok=True)
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=array, **options)
    return HDF5(folder / "a.h5", "x", dims)


def same_as_numpy(found: Statistics, array: Array, channel: int | None) -> None:
    """``array``: all samples."""
    rows = (
        np.moveaxis(array, channel, 0).reshape(array.shape[channel], -1)
        if channel is not None
        else array.reshape(1, -1)
    )
    rows = rows.astype(np.float64)
    np.testing.assert_allclose(found.mean, rows.mean(1), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.std, rows.std(1), rtol=1e-12)
    assert found.min == tuple(rows.min(1)) and found.max == tuple(rows.max(1))
    assert found.count == (rows.shape[1],) * len(rows) and found.nonfinite == (0,) * len(rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int16", "uint8", ">f8"])
def test_of_the_whole_array(tmp_path: Path, dtype: str) -> None:
    array = (DICE.standard_normal((3, 4, 9, 11)) * 20 + 100).astype(dtype)
    same_as_numpy(Statistics.of(h5(tmp_path, array, "NCHW", chunks=(2, 3, 4, 5))), array, 1)


@pytest.mark.parametrize("dims", ["HWNC", "CNHW", "NHWD", "NW", "W", "N"])
def test_in_any_order_of_dims(tmp_path: Path, dims: str) -> None:
    array = DICE.standard_normal([{"N": 3, "C": 5, "H": 17, "W": 23, "D": 2}[letter] for letter in dims])
    found = Statistics.of(h5(tmp_path, array, dims))
    same_as_numpy(found, array, dims.index("C") if "C" in dims else None)


def test_a_large_mean_costs_no_digits(tmp_path: Path) -> None:
    array = DICE.standard_normal((2, 1, 5000)) + 1e9
    found = Statistics.of(h5(tmp_path, array, "NCW"))
    np.testing.assert_allclose(found.std, (array - 1e9).std(), rtol=1e-12)
    np.testing.assert_allclose(found.mean, 1e9 + (array - 1e9).mean(), rtol=1e-15)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), min_size=1, max_size=6))
def test_parts_put_together(parts: list[list[float]]) -> None:
    tables = [moments.moments_of(np.array([part], dtype=float)) for part in parts]
    found = moments.all_merged(tables, 1)
    wanted = moments.moments_of(np.array([sum(parts, [])], dtype=float))  # noqa: RUF017
    for table in (found, wanted):  # the mean's two parts may differ, not their sum
        table[:, moments.ORIGIN] += table[:, moments.OFFSET]
        table[:, moments.OFFSET] = 0
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-6)


def test_numbers_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    array = np.ones((2, 3, 4), "float32")
    array[0, 0, 0], array[1, 0, 2], array[:, 2] = np.nan, np.inf, np.nan
    store = h5(tmp_path, array, "NCW")
    found = Statistics.of(store)
    assert found.nonfinite == (2, 0, 8) and found.count == (6, 8, 0)
    assert found.mean[:2] == (1.0, 1.0) and np.isnan(found.mean[2]) and np.isnan(found.std[2])
    found.save(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["x"]["mean"] == [1.0, 1.0, None]
    assert np.isnan(Statistics.load(store, tmp_path / "s.json").max[2])


@pytest.mark.long
def test_the_same_bits_for_any_number_of_processes_and_ranks(tmp_path: Path) -> None:
    array = (DICE.standard_normal((5, 2, 16, 16)) * 7).astype("int16")
    store = h5(tmp_path, array, "NCHW", chunks=(1, 1, 8, 16))
    alone = Statistics.of(store, classes=True)
    values, counts = np.unique(array, return_counts=True)
    assert alone.classes == dict(zip(values.tolist(), counts.tolist(), strict=True))
    seen: list[int] = []
    assert Statistics.of(store, classes=True, jobs=2, progress=seen.append) == alone
    assert sum(seen) == array.nbytes
    for size in (2, 3):
        assert run_local(size, lambda: Statistics.of(store, classes=True, mesh=Mesh(data=-1))) == [alone] * size


def lonely(sample: int, box: Box) -> Array:
    return np.zeros([i.size for i in box])


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Generated(lambda sample, box: None, 4, (3,), "W")
    with pytest.raises(DataError, match="read in one process"):
        Statistics.of(store, jobs=2)
    monkeypatch.setattr(processes, "_SERVE", "raise SystemExit(7)")
    with pytest.raises(DataError, match="status 7"):
        list(processes.in_processes(abs, [1, 2], 2))


def test_what_one_rank_cannot_read_every_rank_raises() -> None:
    def make(sample: int, box: Box) -> Array:
        if sample == 3:
            raise OSError("unreadable")
        return lonely(sample, box)

    def attempt() -> str:
        with pytest.raises(BadSample, match="unreadable") as caught:
            Statistics.of(Generated(make, 6, (4,), "W"), mesh=Mesh(data=-1))
        return str(caught.value)

    for text in run_local(3, attempt):
        assert "sample 3 " in text


def labels(shares: dict[int, int]) -> Store:
    array = np.concatenate([np.full(count, value) for value, count in shares.items()]).astype("int32")
    return Generated(lambda sample, box: array[slices(box)], 1, array.shape, "W", "int32")


def test_class_weights() -> None:
    """Of the climate data of arXiv:1810.01993, whose frequencies are the squares of (0.991, 0.0266, 0.13)."""
    found = Statistics.of(labels({0: 9820, 1: 7, 2: 169}), classes=True)
    np.testing.assert_allclose(found.class_weights(), [0.0218, 0.8120, 0.1662], atol=1e-3)
    exact = replace(found, classes={0: 982081, 1: 708, 2: 16900})
    np.testing.assert_allclose(exact.class_weights(), [0.0218, 0.8120, 0.1662], atol=1e-4)
    assert exact.class_weights().dtype == torch.float32 and float(exact.class_weights().sum()) == pytest.approx(1)


def test_class_weights_of_odd_classes() -> None:
    found = Statistics.of(labels({0: 100, 3: 25, 255: 10}), classes=True)
    weights = found.class_weights(5, ignore=[255])
    np.testing.assert_allclose(weights, np.array([1, 0, 0, 2, 0]) / 3, rtol=1e-6)
    assert len(found.class_weights()) == 256
    with pytest.raises(DataError, match="255 occurs"):
        found.class_weights(5)
    with pytest.raises(DataError, match="-1 occurs"):
        Statistics.of(labels({-1: 3, 1: 2}), classes=True).class_weights()
    with pytest.raises(DataError, match="no class"):
        found.class_weights(ignore=[0, 3, 255])
    with pytest.raises(DataError, match="--classes"):
        Statistics.of(labels({0: 1})).class_weights()


def test_what_are_no_classes(tmp_path: Path) -> None:
    far = np.arange(2000) * 1000
    for array in (np.arange(2000), far, far[::-1].copy()):
        with pytest.raises(DataError, match="no classes"):
            Statistics.of(h5(tmp_path, array, "W"), classes=True)
    few = np.array([-(2**63), 2**63 - 1, 5])
    assert Statistics.of(h5(tmp_path, few, "W"), classes=True).classes == {-(2**63): 1, 5: 1, 2**63 - 1: 1}
    with pytest.raises(DataError, match="classes of integers"):
        Statistics.of(h5(tmp_path, np.ones(3), "W"), classes=True)
    assert Statistics.of(h5(tmp_path, np.array([True, False, True]), "W"), classes=True).classes == {0: 1, 1: 2}


def test_where_they_are_kept(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    for number in range(2):
        with h5py.File(tmp_path / f"f/{number}.h5", "w") as file:
            file["group/x"] = np.ones(3)
        np.save(tmp_path / f"f/{number}.npy", np.ones(3))
    zarr.create_array(tmp_path / "x.zarr", data=np.ones((2, 3)))
    assert beside(HDF5(tmp_path / "f/0.h5", "group/x", "W")) == tmp_path / "f/0.h5.stats.json"
    assert beside(HDF5(tmp_path / "f", "group/x", "W")) == tmp_path / "f/group.x.stats.json"
    assert beside(Npy(tmp_path / "f/*.npy", "W")) == tmp_path / "f/npy.stats.json"
    assert beside(Zarr(tmp_path / "x.zarr", "NW")) == tmp_path / "x.zarr.stats.json"
    with pytest.raises(DataError, match="need a path"):
        beside(labels({0: 1}))


def test_kept_for_each_dataset_and_found_again(tmp_path: Path) -> None:
    array = DICE.standard_normal((2, 3, 4))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = array, (array > 0).astype("uint8")
    x, y = (HDF5(tmp_path / "a.h5", name, "NCW") for name in "xy")
    for store, classes in ((x, False), (y, True)):
        Statistics.of(store, classes=classes).save(beside(store))
    assert Statistics.load(x) == Statistics.of(x) and Statistics.load(y) == Statistics.of(y, classes=True)
    with pytest.raises(DataError, match="was CW and is CH"):
        Statistics.load(HDF5(tmp_path / "a.h5", "x", "NCH"))


def test_of_other_data(tmp_path: Path) -> None:
    store = h5(tmp_path, np.ones((2, 3)), "NW")
    with pytest.raises(DataError, match="halocline data stats"):
        Statistics.load(store)
    Statistics.of(store).save(beside(store))
    newer = (tmp_path / "a.h5").stat().st_mtime + 10
    os.utime(tmp_path / "a.h5", (newer, newer))
    with pytest.warns(UserWarning, match="written since"):
        Statistics.load(store)
    with pytest.raises(DataError, match=r"shape was \(3,\) and is \(4,\)"):
        Statistics.load(h5(tmp_path, np.ones((2, 4)), "NW"))
    with pytest.raises(DataError, match="samples was 2 and is 5"):
        Statistics.load(h5(tmp_path, np.ones((5, 3)), "NW"))
    beside(store).write_text('{"x": {}}')
    with pytest.raises(DataError, match="not a record"):
        Statistics.load(store)
    beside(store).write_text("{")
    with pytest.raises(DataError, match="not a JSON file"):
        Statistics.load(store)
