"""Predictions of a trained network on samples of any size: read, computed and written box by box, never whole.

The folder of a run is all that is needed: settings, the user's code, the description of the input, and the weights. The
number of ranks may differ from that of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Field, Loader, Nifti, Npy, Store
from ..data.stores.open import open_store
from ..distribute import distribute
from ..errors import DataError
from ..world import init, this_world
from ..world.agreement import agree
from .answers import NIFTI, AnswerFile, ArrayFile, NiftiFiles, NpyFiles, PredictionWriter
from .checkpoints import CHECKPOINTS, Checkpoints
from .config import read_settings
from .imports import use_code
from .inputs import Input
from .precision import Precision, this_device
from .settings import AXES
from .task import START, make_layout, model_maker
from .trust import check_trusted

Progress = Callable[[int, int], None]


class Predictor:
    """The network of a run, with the weights of its newest good checkpoint. Made by all ranks together.

    If the run's mesh does not fit the number of ranks, samples are cut as they would be by default. A run that names
    code and was made by somebody else is refused unless you ``trust`` it.
    """

    def __init__(self, run: Path, *, trust: bool = False) -> None:
        settings = read_settings(run)
        check_trusted(run, settings, trust)
        init(settings.deadline)
        self._settings, device = settings, this_device()
        self._device = device if device.type == "cuda" else None
        self._precision = Precision(settings.precision, device)
        use_code(run)
        world = this_world()
        self.input = agree(world, lambda: Input.read(run), START)
        make_model = agree(world, lambda: model_maker(settings), START)
        if math.prod(settings.mesh.values()) != world.size:  # the training had another number of ranks
            settings = replace(settings, mesh={})
        layout = make_layout(settings, self.input.letters, world.size)
        self.mesh, self._cut = layout.arrangement.mesh(), layout.cut
        self._model = distribute(self._precision.placed(make_model()), self.mesh)
        with Checkpoints(run / CHECKPOINTS, self.mesh) as checkpoints:
            checkpoint = checkpoints.load_latest({"model": self._model.state_dict()})
        if checkpoint is None:
            raise DataError(f"{run} has no checkpoint; train it first")
        self._model.load_state_dict(checkpoint.tensors["model"])
        self._model.eval()
        self.step = checkpoint.step

    @torch.no_grad()
    def run(
        self, store: Store, writer: PredictionWriter, *, classes: bool = False, progress: Progress | None = None
    ) -> None:
        """Predict every sample of ``store``; with ``classes`` the number of the likeliest class. By all ranks
        together."""
        with self._loader(self.input.field(store)) as loader:
            for batch in loader:
                with self._precision.autocast():
                    answer = self._model(batch["x"])
                writer.write(batch.samples[0], likeliest(answer) if classes else self._as_written(answer))
                if progress is not None:
                    progress(batch.samples[-1] + 1, len(store))

    def _as_written(self, answer: Any) -> Tensor:
        """A prediction in the run's own precision: half precision is for computing alone."""
        if not isinstance(answer, Tensor):
            raise DataError(f"the network gives a {type(answer).__name__}, and only a tensor can be written")
        return answer.to(self._precision.dtype) if answer.is_floating_point() else answer

    def _loader(self, field: Field) -> Loader:
        """Samples in order, once, cut as the network's input is."""
        there = {letter: axis for letter, axis in self._cut.items() if letter == "N" or letter in field.dims}
        return Loader(
            {"x": field},
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
    """The number of the likeliest class along dim 1, as uint8 where that is enough."""
    if not isinstance(answer, Tensor) or answer.ndim < 2 or answer.shape[1] < 2:
        shape = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise DataError(f"--classes: the network's answers {shape} have no classes along their second dim")
    return answer.argmax(1).to(torch.uint8 if answer.shape[1] <= 256 else torch.int32)


def predict(
    run: Path,
    source: Store | str | Path,
    out: Path,
    *,
    dims: str | None = None,
    dataset: str | None = None,
    classes: bool = False,
    force: bool = False,
    trust: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the network of ``run`` on every sample of ``source`` and write ``out``. Called by all ranks together.

    ``out`` is .h5, .zarr or .nii, or a folder for a .nii.gz file per sample (.npy where the samples are npy files); it
    gets its name when all is written.
    ``trust`` is as in :class:`Predictor`. ``progress(done, total)`` is called after each batch. Returns name, number of
    samples, their shape and the checkpoint's step.
    """
    check_trusted(run, read_settings(run), trust)  # first of all, so that a wrong folder is the error that is shown
    if not isinstance(source, Store):
        source = Input.read(run).open(str(source), dims, dataset)
    _check(out, force, source)
    parts = _parts(source, out)
    for store, _ in parts:
        Input.read(run).field(store)
    predictor = Predictor(run, trust=trust)
    done, writers = 0, [PredictionWriter(file, predictor.mesh) for _, file in parts]
    try:
        for (store, _), writer in zip(parts, writers, strict=True):

            def tell(count: int, _: int, done: int = done) -> None:
                if progress is not None:
                    progress(done + count, len(source))

            predictor.run(store, writer, classes=classes, progress=tell)
            done += len(store)
        for writer in writers:
            writer.close()
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    return {"out": str(out), "samples": len(source), "shape": list(writers[-1].shape), "step": predictor.step}


def _parts(store: Store, out: Path) -> list[tuple[Store, AnswerFile]]:
    """Stores with the files to write: volumes of NIfTI files may differ in size, so each is a store of its own."""
    if out.suffix in (".h5", ".hdf5", ".zarr"):
        return [(store, ArrayFile(out, len(store)))]
    if isinstance(store, Npy) and not out.name.endswith(NIFTI):
        return [(store, NpyFiles(out, _names(store, out, ".npy")))]
    names = _names(store, out)
    if not isinstance(store, Nifti):
        return [(store, NiftiFiles(out, store, names))]
    dims = store.stored[::-1]
    each = [open_store(path, dims) for path in store.paths]
    return [(one, NiftiFiles(out, one, [name])) for one, name in zip(each, names, strict=True)]


def _names(store: Store, out: Path, suffix: str = ".nii.gz") -> list[str]:
    """The names of files, one for each sample. DataError if two samples would have the same."""
    if out.name.endswith(NIFTI):
        if len(store) != 1:
            raise DataError(
                f"{out} holds one volume, and {store.name} has {len(store)}; give a folder, such as answers/"
            )
        return [out.name]
    paths = getattr(store, "paths", ())
    if len(paths) == len(store):
        names = [f"{path.name.removesuffix('.gz').rpartition('.')[0]}{suffix}" for path in paths]
    else:
        names = [f"sample-{number:04d}{suffix}" for number in range(len(store))]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{out}: two samples would be written to {twice}; predict each folder by itself")
    return names


def _check(out: Path, force: bool, store: Store) -> None:
    """Refuse an output that exists, holds the samples, or cannot be written. On every rank, before the network is
    made."""
    if out.suffix and not out.is_dir() and not out.name.endswith((".h5", ".hdf5", ".zarr", *NIFTI)):
        raise DataError(f"{out}: predictions go to .h5, .zarr, .nii, .nii.gz, or a folder of a file per sample")
    if not out.resolve().parent.is_dir():
        raise DataError(f"{out}: there is no folder {out.resolve().parent}; make it first")
    sources = {path.resolve() for path in getattr(store, "paths", ())}
    if out.resolve() in sources or any(path.parent == out.resolve() for path in sources):
        raise DataError(f"{out} holds the samples; give the predictions another name")
    is_folder = out.is_dir() and out.suffix != ".zarr"
    if not force and (any(out.iterdir()) if is_folder else out.exists()):
        raise DataError(f"{out} exists; give another name, or --force to overwrite it")
