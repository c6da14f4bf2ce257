"""The log of a run: one line of JSON per entry, and TensorBoard's files where that is installed.

Every entry has a ``kind`` ("step", "validation", "rank", "note", ...) and the time. Reports and tests read it back with
:func:`read_log`.
"""

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
    """The log that rank 0 appends to. A kill cuts off at most the last line, which reading skips.

    ``no_board`` says why nothing is written for an installed TensorBoard; empty if it is. A resumed run appends to the
    same file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        cut_off = _ends_within_a_line(folder / LOG)
        self._file = (folder / LOG).open("a", buffering=1)
        if cut_off:
            self._file.write("\n")  # else the next entry would be lost with the one that was cut off
        self._board, self.no_board = _board(folder)

    def write(self, kind: str, **values: Any) -> None:
        """Append one entry with the time; numbers of entries that have a step go to TensorBoard too."""
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
    """Was the last line of a file cut off, by a kill or a full disk?"""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _board(folder: Path) -> tuple[Any, str]:
    """TensorBoard's writer and "", or None and the reason. Where it is not installed nobody has asked for it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        missing = error.name == "tensorboard"
        return None, "" if missing else f"nothing is written for TensorBoard: {error}; pip install tensorboard"
    except Exception as error:  # noqa: BLE001  its own imports fail in many ways, and none should end a run
        return None, f"nothing is written for TensorBoard: {error}; pip install tensorboard"
    return SummaryWriter(str(folder / "tensorboard")), ""


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a run after a kill, finds the old text or all of the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, "utf-8")
    part.replace(path)


def json_line(values: Mapping[str, Any]) -> str:
    """JSON in one line. NaN and infinities, which JSON lacks, become strings that ``float()`` reads.

    >>> json_line({"loss": float("nan"), "all": [1.0, float("-inf")]})
    '{"loss": "nan", "all": [1.0, "-inf"]}'
    """
    return json.dumps(_as_json(values), allow_nan=False)


def _as_json(value: Any) -> Any:
    """A value with NaN and infinities as strings, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value


def with_numbers(value: Any) -> Any:
    """Undo :func:`json_line`: strings for NaN and infinities become numbers again."""
    if isinstance(value, dict):
        return {key: with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_numbers(each) for each in value]
    return _NO_NUMBERS.get(value, value) if isinstance(value, str) else value


def read_log(folder: Path, kind: str | None = None) -> Iterator[Entry]:
    """The entries in order, of one kind or all. Where a run resumed from a checkpoint, entries of steps that it made
    again are left out. Lines that are no entries, after a kill or on a full disk, are skipped."""
    entries: dict[tuple[Any, Any], Entry] = {}
    last = -1
    for number, line in enumerate((folder / LOG).read_bytes().splitlines()):
        try:
            entry = with_numbers(json.loads(line))
        except ValueError:
            continue
        if not isinstance(entry, dict) or "kind" not in entry:
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


def _made_again(entry: Entry, step: int) -> bool:
    """Does an entry lie after ``step`` began, so that a resumed run makes it again? Validations precede their step."""
    made = entry.get("step")
    return isinstance(made, int) and (made >= step if entry["kind"] == "step" else made > step)
