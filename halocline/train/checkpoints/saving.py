"""Checkpoints of a run: written in the background, whole or not at all, checked before they are used.

``folder/step-00000120`` has the files of torch.distributed.checkpoint, ``state.json`` and ``manifest.json``, which is
written last and knows size and checksum of every other. A kill at any moment leaves the last good one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...background import in_background
from ...errors import HaloclineError, RankFailure
from ...world import Mesh, World, placement_of
from ...world.placement import place_on
from .files import FORMAT, STATE, Facts, Folder, problems, read_manifest, share, write, write_manifest
from .peers import CheckpointError, Mismatch, Peers, reason
from .store import Stored, write_tensors
from .tree import Parts, as_it_is, assembled, host_copy, leaves, located

__all__ = ["CheckpointError", "Checkpoints", "Loaded", "Mismatch"]

_log = logging.getLogger("halocline.train")
_LEAVING = 3.0  # seconds for what is being written when another rank is lost: it may need nothing but its name


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as it was saved. ``skipped`` says of each newer one why it was not taken."""

    step: int
    tensors: dict[str, Any]
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run in a folder that all ranks see. Every method is called by all ranks together.

    Tensors are plain and whole on every rank, or DTensors; any number of ranks can load what any other saved. Where
    ``place_parameter`` has said that a parameter is not whole on an axis, the values of each place on that axis are
    saved, and a mesh with as many places can load them.
    ``deadline`` is how long, in seconds, a rank waits for the others and for its own writing; without it, 600, or more
    where ranks wait longer for each other. ``lock`` is for :class:`Folder`.
    """

    def __init__(
        self,
        folder: Path | str,
        world: World | Mesh | None,
        keep: int = 3,
        *,
        deadline: float | None = None,
        lock: int | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"Checkpoints(keep={keep}): at least one has to be kept")
        self.folder, self.keep = Path(folder), keep
        self.completed: int | None = None  # the last step that this object saved, or loaded
        self._mesh = world if isinstance(world, Mesh) else None
        self._peers = Peers(world, deadline)
        self._files = Folder(self.folder, lock)
        self._damaged: set[int] = set()
        self._pending: tuple[int, Future[None]] | None = None
        self._late = False  # was the pending one waited for in vain?
        self._peers.told(self._files.tidy)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            self._close(_LEAVING if isinstance(error, RankFailure) else self._peers.deadline)
        except HaloclineError:
            if error is None:  # or it would hide the error that ends the run
                raise

    # ---- saving ----

    def claim(self) -> None:
        """Keep other runs out of the folder from now on; the first save does it otherwise."""
        self._peers.told(self._files.claim)

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Copy all tensors to host memory now, and write them while training goes on. Waits for the save before it.

        ``tensors`` and ``state`` are nested; tensors may stand in both, and in both the rest comes back as it was. Of
        that rest the first rank's is written. Raises what went wrong with the save before; that one is lost, nothing
        half is left, and this one has not begun.
        """
        self.wait()
        parts: list[Parts] = []

        def copied() -> tuple[int, str]:
            parts.append(Parts({"tensors": tensors, "state": state}, host_copy, self._place))
            return step, _signature(parts[0])

        def begun(signatures: list[tuple[int, str]]) -> list[None]:
            self._check_alike(signatures)
            self._files.begin(step, self._damaged)
            return [None] * self._peers.size

        self._named(step, lambda: self._peers.centrally(copied, begun))
        self._pending = step, in_background(lambda: self._write(step, parts[0]), "halocline checkpoint")
        self._late = False
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until what is being written is complete; raises, on every rank, if it could not be written."""
        self._wait(self._peers.deadline)

    def _wait(self, seconds: float) -> None:
        if self._pending is None:
            return
        step, future = self._pending
        try:
            self._named(step, lambda: future.result(0 if self._late else seconds))
        except TimeoutError:
            self._late = True
            raise CheckpointError(
                f"{self._files.path(step)}: still being written after {seconds:g} s; look whether the storage answers, "
                "or allow it longer (deadline)"
            ) from None
        finally:
            if future.done():
                self._pending = None
        self.completed = step
        self._damaged.discard(step)

    @property
    def failed(self) -> bool:
        """Has the save under way ended with an error on this rank? Waits for nothing."""
        return self._pending is not None and self._pending[1].done() and self._pending[1].exception() is not None

    def raise_failure(self) -> None:
        """Raise, on all ranks, what went wrong with the save under way: called by all once one of them ``failed``."""
        self._peers.agree(self.wait)
        raise CheckpointError("the last checkpoint was not saved, and no rank says why; look at the ranks' own output")

    def close(self) -> None:
        """Wait, and let go of the folder and of the other ranks."""
        self._close(self._peers.deadline)

    def _close(self, patience: float) -> None:
        if self._pending is not None and not self._pending[1].done() and not self._late:
            _log.info("step %d: waiting %g s at most for its checkpoint to be written", self._pending[0], patience)
        try:
            self._wait(patience)
        finally:
            if self._pending is None:  # else a writer that hangs still has them
                self._files.release()
                self._peers.close()

    def _named(self, step: int, work: Callable[[], None]) -> None:
        try:
            work()
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {error}") from error

    def _check_alike(self, signatures: list[tuple[int, str]]) -> None:
        step, signature = signatures[0]
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step {step!r} is not a whole number from 0")
        for rank, (other, its) in enumerate(signatures):
            if other != step:
                raise CheckpointError(f"rank {rank} saves step {other}, and rank 0 step {step}; save on all together")
            if its != signature:
                raise CheckpointError(
                    f"rank {rank} has other tensors than rank 0, by name, shape or dtype; save the same on every rank"
                )

    def _write(self, step: int, parts: Parts) -> None:
        folder = self._files.part(step)

        def finish(files: dict[str, Facts]) -> None:
            state = json.dumps({"step": step, "tree": parts.tree}, allow_nan=False).encode()
            files = {**files, STATE: write(folder / STATE, state)}
            write_manifest(folder, {**self._origin(step), "files": files})
            self._files.publish(step)
            self._files.retain(step, self.keep, self._damaged - {step})

        try:
            write_tensors(folder, parts.tensors, self._peers, finish)
        except BaseException as error:
            if self._peers.is_first:
                self._files.discard(step)
            if isinstance(error, HaloclineError):
                raise
            raise CheckpointError(reason(error)) from error

    def _place(self, tensor: Tensor, name: str) -> str:
        if placement_of(tensor) and self._mesh is None:
            raise CheckpointError(f"{name} is not whole on every rank; give Checkpoints the mesh, not its world")
        return "" if self._mesh is None else place_on(tensor, self._mesh)

    def _origin(self, step: int) -> dict[str, Any]:
        return {"format": FORMAT, "step": step, "ranks": self._peers.size, "torch": str(torch.__version__)}

    # ---- loading ----

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, good or not."""
        return self._peers.told(self._files.steps)

    def load_latest(self, template: Mapping[str, Any] | None = None) -> Loaded | None:
        """The newest good checkpoint, None where there is none at all; a damaged one is passed over with a warning.

        New tensors are made, in host memory, but for those where the template has a DTensor: they are sharded as it is.
        What the template has must be there, with its shape and dtype; what it has not, such as the state of an
        optimizer that has made no step, is loaded too.
        """
        self.wait()
        skipped: list[str] = []
        for step in reversed(steps := self.steps()):
            try:
                return self._load(step, template, skipped)
            except Mismatch:
                raise
            except CheckpointError as error:
                skipped.append(reason(error))
                self._pass_over(step, skipped[-1])
        if steps:
            told = "\n".join(f"  {words}" for words in skipped)
            raise CheckpointError(f"{self.folder}: no good checkpoint among {len(steps)}:\n{told}")
        return None

    def load(self, step: int, template: Mapping[str, Any] | None = None) -> Loaded:
        """That one, or CheckpointError."""
        self.wait()
        steps = self.steps()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {there}")
        return self._load(step, template, [])

    def _pass_over(self, step: int, words: str) -> None:
        self._damaged.add(step)
        if self._peers.is_first:
            warnings.warn(f"checkpoint passed over: {words}", RuntimeWarning, stacklevel=3)

    def _load(self, step: int, template: Mapping[str, Any] | None, skipped: list[str]) -> Loaded:
        folder = self._files.path(step)
        files: dict[str, Facts] = self._peers.told(lambda: read_manifest(folder, step))["files"]
        self._verify(folder, files)
        read: list[dict[str, Any]] = []
        self._peers.agree(lambda: read.append(self._read(folder, files, template)))
        self.completed = step
        return Loaded(step, read[0]["tensors"], read[0]["state"], tuple(skipped))

    def _verify(self, folder: Path, files: Mapping[str, Facts]) -> None:
        own = share(files, self._peers.rank, self._peers.size)
        wrong = [words for each in self._peers.agree(lambda: problems(folder, own)) for words in each]
        if wrong:
            raise CheckpointError("; ".join(sorted(wrong)))

    def _read(self, folder: Path, files: Mapping[str, Facts], template: Mapping[str, Any] | None) -> dict[str, Any]:
        tree = json.loads((folder / STATE).read_bytes())["tree"]
        tree = located(tree, {} if self._mesh is None else self._mesh.coordinates)
        wanted = Parts({"tensors": template or {}}, as_it_is, self._place).tensors
        stored = Stored(folder, files)
        targets = stored.targets(leaves(tree), wanted)
        stored.read(targets, self._peers.is_first)
        whole: dict[str, Any] = assembled(tree, targets)
        return whole


def _signature(parts: Parts) -> str:
    """What has to be the same on every rank."""
    return hashlib.blake2b("\n".join(parts.alike).encode(), digest_size=16).hexdigest()
