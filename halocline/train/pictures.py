"""The samples that a report shows: numbers of every validation sample, or middle slices of the first few.

They are gathered during validations. The last one writes ``examples.npz``; earlier ones write the predicted slices as
``progress/STEP.npz``, so that the report can show how predictions improve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rules import gather
from ..workloads.workload import Batch

EXAMPLES = "examples.npz"
PROGRESS = "progress"  # folder of the predictions of earlier validations
_MOST = 4  # samples of which slices are kept
_MOST_STEPS = 16  # earlier validations that are kept


class Examples:
    """Predictions beside the truth, collected in a validation on every rank alike, and written by rank 0.

    Only planes of volumes are gathered, never whole volumes.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {"x": [], "y": [], "p": []}
        self._count = 0

    def add(self, output: Tensor, batch: Batch) -> None:
        """Keep planes of the first samples, or all samples that are a few numbers. Called by all ranks."""
        if not _is_shown(output, batch):
            return
        answers = output.argmax(1) if output.ndim > 2 and not batch["y"].is_floating_point() else output
        if answers.ndim <= 2:  # a few numbers a sample: all are kept
            self._keep("y", batch["y"])
            self._keep("p", answers)
        elif self._count < _MOST:
            self._keep("x", *middle(batch["x"], skip=2))
            self._keep("y", *middle(batch["y"], skip=batch["y"].ndim - batch["x"].ndim + 2))
            self._keep("p", *middle(answers, skip=answers.ndim - batch["x"].ndim + 2))
        self._count += len(batch["x"])

    def _keep(self, name: str, tensor: Tensor, dim: int | None = None) -> None:
        """Gather a tensor and keep a copy; ``dim``, of size 1, is dropped after that, so that only a plane is
        gathered."""
        tensor = gather(tensor) if dim is None else gather(tensor).squeeze(dim)
        # A copy, since the memory of the batch goes back to the loader.
        self._kept[name].append(tensor.detach().float().cpu().numpy().copy())

    def write(self, folder: Path, step: int | None = None) -> None:
        """Write what was kept into the run's folder; for an earlier validation, after ``step``, predicted slices
        alone."""
        arrays = {name: np.concatenate(parts) for name, parts in self._kept.items() if parts}
        if "x" in arrays:
            arrays = {name: array[:_MOST] for name, array in arrays.items()}
        if arrays and step is None:
            np.savez_compressed(folder / EXAMPLES, **arrays)  # type: ignore[arg-type]
        elif "x" in arrays:
            (folder / PROGRESS).mkdir(exist_ok=True)
            np.savez_compressed(folder / PROGRESS / f"{step:09d}.npz", p=arrays["p"])
            _thin_out(folder / PROGRESS)


def _thin_out(folder: Path) -> None:
    """Remove every other file once there are too many, so that a long run keeps a few from its whole length."""
    files = sorted(folder.glob("*.npz"))
    if len(files) > _MOST_STEPS:
        for path in files[1::2]:
            path.unlink()


def _is_shown(output: Any, batch: Batch) -> bool:
    """Are these numbers beside numbers, or maps beside maps? Other outputs have no picture, and raise no error."""
    if not isinstance(output, Tensor) or output.is_complex() or batch["y"].is_complex():
        return False
    return output.ndim <= 2 or (output.ndim == batch["x"].ndim and batch["y"].ndim >= output.ndim - 1)


def middle(volume: Tensor, skip: int) -> tuple[Tensor, int | None]:
    """The middle plane of a volume along its first dim in space, and that dim, kept with size 1; an image as it is.

    ``skip`` dims come before space. Of several channels, the first.
    """
    if skip == 2 and volume.shape[1] > 1:
        volume = volume[:, :1]
    if volume.ndim - skip <= 2:
        return volume, None
    return volume.narrow(skip, volume.shape[skip] // 2, 1), skip


def memory_used(device: torch.device) -> int:
    """Peak memory in bytes so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
