"""What a run writes down as it goes: a line of JSON a step, and TensorBoard's files where that is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG = "log.jsonl"


class RunLog:
    """Rank 0's. Lines are whole: a kill leaves at most the last one cut off, which reading passes over."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / LOG).open("a", buffering=1)
        self._board = _board(folder)

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        if self._board is not None and "step" in values:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(f"{kind}/{name}", value, values["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def read_log(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The entries in order. Of steps made again after a restart, the last counts."""
    entries: dict[tuple[Any, Any], dict[str, Any]] = {}
    for number, line in enumerate((folder / LOG).read_text().splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        key = (entry["kind"], entry["step"]) if "step" in entry else ("line", number)
        entries.pop(key, None)
        entries[key] = entry
    for entry in entries.values():
        if kind is None or entry["kind"] == kind:
            yield entry
