"""Small sets of samples on disk, and loaders of them on ranks that are threads."""

import h5py
import numpy as np
import torch
import zarr

import halocline as hc
from halocline.data import HDF5, Field, Generated, Loader, Npy, Zarr
from halocline.geometry import slices
from halocline.testing import run_local

SAMPLES, SHAPE = 7, (2, 9, 8, 8)


def numbers():
    rng = np.random.default_rng(3)
    return {
        "x": rng.integers(-100, 100, (SAMPLES, *SHAPE)).astype("i2"),
        "y": rng.integers(0, 3, (SAMPLES, *SHAPE[1:])).astype("u1"),
        "v": rng.standard_normal((SAMPLES, 4)),
    }


DIMS = {"x": "NCDHW", "y": "NDHW", "v": "NC"}


def write(folder):
    """The same samples in every format."""
    data = numbers()
    with h5py.File(folder / "all.h5", "w") as file:
        for name, array in data.items():
            file.create_dataset(name, data=array, chunks=(1, *(max(1, n // 2) for n in array.shape[1:])))
    turned = np.ascontiguousarray(data["x"].transpose(0, 4, 3, 2, 1))
    for sample in range(SAMPLES):
        with h5py.File(folder / f"one-{sample}.h5", "w") as file:
            file.create_dataset("x", data=turned[sample], compression="gzip", fletcher32=True, chunks=(4, 4, 3, 1))
            file["y"], file["v"] = data["y"][sample], data["v"][sample]
    for name, array in data.items():
        np.save(folder / f"{name}.npy", array)
        shards = (1, *array.shape[1:])
        chunks = tuple(n // 2 if n % 2 == 0 else n for n in shards)
        made = zarr.create_array(
            str(folder / f"{name}.zarr"),
            shape=array.shape,
            dtype=array.dtype,
            chunks=chunks,
            shards=shards,
        )
        made[...] = array


def stores(kind, folder):
    data = numbers()
    if kind == "hdf5":
        return {name: HDF5(folder / "all.h5", name, DIMS[name]) for name in data}
    if kind == "files":
        dims = {"x": "WHDC", "y": "DHW", "v": "C"}
        return {name: HDF5(str(folder / "one-*.h5"), name, dims[name]) for name in data}
    if kind == "npy":
        return {name: Npy(folder / f"{name}.npy", DIMS[name]) for name in data}
    if kind == "zarr":
        return {name: Zarr(folder / f"{name}.zarr", DIMS[name]) for name in data}
    return {
        name: Generated(
            lambda s, box, a=array: a[s][slices(box)], SAMPLES, array.shape[1:], DIMS[name][1:], array.dtype
        )
        for name, array in data.items()
    }


KINDS = ("hdf5", "files", "npy", "zarr", "generated")

MESHES = {
    "depth": ({"depth": 2}, {"D": "depth"}),
    "uneven": ({"depth": 4}, {"D": "depth"}),
    "2x2": ({"depth": 2, "height": 2}, {"D": "depth", "H": "height"}),
    "data x depth": ({"data": 2, "depth": 2}, {"N": "data", "D": "depth"}),
    "data": ({"data": 4}, {"N": "data"}),
    "replicas": ({"spare": 2, "height": 2}, {"H": "height"}),
}


def fields(kind, folder, values=(), rim=None):
    found = stores(kind, folder)
    return {
        "x": Field(found["x"], dtype=torch.float32, values=values, rim=rim or {}),
        "y": Field(found["y"], dtype=torch.long, fill=-1),
        "v": found["v"],
    }


def batches(make_fields, sizes, cut, epochs=2, **options):
    """Every batch of some epochs, gathered, on each rank; and its reports."""

    def body():
        found = []
        with Loader(make_fields(), hc.Mesh(**sizes), cut=cut, epochs=epochs, **options) as loader:
            for _ in range(epochs):
                for batch in loader:
                    whole = {name: hc.gather(tensor).clone() for name, tensor in batch.items()}
                    found.append((batch.epoch, batch.step, batch.samples, whole))
            return found, loader.report

    return run_local(int(np.prod(list(sizes.values()))), body)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:3] == theirs[:3]
        for name, tensor in theirs[3].items():
            assert mine[3][name].dtype == tensor.dtype
            assert torch.equal(mine[3][name], tensor), f"{name} of step {mine[:2]}"
