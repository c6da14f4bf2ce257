"""A run's folder as a report sees it: every part may be missing or damaged, and then says why.

Reports are also made of runs that were killed, so nothing here raises but for a folder that holds no run at all.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ...errors import HaloclineError
from ..config import CONFIG
from ..launch import RESULT
from ..log import LOG, read_log, with_numbers
from ..pictures import EXAMPLES, PROGRESS
from ..trace import TRACE

Array = NDArray[np.float64]
Entry = dict[str, Any]
_HUGE = 1e100  # such a loss counts as infinite: no chart could show it


class NoRun(HaloclineError, ValueError):
    """A folder holds no run. The text says what is missing, and how to make a run."""


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder as the report reads it; parts that are missing or damaged are empty.

    ``troubles`` says of each damaged part why it could not be read. Entries are those of the log.
    """

    name: str
    config: str = ""  # the text of config.toml
    settings: Entry = field(default_factory=dict)
    steps: list[Entry] = field(default_factory=list)
    validations: list[Entry] = field(default_factory=list)
    ranks: list[Entry] = field(default_factory=list)
    split: str = ""  # which samples were trained on and which held out
    choices: Entry = field(default_factory=dict)  # the fields of hc.Choices
    result: Entry | None = None
    examples: dict[str, Array] | None = None
    progress: dict[int, Array] = field(default_factory=dict)  # predicted slices of earlier validations, by step
    traced: bool = False
    plan: Entry | None = None  # the plan that the run follows, and its predictions
    troubles: dict[str, str] = field(default_factory=dict)  # parts that cannot be read, and why

    @property
    def subject(self) -> str:
        """What was trained."""
        return str(self.settings.get("workload") or self.settings.get("model") or self.name)

    def column(self, name: str) -> Array:
        """One quantity of every step; NaN where a step does not tell it."""
        return column(self.steps, name)

    @property
    def metrics(self) -> dict[str, float]:
        """Those that the run ended with, or the last that it measured."""
        metrics = (self.result or {}).get("metrics") or (self.validations[-1] if self.validations else {})
        return {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and "/" not in name and is_number(value)  # those by class have a table
        }


def is_number(value: object) -> bool:
    """A number (NaN and infinities too), not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def column(entries: list[Entry], name: str) -> Array:
    """One value of each entry; NaN where it is missing, infinite where it is absurdly large."""
    values = [entry.get(name) for entry in entries]
    numbers = np.array([value if is_number(value) else np.nan for value in values], dtype=np.float64)
    return np.where(np.abs(numbers) > _HUGE, np.inf, numbers)


def read_run(folder: Path) -> RecordedRun:
    """Read all that there is of a run. NoRun if there are neither settings nor a log."""
    if not (folder / CONFIG).is_file() and not (folder / LOG).is_file():
        there = "holds neither" if folder.is_dir() else "is no folder, and so has no"
        raise NoRun(f"{folder} {there} {CONFIG} nor {LOG}; give the folder of a run, as `halocline train` makes one")
    troubles: dict[str, str] = {}
    config, settings = _config(folder, troubles)
    entries = _entries(folder, troubles)
    return RecordedRun(
        folder.resolve().name,
        config,
        settings,
        _by_step(entries, "step"),
        _by_step(entries, "validation"),
        _ranks(entries),
        str(_last(entries, "data").get("text", "")),
        _choices(_last(entries, "choices").get("values")),
        _result(folder, troubles),
        _examples(folder, troubles),
        _progress(folder, {entry["step"] for entry in _by_step(entries, "validation")}),
        (folder / TRACE).is_file(),
        _last(entries, "plan") or None,
        troubles,
    )


def _config(folder: Path, troubles: dict[str, str]) -> tuple[str, Entry]:
    """The text of config.toml, and its settings."""
    try:
        text = (folder / CONFIG).read_text("utf-8", errors="replace")
    except OSError as error:
        troubles["settings"] = f"{CONFIG} cannot be read: {error.strerror}"
        return "", {}
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        troubles["settings"] = f"{CONFIG} is not valid TOML: {error}"
        return text, {}


def _entries(folder: Path, troubles: dict[str, str]) -> list[Entry]:
    """The entries of the log; empty if it cannot be read."""
    try:
        return list(read_log(folder))
    except FileNotFoundError:
        troubles["log"] = f"there is no {LOG}: no step was made"
    except (OSError, ValueError, KeyError, TypeError) as error:
        troubles["log"] = f"{LOG} cannot be read: {type(error).__name__}: {error}"
    return []


def _by_step(entries: list[Entry], kind: str) -> list[Entry]:
    """The entries of one kind that have a whole number as step, in the order of steps."""
    steps = [entry for entry in entries if entry.get("kind") == kind and type(entry.get("step")) is int]
    return sorted(steps, key=lambda entry: entry["step"])


def _ranks(entries: list[Entry]) -> list[Entry]:
    """The entries of ranks, without values of a wrong type."""
    kinds = {"coordinates": dict, "tile": dict, "shape": list}
    told = [entry for entry in entries if entry.get("kind") == "rank" and is_number(entry.get("rank"))]
    # A resumed run may have had another mesh before: ranks from the last rank 0 on count.
    first = max((index for index, entry in enumerate(told) if entry["rank"] == 0), default=0)
    return [
        {key: value for key, value in entry.items() if isinstance(value, kinds.get(key, object))}
        for entry in told[first:]
    ]


def _last(entries: list[Entry], kind: str) -> Entry:
    """The last entry of a kind; empty if there is none."""
    return next((entry for entry in reversed(entries) if entry.get("kind") == kind), {})


def _choices(values: object) -> Entry:
    """The values of ``hc.Choices``, if they have the right form."""
    return values if isinstance(values, dict) and isinstance(values.get("at", {}), dict) else {}


def _result(folder: Path, troubles: dict[str, str]) -> Entry | None:
    """The result that a finished run has written."""
    try:
        result = with_numbers(json.loads((folder / RESULT).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        troubles["result"] = f"{RESULT} cannot be read: {error}"
        return None
    return result if isinstance(result, dict) else None


def _examples(folder: Path, troubles: dict[str, str]) -> dict[str, Array] | None:
    """The arrays that the last validation has written."""
    try:
        with np.load(folder / EXAMPLES) as stored:
            return {name: np.asarray(stored[name], dtype=np.float64) for name in stored.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        troubles["examples"] = f"{EXAMPLES} cannot be read: {error}"
        return None


def _progress(folder: Path, steps: set[int]) -> dict[int, Array]:
    """Predictions of earlier validations that the log knows; what cannot be read is left out."""
    read: dict[int, Array] = {}
    for path in sorted((folder / PROGRESS).glob("*.npz")):
        if path.stem.isdigit() and int(path.stem) in steps:
            try:
                with np.load(path) as stored:
                    read[int(path.stem)] = np.asarray(stored["p"], dtype=np.float64)
            except (OSError, ValueError, EOFError, KeyError, BadZipFile):
                continue
    return read
