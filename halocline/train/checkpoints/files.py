"""Checkpoints as folders: complete under their names, or absent, with a manifest of checksums of every file.

Beside ``step-00000120`` there may be ``.step-00000120.part`` (being written), ``.old`` (about to be replaced by the
same step) and ``.gone`` (being removed). The next run cleans up what a killed run left of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .peers import CheckpointError, reason

MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
FORMAT = 1
CHECKPOINTS = "checkpoints"  # name of the folder of all checkpoints in that of a run
_LOCK_PATIENCE = 10.0  # seconds: child processes of a killed run may hold its lock a little longer
STEP_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.(step-\d{8,})\.(part|old|gone)")

Facts = dict[str, Any]  # of one file: size and checksum


class Folder:
    """The folder of a run's checkpoints. Only rank 0 changes it, and only one run at a time, by a lock on the folder.

    ``lock`` is a file descriptor of the folder that this rank's launcher has locked, and shares with its ranks.
    """

    def __init__(self, root: Path, lock: int | None = None) -> None:
        self.root = root
        self._inherited = lock
        self._lock = -1
        self._unlock: weakref.finalize[Any, Any] | None = None

    @property
    def lock(self) -> int:
        """The locked descriptor, for processes that inherit it."""
        return self._lock

    def path(self, step: int) -> Path:
        """The folder of a finished checkpoint."""
        return self.root / f"step-{step:08d}"

    def part(self, step: int) -> Path:
        """The folder of a checkpoint that is being written."""
        return self._hidden(step, "part")

    def _hidden(self, step: int, kind: str) -> Path:
        """The name of a folder that is no finished checkpoint: "part", "old" or "gone"."""
        return self.root / f".step-{step:08d}.{kind}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, good or not, the oldest first."""
        names = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        return sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match)

    # ---- one run at a time ----

    def tidy(self) -> None:
        """Clean up after a killed run, unless a run is writing here now."""
        if (
            self._inherited is None
            and self._lock < 0
            and self.root.is_dir()
            and os.access(self.root, os.W_OK)
            and self._take(0.0)
        ):
            self._clear()
            self.release()

    def claim(self) -> None:
        """Lock the folder for this run until :meth:`release`; waits up to 10 s for another run to end."""
        if self._lock >= 0:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        if self._inherited is not None:
            self._lock = self._inherited
        elif not self._take(_LOCK_PATIENCE):
            raise CheckpointError(
                f"{self.root}: another run writes its checkpoints here, or another Checkpoints of this one; give each "
                "run its own folder, and close() what is no longer used"
            )
        self._clear()

    def _take(self, patience: float) -> bool:
        """Try to get the lock for ``patience`` seconds."""
        import fcntl

        lock, end = os.open(self.root, os.O_RDONLY), time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    os.close(lock)
                    return False
                time.sleep(0.05)
                continue
            except OSError:
                pass  # a file system without locks
            self._lock, self._unlock = lock, weakref.finalize(self, os.close, lock)
            return True

    def release(self) -> None:
        """Release the lock."""
        if self._unlock is not None:
            self._unlock()
        self._lock, self._unlock = -1, None

    def _clear(self) -> None:
        """Remove leftovers of a killed run, or restore what it was about to replace. With the lock held."""
        for entry in list(self.root.iterdir()):
            match = _LEFT_OVER.fullmatch(entry.name)
            if match and match[2] == "old" and not (self.root / match[1]).exists():
                entry.rename(self.root / match[1])  # killed between the two renames of a replacement
            elif match:
                shutil.rmtree(entry, ignore_errors=True)

    # ---- coming and going ----

    def begin(self, step: int, damaged: Collection[int]) -> None:
        """Make the folder for a new checkpoint. Raises if there is a later one that is not damaged."""
        self.claim()
        later = [other for other in self.steps() if other > step and other not in damaged]
        if later:
            raise CheckpointError(
                f"{self.root} holds {self.path(later[-1]).name}, later than step {step}, which is to be saved: the "
                "next start would resume from there; use another folder, or remove the later checkpoints"
            )
        if self.part(step).exists():  # of a killed run, where it could not be removed: the error says why
            shutil.rmtree(self.part(step))
        self.part(step).mkdir()

    def publish(self, step: int) -> None:
        """Rename the finished part to its final name, after its files are on storage.

        An old checkpoint of the same step is moved aside first and removed last, so that a kill at any moment leaves
        one of the two.
        """
        sync(self.part(step))
        old = self._hidden(step, "old")
        if self.path(step).exists():
            shutil.rmtree(old, ignore_errors=True)
            self.path(step).rename(old)
        self.part(step).rename(self.path(step))
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.part(step), ignore_errors=True)

    def retain(self, step: int, keep: int, damaged: Collection[int], every: int = 0) -> None:
        """Remove the :meth:`surplus` among the checkpoints up to ``step``."""
        self.remove([other for other in self.surplus(keep, damaged, every, step) if other != step])

    def surplus(self, keep: int, damaged: Collection[int], every: int = 0, upto: int | None = None) -> list[int]:
        """The steps up to ``upto`` whose checkpoints need not stay: all but the ``keep`` newest good ones, and good
        ones at multiples of ``every`` steps."""
        return surplus([step for step in self.steps() if upto is None or step <= upto], keep, damaged, every)

    def remove(self, steps: Collection[int]) -> None:
        """Remove the checkpoints of these steps, as far as possible."""
        for step in steps:
            with suppress(OSError):  # one checkpoint too many does no harm
                gone = self._hidden(step, "gone")
                self.path(step).rename(gone)  # first, so that a kill leaves no half checkpoint under its name
                shutil.rmtree(gone, ignore_errors=True)


