"""Answers of a trained network on samples of any size: read, computed and written box by box, never whole anywhere."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Field, Loader, Store
from ..distribute import distribute
from ..errors import DataError
from ..geometry import slices, whole
from ..tensor import ShardedTensor, Sharding, unwrap
from ..world import Label, Mesh, this_world
from .checkpoints import Checkpoints
from .config import read_settings
from .launch import join
from .precision import Precision
from .settings import AXES
from .task import make_mesh, make_task, together
from .trainer import CHECKPOINTS, this_device

_LABEL = Label("predict", "writing answers", "control")
_CHUNK = 1 << 22  # bytes
ANSWERS = "p"  # the dataset in HDF5

Progress = Callable[[int, int], None]


class Predictor:
    """The network of a run, with the weights of its newest good checkpoint. Made on every rank."""

    def __init__(self, run: Path) -> None:
        settings = read_settings(run)
        join(settings.deadline)
        self._settings, device = settings, this_device()
        self._device = device if device.type == "cuda" else None
        self._precision = Precision(settings.precision, device)
        task = together(this_world(), lambda: make_task(settings, self._precision.dtype))
        ranks = this_world().size
        if math.prod(settings.mesh.values()) != ranks:  # that of the training, which had other ranks
            settings = replace(settings, mesh={})
        self.mesh, self._cut = make_mesh(settings, task.letters, ranks)
        self._field = task.training["x"]
        self._model = distribute(self._precision.placed(task.make_model()), self.mesh)
        with Checkpoints(run / CHECKPOINTS, self.mesh) as checkpoints:
            found = checkpoints.load_latest({"model": self._model.state_dict()})
        if found is None:
            raise DataError(f"{run} has no checkpoint; train it first")
        self._model.load_state_dict(found.tensors["model"])
        self._model.eval()
        self.step = found.step

    @torch.no_grad()
    def run(self, store: Store, out: Path, *, classes: bool = False, progress: Progress | None = None) -> Writer:
        """The answer to every sample, into ``out``; with ``classes`` the number of the likeliest."""
        self._check_samples(store)
        writer = Writer(out, self.mesh, len(store))
        with self._loader(store) as loader:
            for batch in loader:
                with self._precision.autocast():
                    answer = self._model(batch["x"])
                writer.write(batch.samples[0], likeliest(answer) if classes else self._as_written(answer))
                if progress is not None:
                    progress(batch.samples[-1] + 1, len(store))
        writer.close()
        return writer

    def _check_samples(self, store: Store) -> None:
        trained = self._field.store
        if store.dims != trained.dims:
            raise DataError(
                f"{store.name} has dims {store.dims}, and the network was trained on {trained.dims}; name them in that "
                "order with --dims, or convert the file (halocline data convert)"
            )
        if "C" in store.dims:
            there, wanted = (each.shape[each.dims.index("C")] for each in (store, trained))
            if there != wanted:
                raise DataError(f"{store.name} has {there} channels, and the network was trained on {wanted}")

    def _as_written(self, answer: Any) -> Tensor:
        """Numbers as wide as the run's own; half precision is for computing alone."""
        if not isinstance(answer, Tensor):
            raise DataError(f"the network gives a {type(answer).__name__}, and a tensor is all that can be written")
        return answer.to(self._precision.dtype) if answer.is_floating_point() else answer

    def _loader(self, store: Store) -> Loader:
        there = {letter: axis for letter, axis in self._cut.items() if letter == "N" or letter in store.dims}
        return Loader(
            {"x": Field(store, dtype=self._field.tensor_dtype, values=self._field.values)},
            self.mesh,
            batch=self.mesh.sizes.get(AXES["N"], 1),
            cut=there,
            shuffle=False,
            epochs=1,
            multiple=self._settings.multiple,
            prefetch=1,
            device=self._device,
        )


def likeliest(answer: Any) -> Tensor:
    """The number of the likeliest class, in one byte where that is enough."""
    if not isinstance(answer, Tensor) or answer.ndim < 2 or answer.shape[1] < 2:
        shape = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise DataError(f"--classes: the network's answers {shape} have no classes along their second dim")
    return answer.argmax(1).to(torch.uint8 if answer.shape[1] <= 256 else torch.int32)


