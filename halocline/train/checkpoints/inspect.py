"""A checkpoint seen from outside a run: what it is, and whether every byte of it is what was written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .files import STATE, Folder, problems, read_manifest
from .peers import CheckpointError, reason
from .store import Stored
from .tree import leaves


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint. ``ranks`` and ``torch`` are those that wrote it; unknown if its manifest is damaged."""

    step: int
    path: str
    written: float  # seconds since 1970
    size: int  # bytes
    files: int
    ranks: int | None
    torch: str
    verified: bool  # whether all files were read
    problems: tuple[str, ...] = ()  # a text for each thing that is wrong

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def describe(folder: Folder, step: int) -> CheckpointInfo:
    """A checkpoint by its manifest; other files are not read."""
    path = folder.path(step)
    there = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    size, written = sum(file.stat().st_size for file in there), path.stat().st_mtime
    info = CheckpointInfo(step, str(path), written, size, len(there), None, "", verified=False)
    try:
        manifest = read_manifest(path, step)
    except CheckpointError as error:
        return replace(info, problems=(str(error),))
    return replace(info, ranks=manifest["ranks"], torch=str(manifest["torch"]))


def verify_checkpoint(folder: Folder, step: int) -> CheckpointInfo:
    """A checkpoint with every file read and compared, and its tables opened as a run would."""
    info = describe(folder, step)
    return info if info.problems else replace(info, verified=True, problems=tuple(_problems(folder.path(step), step)))


def _problems(path: Path, step: int) -> list[str]:
    """What is wrong with the files of a checkpoint whose manifest is sound."""
    files = read_manifest(path, step)["files"]
    found = problems(path, files)
    if found:
        return found
    try:
        Stored(path, files)
        leaves(json.loads((path / STATE).read_bytes())["tree"])
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"{path}: {reason(error)}"]
    return []
