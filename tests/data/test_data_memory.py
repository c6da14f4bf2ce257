"""Reading a sample that is larger than all buffers and the budget together takes no more memory than these."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

pytestmark = pytest.mark.long

SIDE, CHUNK = 580, 58


def _hdf5(path):
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (1, 1, SIDE, SIDE, SIDE), "f4", chunks=(1, 1, *[CHUNK] * 3), compression="lzf")
        _fill(made)


def _zarr(path):
    _fill(zarr.create_array(str(path), shape=(1, 1, SIDE, SIDE, SIDE), dtype="f4", chunks=(1, 1, *[CHUNK] * 3)))


def _fill(array):
    slab = np.ones((CHUNK, SIDE, SIDE), np.float32)
    for start in range(0, SIDE, CHUNK):
        array[0, 0, start : start + CHUNK] = slab


@pytest.mark.parametrize(("kind", "write"), [("hdf5", _hdf5), ("zarr", _zarr)])
def test_memory_is_that_of_buffers_and_budget(tmp_path, kind, write):
    path = tmp_path / f"large.{kind}"
    write(path)
    script = str(Path(__file__).parents[1] / "support" / "resident.py")
    done = subprocess.run([sys.executable, script, kind, str(path)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert 0 < found["held"] <= found["budget"]
    allowed = found["buffers"] + found["budget"]
    assert found["sample"] > allowed, "this shows nothing"
    assert found["peak"] <= 1.1 * allowed