def predict(
    run: Path, store: Store, out: Path, *, classes: bool = False, force: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """The network of ``run`` on every sample of ``store``, into ``out`` (.h5 or .zarr). Called by all ranks.

    ``out`` has its name when all of it is written.
    """
    _check(out, force, store)
    predictor = Predictor(run)
    writer = predictor.run(store, out, classes=classes, progress=progress)
    return {"out": str(out), "samples": len(store), "shape": list(writer.shape), "step": predictor.step}


def _check(out: Path, force: bool, store: Store) -> None:
    if out.suffix not in (".h5", ".hdf5", ".zarr"):
        raise DataError(f"{out}: answers are written as .h5 or .zarr")
    if not out.resolve().parent.is_dir():
        raise DataError(f"{out}: there is no folder {out.resolve().parent}; make it first")
    if out.resolve() in {path.resolve() for path in getattr(store, "paths", ())}:
        raise DataError(f"{out} holds the samples themselves; give the answers another name")
    if out.exists() and not force:
        raise DataError(f"{out} exists; give another name, or --force to write over it")


class Writer:
    """Every rank writes its own tile. HDF5 takes one writer at a time; chunks of Zarr belong to one rank each."""

    def __init__(self, out: Path, mesh: Mesh, samples: int) -> None:
        self._out, self._mesh, self._samples = out, mesh, samples
        self._part = out.with_name(f".{out.name}.part")
        self._hdf5 = out.suffix != ".zarr"
        self.shape: tuple[int, ...] = ()

    def write(self, first: int, answer: Tensor) -> None:
        """Answers of the samples from ``first`` on."""
        sharding = answer.sharding if isinstance(answer, ShardedTensor) else None
        tile = unwrap(answer).cpu().numpy()
        if not self.shape:
            self._create(tuple(answer.shape[1:]), tile.dtype, sharding)
        box = sharding.box if sharding is not None else tuple(map(whole, tile.shape))
        place = (box[0].shift(first), *box[1:])
        writes = self._is_first(sharding) and tile.size > 0

        def put() -> None:
            if writes:
                self._put(slices(place), tile)

        self._in_turns(put) if self._hdf5 or not self._apart(sharding) else put()

    def _is_first(self, sharding: Sharding | None) -> bool:
        """Of ranks that hold the same tile, one writes."""
        axes = sharding.axes if sharding is not None else frozenset()
        return all(place == 0 for axis, place in self._mesh.coordinates.items() if axis not in axes)

    def _apart(self, sharding: Sharding | None) -> bool:
        return sharding is None or all(
            point % chunk == 0 or point == size
            for cut, size, chunk in zip(sharding.cuts[1:], self.shape, self._chunks, strict=True)
            if cut is not None
            for point in cut.partition.points
        )

    def _create(self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding | None) -> None:
        self.shape = shape
        self._chunks = chunks_for(shape, dtype.itemsize, sharding)
        if self._mesh.rank == 0:
            _remove(self._part)
            whole = (self._samples, *shape)
            if self._hdf5:
                import h5py

                with h5py.File(self._part, "w") as file:
                    file.create_dataset(ANSWERS, whole, dtype, chunks=(1, *self._chunks), fletcher32=True)
            else:
                import zarr

                zarr.create_array(str(self._part), shape=whole, dtype=dtype, chunks=(1, *self._chunks))
        self._together()

    def _put(self, place: tuple[slice, ...], tile: Any) -> None:
        if self._hdf5:
            import h5py

            with h5py.File(self._part, "r+") as file:
                file[ANSWERS][place] = tile
        else:
            import zarr

            zarr.open_array(str(self._part), mode="r+")[place] = tile

    def _in_turns(self, put: Callable[[], None]) -> None:
        for rank in range(self._mesh.size):
            if rank == self._mesh.rank:
                put()
            self._together()

    def _together(self) -> None:
        self._mesh.world.maximum(torch.zeros(1), tuple(range(self._mesh.size)), _LABEL)

    def close(self) -> None:
        self._together()
        if self._mesh.rank == 0:
            _remove(self._out)
            self._part.rename(self._out)
        self._together()


def chunks_for(shape: tuple[int, ...], itemsize: int, sharding: Sharding | None) -> tuple[int, ...]:
    """Chunks that no two ranks share, of a few megabytes at most."""
    cuts = sharding.cuts[1:] if sharding is not None else (None,) * len(shape)
    found = [math.gcd(size, *cut.partition.points) if cut else size for size, cut in zip(shape, cuts, strict=True)]
    found = [max(1, size) for size in found]
    while math.prod(found) * itemsize > _CHUNK and max(found) > 1:
        largest = found.index(max(found))
        found[largest] = max(d for d in range(1, found[largest] // 2 + 1) if found[largest] % d == 0)
    return tuple(found)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
