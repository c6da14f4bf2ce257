"""Peak memory of a step, from a dry run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .._torch_private import TorchDispatchMode, storage_key
from ..rules import planning
from ..tree import tensors_in

Workspace = Callable[[Any, Any, Any], int]


class _Living(TorchDispatchMode):
    """Counts the bytes of storages that local operations made and that are still alive."""

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()
        self._workspace = workspace

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not planning():
            given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}  # written in place: made elsewhere
            for tensor in tensors_in(result):
                if storage_key(tensor) not in given:
                    self._count(tensor.untyped_storage())
            if self._workspace is not None:
                self.peak = max(self.peak, self.bytes + self._workspace(function, args, result))
        return result

    def _count(self, storage: Any) -> None:
        """Count a storage until it is freed, once however many tensors view it."""
        key, size = storage_key(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        """When the storage is freed: called by its finalizer, which keeps no reference to it."""
        self._known.discard(key)
        self.bytes -= size


def peak_of(step: Callable[[], object], workspace: Workspace | None = None) -> int:
    """The most bytes that are alive at once of what ``step()`` makes; run it on meta tensors, inside ``dry``.

    ``workspace(function, args, result)`` is what an operation takes beside its results while it runs.
    """
    with _Living(workspace) as living:
        step()
    return living.peak


class MemoryCurve(_Living):
    """Bytes that are alive after each local operation that runs inside; run it on meta tensors, inside ``dry``."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if not planning():
            self.points.append(self.bytes)
        return result
