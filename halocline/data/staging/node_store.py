"""A node's own storage. A file appears under its name complete or not at all; a journal records its checksum.

Beside the data lie the journal ``.halocline-stage.jsonl``, with a line for each finished file, and, while staging runs,
the folder ``.halocline-stage`` with the files that are being written.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .listing import PREFIX, File, Listing, StageError, Tick

JOURNAL = f"{PREFIX}.jsonl"
PIECE = 4 << 20  # bytes read or written at once
FULL = (errno.ENOSPC, errno.EDQUOT)


class Damaged(OSError):
    """Bytes that are not those which were read from the source. Worth another attempt."""


class NodeStore:
    """The storage of one node. A lock on the journal makes sure that one staging at a time uses it."""

    def __init__(self, destination: Path, node: int) -> None:
        self.root = Path(str(destination).replace("{node}", str(node)))
        self.node, self.parts = node, self.root / PREFIX
        self.checksums: dict[str, int] = {}  # of files that lie here
        self._written: dict[str, tuple[int, int, int]] = {}  # size, time of change and checksum by the journal
        self._journal = -1
        self._lock, self._numbers = threading.Lock(), itertools.count()

    # ---- beginning and end ----

    def open(self) -> None:
        """Lock the folder, read the journal, and remove what a killed staging left."""
        self.root.mkdir(parents=True, exist_ok=True)
        journal = os.open(self.root / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._take(journal)
        except StageError:
            os.close(journal)
            raise
        self._journal = journal
        self._read_journal()
        # Remains of a killed staging: it has ended, since this process holds its lock.
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(exist_ok=True)

    def _take(self, journal: int) -> None:
        """Lock the journal, or raise where another staging holds it."""
        import fcntl

        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StageError(
                f"another run, or another node of this run that sees the same storage, is staging to {self.root}; "
                "wait for that run, or put {node} into the destination"
            ) from error
        except OSError:
            pass  # a file system without locks

    def _read_journal(self) -> None:
        """Sizes, times and checksums of files that earlier runs finished."""
        text = (self.root / JOURNAL).read_bytes()
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that a kill cut short
                entry = json.loads(line)
                self._written[entry["path"]] = (entry["size"], entry["modified"], entry["crc32"])
        if text and not text.endswith(b"\n"):
            os.write(self._journal, b"\n")

    def close(self) -> None:
        """Nothing but whole files and the journal stays. Where it was not opened, it is not ours."""
        if self._journal >= 0:
            shutil.rmtree(self.parts, ignore_errors=True)
            journal, self._journal = self._journal, -1
            os.close(journal)

    # ---- what is there ----

    def path(self, file: File) -> Path:
        """Where a file lies when it is complete."""
        return self.root / file.path

    def holdings(self, files: Sequence[File], verify: bool, threads: int, tick: Tick) -> NDArray[np.bool_]:
        """Which files lie here whole: of the right size, and not staged from another state of the source.

        ``verify`` reads them, and trusts only those that the journal vouches for; the others are removed.
        """

        def is_held(file: File) -> bool:
            tick()
            return self._is_held(file) and (not verify or self._is_intact(file, tick))

        if not verify:
            return np.fromiter(map(is_held, files), dtype=np.bool_, count=len(files))
        with ThreadPoolExecutor(threads) as pool:
            return np.fromiter(pool.map(is_held, files), dtype=np.bool_, count=len(files))

    def _is_held(self, file: File) -> bool:
        """Does the file lie here with the size and time that it had in the source? Its checksum is then known, too."""
        try:
            status = self.path(file).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        # A file that no journal knows was copied by other means: its size has to do.
        size, modified, crc = self._written.get(file.path, (file.size, file.modified, None))
        whole = stat.S_ISREG(status.st_mode) and status.st_size == file.size == size and modified == file.modified
        if whole and crc is not None:
            self.checksums[file.path] = crc
        return whole

    def _is_intact(self, file: File, tick: Tick) -> bool:
        """Does the file have the checksum in the journal? Removed where it does not."""
        if self.checksums.get(file.path) == checksum(self.path(file), tick):
            return True
        self.checksums.pop(file.path, None)
        self.path(file).unlink(missing_ok=True)
        return False

    def check_space(self, need: int) -> None:
        """Raise unless ``need`` more bytes fit."""
        has = free_bytes(self.root)
        if need > has:
            raise StageError(
                f"{self.root} needs {need:,} bytes and has {has:,} ({need / 1e9:.3f} and {has / 1e9:.3f} GB); "
                "make room, stage to another place, or take fewer files (count, pattern)"
            )

    # ---- what comes ----

    def make_folders(self, listing: Listing) -> None:
        """Make the folders of the source that hold nothing."""
        for folder in listing.folders:
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def part(self, file: File) -> PartialFile:
        """A new file to be written, under a temporary name."""
        return PartialFile(self, file, self.parts / f"{next(self._numbers)}.part")

    def put(self, part: Path, file: File, crc: int) -> None:
        """Under its name. The journal comes first, so that it vouches for all that is there, whenever we are killed."""
        line = {"path": file.path, "size": file.size, "modified": file.modified, "crc32": crc}
        with self._lock:
            os.write(self._journal, json.dumps(line).encode() + b"\n")
            self.checksums[file.path] = crc
        target = self.path(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)


class PartialFile:
    """A file that is being written, under a temporary name."""

    def __init__(self, store: NodeStore, file: File, path: Path) -> None:
        self.store, self.file, self.path = store, file, path
        self.crc = self.written = 0
        self._target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: memoryview) -> None:
        """Append bytes, and add them to the checksum."""
        write_all(self._target, data)
        self.crc = zlib.crc32(data, self.crc)
        self.written += data.nbytes

    def finish(self, crc: int) -> None:
        """Give it its name, if it is what was read from the source: that many bytes with that checksum."""
        if self.written != self.file.size:
            raise Damaged(f"{self.written:,} bytes arrived of {self.file.size:,}")
        if self.crc != crc:
            raise Damaged(f"its checksum is {self.crc:08x} here and was {crc:08x} when it was read")
        os.fsync(self._target)
        self._close()
        self.store.put(self.path, self.file, crc)

    def discard(self) -> None:
        """Close and remove it; does nothing once it is finished."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._target >= 0:
            target, self._target = self._target, -1
            os.close(target)


def write_all(target: int, data: memoryview) -> None:
    """Write to a file descriptor until nothing is left."""
    while data.nbytes:
        data = data[os.write(target, data) :]


def free_bytes(folder: Path) -> int:
    """Free bytes of the folder's file system."""
    return shutil.disk_usage(folder).free


def checksum(path: Path, tick: Tick) -> int:
    """CRC-32 of a file's content."""
    crc, room = 0, memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as source:
        while count := source.readinto(room):
            crc = zlib.crc32(room[:count], crc)
            tick()
    return crc
