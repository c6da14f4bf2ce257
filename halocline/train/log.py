"""What a run writes down as it goes: a line of JSON a step, and TensorBoard's files where that is installed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LOG = "log.jsonl"
_NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
Entry = dict[str, Any]


class RunLog:
    """Rank 0's. Lines are whole: a kill leaves at most the last one cut off, which reading passes over."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        begun = _ends_within_a_line(folder / LOG)
        self._file = (folder / LOG).open("a", buffering=1)
        if begun:
            self._file.write("\n")  # or the next entry would be lost with the one that was cut off
        self._board, self.no_board = _board(folder)

    def write(self, kind: str, **values: Any) -> None:
        """Append one entry; numbers of steps go to TensorBoard too."""
        self._file.write(json_line({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        if self._board is not None and "step" in values:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(f"{kind}/{name}", value, values["step"])

    def close(self) -> None:
        """Close the file, and TensorBoard's."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _board(folder: Path) -> tuple[Any, str]:
    """TensorBoard's writer; or why there is none."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception as error:  # noqa: BLE001  its own imports fail in many ways, and none should end a run
        return None, f"nothing is written for TensorBoard: {error}; pip install tensorboard"
    return SummaryWriter(str(folder / "tensorboard")), ""


# -- JSON has no NaN and no infinities: they are written as strings that float() reads


def json_line(values: Mapping[str, Any]) -> str:
    """
    >>> json_line({"loss": float("nan"), "all": [1.0, float("-inf")]})
    '{"loss": "nan", "all": [1.0, "-inf"]}'
    """
    return json.dumps(_as_json(values), allow_nan=False)


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value


def with_numbers(value: Any) -> Any:
    """What :func:`json_line` wrote, with its numbers again."""
    if isinstance(value, dict):
        return {key: with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_numbers(each) for each in value]
    return _NO_NUMBERS.get(value, value) if isinstance(value, str) else value


def read_log(folder: Path, kind: str | None = None) -> Iterator[Entry]:
    """The entries in order. Where a run went back to a checkpoint, what it had made after that no longer counts."""
    entries: dict[tuple[Any, Any], Entry] = {}
    last = -1
    for number, line in enumerate((folder / LOG).read_bytes().splitlines()):
        entry = _entry(line)
        if entry is None:
            continue
        step = entry.get("step")
        if entry["kind"] == "step" and isinstance(step, int):
            if step <= last:
                entries = {key: each for key, each in entries.items() if not _made_again(each, step)}
            last = step
        key = (entry["kind"], step) if isinstance(step, int) else ("line", number)
        entries.pop(key, None)
        entries[key] = entry
    for entry in entries.values():
        if kind is None or entry["kind"] == kind:
            yield entry


def _entry(line: bytes) -> Entry | None:
    """None for a line that a kill or a full disk has damaged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    read: Entry | None = with_numbers(entry) if isinstance(entry, dict) and "kind" in entry else None
    return read


def _made_again(entry: Entry, step: int) -> bool:
    """Is this of a time after ``step`` was made? A validation at a step comes before that step."""
    made = entry.get("step")
    return isinstance(made, int) and (made >= step if entry["kind"] == "step" else made > step)
