"""Checkpoints of a run: written in the background, whole or not at all, verified before they are used.

``folder/step-00000120`` has the files of torch.distributed.checkpoint, ``state.json`` and ``manifest.json``, which is
written last and holds the size and checksum of every other file. A kill at any moment leaves the last good checkpoint.
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
from ...rules.dtensor import from_dtensor
from ...world import Mesh, World, placement_of
from ...world.placement import place_on
from .cloud import CloudFolder
from .files import FORMAT, STATE, Facts, Folder, problems, read_manifest, share, write, write_manifest
from .peers import CheckpointError, Mismatch, Peers, reason
from .store import Stored, write_tensors
from .tree import Parts, assembled, host_copy, leaves, located, uncopied

__all__ = ["CheckpointError", "Checkpoints", "Loaded", "Mismatch"]

_log = logging.getLogger("halocline.train")
_LEAVING = 3.0  # seconds for a save under way when another rank is lost: perhaps only its rename is left


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as it was saved. ``skipped`` says for each newer one why it was not loaded."""

    step: int
    tensors: dict[str, Any]
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run in a folder that all ranks see. Every method is called by all ranks together.

    Tensors are plain and whole on every rank, sharded tensors, or DTensors; any number of ranks can load what any other
    number saved, in any other layout. For a parameter that is not whole on an axis (``place_parameter``), the values of
    each place on that axis are saved, and a mesh with as many places can load them.

    ``keep`` is the number of newest good checkpoints that stay; those at multiples of ``keep_every`` steps stay, too.
    ``deadline`` is how many seconds a rank waits for the others and for its own writing; by default 600, or the world's
    if that is longer. ``lock`` is for :class:`Folder`. To ``cloud``, a URL of fsspec, each checkpoint is copied; a
    newer one there than in the folder is brought back before it is loaded.
    """

    def __init__(
        self,
        folder: Path | str,
        world: World | Mesh | None,
        keep: int = 3,
        *,
        keep_every: int = 0,
        deadline: float | None = None,
        lock: int | None = None,
        cloud: str | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"Checkpoints(keep={keep}): at least one has to be kept")
        self.folder, self.keep, self.keep_every = Path(folder), keep, keep_every
        self.completed: int | None = None  # the last step that this object saved, or loaded
        self._mesh = world if isinstance(world, Mesh) else None
        self._peers = Peers(world, deadline)
        self._files = Folder(self.folder, lock)
        self._cloud: CloudFolder | None = None  # on rank 0
        if cloud is not None:
            self._peers.on_first_rank(lambda: self._reach(cloud))
        self._damaged: set[int] = set()
        self._pending: tuple[int, Future[None]] | None = None
        self._late = False  # whether a wait for the pending save has timed out
        self._peers.on_first_rank(self._files.tidy)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            self._close(_LEAVING if isinstance(error, RankFailure) else self._peers.deadline)
        except HaloclineError:
            if error is None:  # else it would hide the error that ends the run
                raise

    # ---- saving ----

    def _reach(self, cloud: str) -> None:
        self._cloud = CloudFolder(cloud)

    def claim(self) -> None:
        """Keep other runs out of the folder from now on; the first save does it otherwise."""
        self._peers.on_first_rank(self._files.claim)

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Copy all tensors to host memory now, and write them while training goes on. Waits for the save before it.

        ``tensors`` and ``state`` are nested; both may hold tensors and plain values, and all come back as they were.
        Plain values are those of rank 0. Raises the error of the save before: that one is lost, and this one has not
        begun.
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
        """Block until the save under way is complete; raises, on every rank, if it failed."""
        self._wait(self._peers.deadline)

    def _wait(self, seconds: float) -> None:
        """Wait so long for the save under way, or not at all if an earlier wait has timed out."""
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
        """Raise, on all ranks, the error of the save under way. Called by all ranks once one of them ``failed``."""
        self._peers.agree(self.wait)
        raise CheckpointError("the last checkpoint was not saved, and no rank says why; look at the ranks' own output")

    def close(self) -> None:
        """Wait for the save under way, and release the folder and the process group."""
        self._close(self._peers.deadline)

    def _close(self, patience: float) -> None:
        """Wait so long for a save under way, then release folder and group. A writer that hangs keeps them."""
        if self._pending is not None and not self._pending[1].done() and not self._late:
            _log.info("step %d: waiting %g s at most for its checkpoint to be written", self._pending[0], patience)
        try:
            self._wait(patience)
        finally:
            if self._pending is None:  # else a writer that hangs still uses them
                self._files.release()
                self._peers.close()

    def _named(self, step: int, work: Callable[[], None]) -> None:
        """Run ``work``, and name the step in its error."""
        try:
            work()
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {error}") from error

    def _check_alike(self, signatures: list[tuple[int, str]]) -> None:
        """On rank 0: all ranks must save the same step and the same tensors."""
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
        """Write a checkpoint and give it its name. In the background thread of every rank.

        All ranks write tensors; rank 0 then writes state and manifest, renames the folder and removes old checkpoints.
        If anything fails, the part is removed and all ranks raise.
        """
        folder = self._files.part(step)

        def finish(files: dict[str, Facts]) -> None:
            state = json.dumps({"step": step, "tree": parts.tree}, allow_nan=False).encode()
            files = {**files, STATE: write(folder / STATE, state)}
            origin = {"format": FORMAT, "step": step, "ranks": self._peers.size, "torch": str(torch.__version__)}
            write_manifest(folder, {**origin, "files": files})
            self._files.publish(step)
            self._files.retain(step, self.keep, self._damaged - {step}, self.keep_every)
            if self._cloud is not None:
                self._cloud.upload(self._files, step)
                self._cloud.retain(self.keep, self.keep_every)

        try:
            write_tensors(folder, parts.tensors, self._peers, finish)
        except BaseException as error:
            if self._peers.is_first:
                self._files.discard(step)
            if isinstance(error, HaloclineError):
                raise
            raise CheckpointError(reason(error)) from error

    def _place(self, tensor: Tensor, name: str) -> str:
        """Which part of a tensor this rank holds, such as ``depth=1``; empty for all of it."""
        if placement_of(tensor) and self._mesh is None:
            raise CheckpointError(f"{name} is not whole on every rank; give Checkpoints the mesh, not its world")
        return "" if self._mesh is None else place_on(tensor, self._mesh)

    # ---- loading ----

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, good or not, the oldest first."""
        return self._peers.on_first_rank(self._files.steps)

    def load_latest(self, template: Mapping[str, Any] | None = None) -> Loaded | None:
        """The newest good checkpoint, or None where there is none at all; damaged ones are skipped with a warning.

        Tensors are new, in host memory; where the template has a DTensor or a sharded tensor, so are they. A tensor of
        the template must be in the checkpoint, with its shape and dtype. Other tensors, such as the state of an
        optimizer that has made no step, are loaded too.
        """
        self.wait()
        self._peers.on_first_rank(self._bring_newest)
        skipped: list[str] = []
        for step in reversed(steps := self.steps()):
            try:
                return self._load(step, template, skipped)
            except Mismatch:
                raise
            except CheckpointError as error:
                skipped.append(reason(error))
                self._damaged.add(step)
                if self._peers.is_first:
                    warnings.warn(f"checkpoint passed over: {skipped[-1]}", RuntimeWarning, stacklevel=2)
        if steps:
            told = "\n".join(f"  {words}" for words in skipped)
            raise CheckpointError(f"{self.folder}: no good checkpoint among {len(steps)}:\n{told}")
        return None

    def _bring_newest(self) -> None:
        """On rank 0: a newer checkpoint than those here, if the cloud has one."""
        if self._cloud is not None:
            self._files.claim()
            self._cloud.bring_newest(self._files)

    def load(self, step: int, template: Mapping[str, Any] | None = None) -> Loaded:
        """The checkpoint of that step, or CheckpointError. Verified and placed as in :meth:`load_latest`."""
        self.wait()
        steps = self.steps()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {there}")
        return self._load(step, template, [])

    def _load(self, step: int, template: Mapping[str, Any] | None, skipped: list[str]) -> Loaded:
        """Verify the files, a share on each rank, then read them."""
        folder = self._files.path(step)
        files: dict[str, Facts] = self._peers.on_first_rank(lambda: read_manifest(folder, step))["files"]
        own = share(files, self._peers.rank, self._peers.size)
        wrong = [words for each in self._peers.agree(lambda: problems(folder, own)) for words in each]
        if wrong:
            raise CheckpointError("; ".join(sorted(wrong)))
        read: list[dict[str, Any]] = []
        self._peers.agree(lambda: read.append(self._read(folder, files, template)))
        self.completed = step
        return Loaded(step, read[0]["tensors"], read[0]["state"], tuple(skipped))

    def _read(self, folder: Path, files: Mapping[str, Facts], template: Mapping[str, Any] | None) -> dict[str, Any]:
        """This rank's state from verified files. Sharded tensors are laid as those of the template are, by all ranks
        together; reading itself communicates with no other rank."""
        tree = json.loads((folder / STATE).read_bytes())["tree"]
        tree = located(tree, {} if self._mesh is None else self._mesh.coordinates)
        wanted = Parts({"tensors": template or {}}, uncopied, self._place)
        stored = Stored(folder, files)
        targets = stored.targets(leaves(tree), wanted.tensors)
        stored.read(targets, self._peers.is_first)
        for name, sharding in wanted.cut.items():
            targets[name] = from_dtensor(targets[name], sharding.mesh)  # type: ignore[arg-type]
        whole: dict[str, Any] = assembled(tree, targets)
        return whole


def _signature(parts: Parts) -> str:
    """A hash of what must be the same on every rank: names, shapes and dtypes."""
    return hashlib.blake2b("\n".join(parts.alike).encode(), digest_size=16).hexdigest()
