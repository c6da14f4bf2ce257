"""Lists the files to stage: rank 0 walks over the source once and broadcasts the listing."""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...errors import HaloclineError

PREFIX = ".halocline-stage"  # of every name that staging leaves beside the data: never staged itself
_LONGEST = 1 << 31  # bytes of a listing: some ten million files

Tick = Callable[[], None]  # called now and then by long work, to show progress


class StageError(HaloclineError, OSError):
    """Files that could not be staged. Raised on every rank, with the same text, which names the node and the file."""


class File(NamedTuple):
    """A file of the source as the listing saw it; the path is relative, with slashes."""

    path: str
    size: int
    modified: int  # nanoseconds

    def __str__(self) -> str:
        return ascii(self.path)  # any name can be printed so


@dataclass(frozen=True)
class Listing:
    """The files in the order of their paths, and folders that hold nothing."""

    root: str
    files: tuple[File, ...]
    folders: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def encoded(self) -> bytes:
        """As bytes that another rank can decode."""
        # JSON's escapes carry names that are not UTF-8 too.
        return zlib.compress(json.dumps([self.root, self.files, self.folders]).encode(), 1)

    @staticmethod
    def decoded(told: bytes) -> Listing:
        """The listing that was encoded. StageError for anything else: a path in it must stay below its folder."""
        try:
            root, files, folders = json.loads(_decompressed(told))
            listing = Listing(str(root), tuple(_told(*file) for file in files), tuple(map(str, folders)))
        except (ValueError, TypeError, zlib.error, RecursionError) as error:
            raise StageError(f"the listing of the source did not arrive as rank 0 sent it: {error}") from error
        for path in (*(file.path for file in listing.files), *listing.folders):
            if not is_below(path):
                raise StageError(
                    f"the listing of the source names {path!a}, which lies outside of it; nothing is staged"
                )
        return listing


def is_below(path: str) -> bool:
    """Is it a relative path that stays below its folder, and no name of staging's own?

    >>> [is_below(path) for path in ("a/b.nc", "../evil.txt", "/etc/passwd", "a//b", "a/../../b", "")]
    [True, False, False, False, False, False]
    """
    parts = path.split("/")
    return not any(part in ("", ".", "..") or "\0" in part for part in parts) and not parts[0].startswith(PREFIX)


def _decompressed(told: bytes) -> bytes:
    """The listing's text; ValueError if it grows beyond what any listing has, or has an end missing."""
    stream = zlib.decompressobj()
    text = stream.decompress(told, _LONGEST)
    if not stream.eof:
        raise ValueError("it is too long, or not whole")
    return text


def _told(path: object, size: object, modified: object) -> File:
    """A file of a listing that came from another rank."""
    if not (isinstance(path, str) and type(size) is int and size >= 0 and type(modified) is int):
        raise ValueError(f"{path!a} is no file")
    return File(path, size, modified)


def list_source(source: Path, pattern: str, tick: Tick) -> Listing:
    """Walk over ``source``, a folder or a single file. Links are followed, as are those to folders."""
    root = source.absolute()
    if not root.exists():
        raise StageError(f"there is nothing at {source} to stage; give a file or folder that every node can read")
    if not root.is_dir():
        status = root.stat()
        return Listing(str(root.parent), (File(root.name, status.st_size, status.st_mtime_ns),), ())
    entries = sorted(_walk(str(root), "", (), matcher(pattern), tick))
    files = tuple(entry for entry in entries if entry.size >= 0)
    if not files:
        raise StageError(f"no file under {source} matches {pattern!r}; '**/*' takes all of them")
    return Listing(str(root), files, tuple(entry.path for entry in entries if entry.size < 0))


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...], wanted: Matcher, tick: Tick) -> Iterator[File]:
    """All files below ``folder``; a folder that holds nothing is one of size -1."""
    with os.scandir(folder) as scan:
        entries = [entry for entry in scan if not entry.name.startswith(PREFIX)]
    if not entries and prefix and wanted(prefix[:-1]):
        yield File(prefix[:-1], -1, 0)
    # By device and inode: a link may lead back to a folder above under another name.
    here = _identity(folder)
    if here in above:
        raise StageError(f"{folder!a} is a link to a folder above it; remove the link or exclude it by a pattern")
    for entry in entries:
        tick()
        path = prefix + entry.name
        if entry.is_dir():
            yield from _walk(entry.path, path + "/", (*above, here), wanted, tick)
        elif wanted(path):
            yield _file(entry, path)


def _file(entry: os.DirEntry[str], path: str) -> File:
    """One entry of a folder; raises for links to nowhere and for what is not a plain file."""
    try:
        status = entry.stat()
    except OSError as error:
        why = "a link to nowhere" if entry.is_symlink() else error.strerror
        raise StageError(f"{entry.path!a} cannot be staged: {why}; remove it or exclude it by a pattern") from error
    if not stat.S_ISREG(status.st_mode):
        raise StageError(f"{entry.path!a} is not a plain file (a pipe, a device); exclude it by a pattern")
    return File(path, status.st_size, status.st_mtime_ns)


def _identity(folder: str) -> tuple[int, int]:
    status = Path(folder).stat()
    return status.st_dev, status.st_ino


# ---- patterns ----

Matcher = Callable[[str], object]
_WILD = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])")
_MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def matcher(pattern: str) -> Matcher:
    """Does a relative path match? ``*`` stays within a folder, ``**`` goes through any number of them.

    >>> [bool(matcher("**/*.nc")(path)) for path in ("a.nc", "x/y/a.nc", "a.nc.old")]
    [True, True, False]
    """
    try:
        return re.compile("".join(map(_meaning, _WILD.split(pattern))), re.DOTALL).fullmatch
    except re.error as error:
        raise StageError(f"the pattern {pattern!r} is not valid: {error}") from error


def _meaning(part: str) -> str:
    """One part of a pattern as a regular expression."""
    if _WILD.fullmatch(part) and part.startswith("["):
        return part.replace("[!", "[^", 1)
    return _MEANING.get(part) or re.escape(part)
