"""What each rank does in ``bench io``: the same boxes read by the bare library and by a loader, in turn."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halocline.data import HDF5, Loader, Store, Zarr
from halocline.geometry import shape_of, slices
from halocline.world import Label, Mesh

SAMPLES_AND_DIMS = "NCDHW"
_LABEL = Label("bench io", "all ranks")
_TRIALS = 3
_STEPS = 60  # of which the first few find an empty pipeline


@dataclass(frozen=True)
class ReadCase:
    """A format, and a cut: parts by letter."""

    format: str
    path: str
    cut: Mapping[str, int]
    rounds: int = 5

    @property
    def ranks(self) -> int:
        return int(np.prod(list(self.cut.values()), dtype=int))

    @property
    def name(self) -> str:
        return f"{self.format} " + (" ".join(f"{letter}={parts}" for letter, parts in self.cut.items()) or "one rank")

    def store(self) -> Store:
        if self.format == "hdf5":
            return HDF5(self.path, "x", SAMPLES_AND_DIMS)
        return Zarr(self.path, SAMPLES_AND_DIMS)

    def mesh(self) -> tuple[Mesh, dict[str, str]]:
        axes = {letter: f"axis_{letter}" for letter in self.cut}
        return Mesh(**{axes[letter]: parts for letter, parts in self.cut.items()} or {"data": 1}), axes


def kernel_bytes() -> int:
    """What this process has read so far by system calls, as the kernel counts it."""
    match = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(match.group(1)) if match else 0


class Counted:
    """What is read between its making and :meth:`bytes`, less what looking at the count adds to it."""

    def __init__(self) -> None:
        first = kernel_bytes()
        self._start = kernel_bytes()
        self._look = self._start - first

    def bytes(self) -> int:
        return kernel_bytes() - self._start - self._look


def together(mesh: Mesh) -> float:
    """All ranks begin; the time at which this one does."""
    mesh.world.sum(torch.zeros(1), tuple(range(mesh.size)), _LABEL)
    return time.perf_counter()


def read_case(case: ReadCase) -> dict[str, Any]:
    """Bytes of one epoch as the kernel counts them, and seconds of epochs, the bare library's and ours in turn."""
    torch.set_num_threads(1)
    mesh, axes = case.mesh()
    read = Counted()
    with Loader({"x": case.store()}, mesh, cut=axes, epochs=1) as loader:
        own = loader.layout.tile("x", mesh.coordinates)
        first = _epoch(loader, mesh)
        counted = read.bytes()
        ideal = loader.report.read_bytes
        bare = _Bare(case, own)
        bare.epoch()
        times: dict[str, list[float]] = {"bare": [], "loader": []}
        for turn in range(2 * case.rounds):
            began = together(mesh)
            if turn % 2:
                bare.epoch()
            else:
                _epoch(loader, mesh)
            times["bare" if turn % 2 else "loader"].append(time.perf_counter() - began)
        return {"read": counted, "ideal": ideal, "first": first, **times}


def _epoch(loader: Loader, mesh: Mesh) -> float:
    """One epoch on buffers that are there already, with nothing prepared before it begins."""
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 0})
    began = together(mesh)
    for batch in loader:
        del batch
    return time.perf_counter() - began


class _Bare:
    """The same boxes in the same order, by h5py or zarr alone, into one array that is used again."""

    def __init__(self, case: ReadCase, box: Any) -> None:
        self._format, self._samples = case.format, len(case.store())
        self._index = slices(box)
        self._out = np.empty(shape_of(box), "f4")
        if case.format == "hdf5":
            import h5py

            self._data: Any = h5py.File(case.path, "r")["x"]
        else:
            import zarr

            self._data = zarr.open_array(case.path, mode="r")

    def epoch(self) -> None:
        for sample in range(self._samples):
            if self._format == "hdf5":
                self._data.read_direct(self._out, (sample, *self._index))
            else:
                self._out = self._data[(sample, *self._index)]


def reader_case(case: ReadCase, readers: int, processes: bool) -> float:
    """Gigabytes a second of an epoch."""
    torch.set_num_threads(1)
    mesh, axes = case.mesh()
    with Loader({"x": case.store()}, mesh, cut=axes, epochs=1, readers=readers, processes=processes) as loader:
        _epoch(loader, mesh)
        size = loader.report.read_bytes
        return size / _epoch(loader, mesh) / 1e9


def memory_case(case: ReadCase, budget: int) -> dict[str, Any]:
    """Bytes read in epoch 1, when epoch 0 is in memory."""
    torch.set_num_threads(1)
    mesh, axes = case.mesh()
    with Loader({"x": case.store()}, mesh, cut=axes, epochs=2, memory=budget) as loader:
        for batch in loader:
            del batch
        together(mesh)
        read = Counted()
        for batch in loader:
            del batch
        counted = read.bytes()
        report = loader.report
        return {"epoch1": counted, "held_share": report.held_share, "moved": report.moved_bytes}


def waiting_case(case: ReadCase, sleeping: bool) -> dict[str, Any]:
    """Steps that compute as long as they read: what share of the time is spent waiting for data?

    The median of some trials: where both take equally long, whatever else the machine does shows at once.
    """
    trials = [_waiting(case, sleeping) for _ in range(_TRIALS)]
    return sorted(trials, key=lambda trial: trial["wait_share"])[_TRIALS // 2]


def _waiting(case: ReadCase, sleeping: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh, _ = case.mesh()
    own = torch.tensor(_steps(case, lambda: None)[0])
    # A step is read when its slowest rank has read it.
    seconds = float(mesh.world.maximum(own, tuple(range(mesh.size)), _LABEL))
    work = (lambda: time.sleep(seconds)) if sleeping else _work(seconds)
    return {"wait_share": _steps(case, work)[1], "step_seconds": seconds}


def _steps(case: ReadCase, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a step, and the share of them that was spent waiting."""
    mesh, axes = case.mesh()
    epochs = -(-_STEPS // len(case.store()))
    with Loader({"x": case.store()}, mesh, cut=axes, epochs=epochs) as loader:
        began, steps = 0.0, 0
        for _ in range(epochs):
            for batch in loader:
                del batch
                began = began or time.perf_counter()
                work()
                steps += 1
        return (time.perf_counter() - began) / max(1, steps - 1), loader.report.wait_share


def _work(seconds: float) -> Any:
    """Products of small matrices that take that long alone."""
    matrix = torch.full((128, 128), 1 / 128)

    def turns(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix)
        return time.perf_counter() - began

    turns(200)
    count = max(1, round(seconds / (turns(2000) / 2000)))
    return lambda: turns(count)