def surplus(steps: Sequence[int], keep: int, damaged: Collection[int], every: int = 0) -> list[int]:
    """Those of some steps, the oldest first, whose checkpoints need not stay."""
    good = [step for step in steps if step not in damaged]
    kept = {*good[-keep:], *(step for step in good if every and step % every == 0)}
    return [step for step in steps if step not in kept]


# ---- files and their checksums ----


def sync(path: Path) -> None:
    """Force a file or folder to storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, data: bytes) -> Facts:
    """Write a file to storage; returns its size and checksum."""
    with path.open("wb") as target:
        target.write(data)
    return facts(path, durable=True)


def facts(path: Path, durable: bool = False) -> Facts:
    """Size and checksum of a file as it is now; ``durable`` forces it to storage first."""
    if durable:
        sync(path)
    with path.open("rb", buffering=0) as source:
        return {"size": os.fstat(source.fileno()).st_size, "blake2b": hashlib.file_digest(source, _hash).hexdigest()}


def _hash() -> Any:
    return hashlib.blake2b(digest_size=32)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, which makes the checkpoint valid."""
    write(folder / MANIFEST, _manifest(content))


def _manifest(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest, which includes its own checksum. The same content gives the same bytes."""
    own = _hash()
    own.update(json.dumps(content, sort_keys=True).encode())
    return json.dumps({"content": content, "blake2b": own.hexdigest()}, sort_keys=True, indent=1).encode()


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The content of a manifest. CheckpointError if it is damaged, or not that of a checkpoint of ``step``."""
    where = f"{folder}, {MANIFEST}"
    try:
        data = (folder / MANIFEST).read_bytes()
        content: dict[str, Any] = json.loads(data)["content"]
        whole = _manifest(content) == data
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: damaged, it cannot be read") from error
    if not whole:
        raise CheckpointError(f"{where}: damaged, it does not have its own checksum")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where}: format {content.get('format')}, and this version reads format {FORMAT}")
    if content.get("step") != step:
        raise CheckpointError(f"{where}: it is that of step {content.get('step')}, under another name")
    if not {STATE, METADATA} <= set(content["files"]) or any(Path(name).name != name for name in content["files"]):
        raise CheckpointError(f"{where}: it does not name the files of a checkpoint")
    return content


def problems(folder: Path, files: Mapping[str, Facts]) -> list[str]:
    """What is wrong with these files, a text each; empty where all have their size and checksum."""
    return [f"{folder}, {name}: {words}" for name, told in files.items() if (words := _problem(folder / name, told))]


def _problem(path: Path, told: Facts) -> str:
    """What is wrong with one file, or ""."""
    try:
        size = path.stat().st_size
        if size != told["size"]:
            return f"damaged, it has {size:,} bytes instead of {told['size']:,}"
        return "" if facts(path) == told else "damaged, its checksum is not that of the manifest"
    except OSError as error:
        return reason(error) if error.filename is None else f"{error.strerror}"


def share(files: Mapping[str, Facts], rank: int, ranks: int) -> dict[str, Facts]:
    """The files that this rank verifies: about as many bytes as any other rank."""
    loads, mine = [0] * ranks, {}
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["size"] + 1
        if least == rank:
            mine[name] = files[name]
    return mine
