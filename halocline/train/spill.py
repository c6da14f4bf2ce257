"""State of a run that waits for its turn, in a file outside of the memory that runs share.

Weights, buffers and the optimizer's tensors keep their identity: the memory under them is given back, and comes back
with the same bytes. Whatever points at them (hooks, views, the optimizer) needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..tree import tensors_in


class SpillFile:
    """A file that holds the bytes of storages while they are empty. Memory-mapped: the system decides what of it stays
    in main memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._room: Tensor | None = None
        self._out: list[tuple[Any, int, int]] = []  # a storage, its place in the file, its bytes

    @property
    def is_out(self) -> bool:
        """Are the bytes in the file?"""
        return bool(self._out)

    def spill(self, tensors: Iterable[Tensor]) -> int:
        """Move the memory under these tensors into the file; returns its bytes."""
        storages = {each.data_ptr(): each for each in _storages(tensors)}
        total = sum(each.nbytes() for each in storages.values())
        if self._room is None or len(self._room) < total:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._room = torch.from_file(str(self._path), shared=True, size=max(1, total), dtype=torch.uint8)
        at = 0
        for storage in storages.values():
            size = storage.nbytes()
            self._room[at : at + size].copy_(_bytes_of(storage))
            self._out.append((storage, at, size))
            at += size
        for storage, _, _ in self._out:
            storage.resize_(0)
        return total

    def restore(self) -> None:
        """Give the tensors their memory and its bytes back."""
        out, self._out = self._out, []
        for storage, at, size in out:
            storage.resize_(size)
            assert self._room is not None  # something is out
            _bytes_of(storage).copy_(self._room[at : at + size])

    def remove(self) -> None:
        """Delete the file, and its folder with the last one."""
        self._room = None
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files are in it, or it is gone
            self._path.parent.rmdir()


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """All tensors that stay from one step to the next: weights, buffers, and what the optimizer keeps."""
    kept = [*model.parameters(), *model.buffers()]
    for values in optimizer.state.values():
        kept += tensors_in(values)
    return kept


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory under tensors, each once."""
    return sum({each.data_ptr(): each.nbytes() for each in _storages(tensors)}.values())


def _storages(tensors: Iterable[Tensor]) -> Iterable[Any]:
    for tensor in tensors:
        tile = getattr(tensor, "_tile", tensor)
        if not tile.is_sparse:
            storage: Any = tile.untyped_storage()
            if storage.nbytes() and storage.resizable():
                yield storage


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
