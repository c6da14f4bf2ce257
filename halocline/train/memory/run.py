"""The copies of a training run: when they are made, and what happens where they cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...sizes import bytes_from
from ...world import Mesh
from ..checkpoints import CheckpointError, Checkpoints, Loaded
from .copies import StateCopies

if TYPE_CHECKING:
    from ..settings import Settings

Note = Callable[[str], None]
Log = Callable[..., None]  # called with the kind of an entry and its values


class RunCopies:
    """Copies as the settings ask for them, or none. A run goes on without them where there is no memory.

    ``note`` is told what the user should know, ``log`` gets an entry for each copy and for coming back.
    """

    def __init__(self, settings: Settings, folder: Path, mesh: Mesh, note: Note, log: Log) -> None:
        told = settings.copies
        self._note, self._log, self._every = note, log, told.every
        limit = None if told.memory is None else bytes_from("copies.memory", told.memory)
        self._copies = StateCopies(folder, mesh, limit, settings.deadline) if told.every else None

    @property
    def flags(self) -> tuple[bool, bool]:
        """Is a copy under way on this rank, and has one failed? All ranks go by the flags of all."""
        return (False, False) if self._copies is None else (self._copies.busy, self._copies.failed)

    def after_step(self, step: int, flags: Sequence[bool], state: Callable[[], tuple[Any, Any]]) -> None:
        """Copy what ``state`` gives (tensors, and the rest) if it is time, and the copy before has ended everywhere."""
        busy, failed = flags
        copies, began = self._copies, time.perf_counter()
        if copies is None or not (failed or (step % self._every == 0 and not busy)):
            return
        try:
            if failed:
                copies.raise_failure()
            copies.copy(step, *state())
        except CheckpointError as error:
            copies.close(end=True)
            self._copies = None
            self._note(f"step {step}: no more copies of the state in memory: {error}")
        else:
            self._log("copy", step=step, waited=time.perf_counter() - began)

    def newest(self, template: Mapping[str, Any], checkpoints: Checkpoints) -> Loaded | None:
        """The state that was copied, if it is newer than all checkpoints. No file is read. By all ranks together."""
        if self._copies is None:
            return None
        began = time.perf_counter()
        try:
            found = self._copies.load_latest(template, max(checkpoints.steps(), default=-1))
        except CheckpointError as error:
            self._note(f"copies of the state in memory cannot be used: {error}")
            return None
        if found is not None:
            seconds = time.perf_counter() - began
            self._note(f"step {found.step} came back from memory in {seconds:.3f} s")
            self._log("restored", step=found.step, seconds=seconds)
        return found

    def end(self) -> None:
        """The run is over: the copies go."""
        if self._copies is not None:
            self._copies.close(end=True)
