"""Shared by the tests of staging: a source whose opens are counted, and nodes as threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halocline.data.staging import StageError, StageReport, stage
from halocline.data.staging.listing import PREFIX
from halocline.testing import run_local

WATCHED: dict[str, list[str]] = {}  # by folder: files below it that were opened


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        for folder, opened in WATCHED.items():
            if arguments[0].startswith(folder + os.sep):
                opened.append(os.path.relpath(arguments[0], folder))


sys.addaudithook(_on_audit)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """Twelve files of several sizes, in nested folders."""
    root = tmp_path / "source"
    for number in range(12):
        put(root / f"part{number % 3}" / f"file{number:02d}.bin", os.urandom(1000 * number))
    WATCHED[str(root)] = []
    yield root
    del WATCHED[str(root)]


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def opened(source: Path) -> list[str]:
    """What was opened since this was asked last, in order."""
    found = sorted(WATCHED[str(source)])
    WATCHED[str(source)].clear()
    return found


def tree(root: Path) -> dict[str, bytes | None]:
    """Every file's bytes; None for an empty folder. What staging leaves for itself is left out."""
    found: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root, followlinks=True):
        for name in [name for name in files if not name.startswith(PREFIX)]:
            found[str(Path(folder, name).relative_to(root))] = Path(folder, name).read_bytes()
        if not files and not folders:
            found[os.path.relpath(folder, root)] = None
    return found


def run_nodes(nodes: int, source: Path, **options: Any) -> list[StageReport]:
    return run_local(nodes, lambda: stage(source, source.parent / "node{node}", **options))


def errors_of(nodes: int, source: Path, **options: Any) -> list[str]:
    """What every rank raised."""

    def failing() -> str:
        with pytest.raises(StageError) as caught:
            stage(source, source.parent / "node{node}", **options)
        return str(caught.value)

    return run_local(nodes, failing)


def destinations(source: Path, nodes: int) -> list[Path]:
    return [source.parent / f"node{node}" for node in range(nodes)]


def check_same(source: Path, nodes: int) -> None:
    expected = tree(source)
    for destination in destinations(source, nodes):
        assert tree(destination) == expected
        assert not (destination / PREFIX).exists()
    opened(source)
