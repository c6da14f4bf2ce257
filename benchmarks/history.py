"""The history of benchmark figures, ``history.jsonl``: one line a run, and how a later run compares with it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from halocline.errors import HaloclineError, did_you_mean

HISTORY = Path(__file__).with_name("history.jsonl")
Number = int | float


@dataclass(frozen=True)
class BenchRun:
    """The scalar figures of one run, the targets of some of them, and where they come from."""

    date: str  # ISO
    commit: str
    bench: str
    machine: Mapping[str, Any]  # cores, torch, device
    command: str
    figures: Mapping[str, Number]
    targets: Mapping[str, Number]


def at_least(figure: str) -> bool:
    """Whether larger is better. Targets of all other figures are upper limits."""
    return "speedup" in figure or figure == "ranking"


def is_met(figure: str, value: Number, target: Number) -> bool:
    return value >= target if at_least(figure) else value <= target


def parse_result(text: str, source: str) -> dict[str, Any]:
    """The result in the last line of a bench's output with ``--json``; ``source`` names the text in errors."""
    try:
        result = json.loads(text.rstrip().rpartition("\n")[2])
    except ValueError as error:
        raise HaloclineError(f"{source}: the last line is not JSON; give what a bench prints with --json") from error
    if not isinstance(result, dict) or not _numbers(result):
        raise HaloclineError(f"{source}: the JSON has no figure at its top level; give what a bench prints with --json")
    return result


def _numbers(entries: Any) -> dict[str, Number]:
    """Entries that are numbers; some benches have a list of targets, which holds none."""
    named = entries.items() if isinstance(entries, Mapping) else ()
    return {
        name: value
        for name, value in named
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def machine_facts(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a result says of the machine; some benches say nothing."""
    machine = result.get("machine")
    return machine if isinstance(machine, Mapping) else {}


def make_run(result: Mapping[str, Any], bench: str, command: str, date: str, commit: str) -> BenchRun:
    """A line of the history from a result. A result that names no machine counts as measured on this one."""
    facts = machine_facts(result)
    machine = {
        "cores": facts.get("cores", os.cpu_count()),
        "torch": facts.get("torch", torch.__version__),
        "device": facts.get("device", facts.get("name", "cpu")),
    }
    figures = _numbers(result)
    targets = {name: target for name, target in _numbers(result.get("targets")).items() if name in figures}
    return BenchRun(date, commit, bench, machine, command, figures, targets)


def read_history(path: Path) -> list[BenchRun]:
    """All runs, the newest last; runs of one date in the order of their lines. No file is an empty history."""
    runs = []
    for number, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), 1):
        try:
            runs.append(BenchRun(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise HaloclineError(f"{path}, line {number}: not a run of the history ({error})") from error
    return sorted(runs, key=lambda run: run.date)


def append_run(path: Path, run: BenchRun) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run), allow_nan=False) + "\n")


def runs_of(bench: str, runs: Sequence[BenchRun]) -> list[BenchRun]:
    """The runs of one bench; raises where there is none."""
    chosen = [run for run in runs if run.bench == bench]
    if not chosen:
        hint = did_you_mean(bench, {run.bench for run in runs})
        raise HaloclineError(f"the history has no run of {bench!r}{hint}; `halocline bench history add` adds one")
    return chosen


def baseline(runs: Sequence[BenchRun], machine: Mapping[str, Any]) -> BenchRun:
    """The newest run on the same kind of machine; where there is none, the newest of all."""
    return next((run for run in reversed(runs) if run.machine == machine), runs[-1])


def compare_runs(before: BenchRun, now: BenchRun) -> list[dict[str, Any]]:
    """A row for each figure of either run, those with targets first. ``ratio`` is now over before."""
    if not before.figures.keys() & now.figures.keys():
        raise HaloclineError(f"nothing to compare: no figure of {before.bench!r} is in both runs")
    targets = {**before.targets, **now.targets}
    names = dict.fromkeys([*targets, *before.figures, *now.figures])
    return [_row(name, before.figures.get(name), now.figures.get(name), targets.get(name)) for name in names]


def _row(name: str, before: Number | None, now: Number | None, target: Number | None) -> dict[str, Any]:
    return {
        "figure": name,
        "before": before,
        "now": now,
        "ratio": now / before if before and now is not None else None,
        "target": target,
        "met": None if target is None or now is None else is_met(name, now, target),
    }


def worsened(rows: Iterable[Mapping[str, Any]], factor: float) -> list[str]:
    """Figures with a target that are worse than before by more than ``factor``, or that the new run lacks."""
    judged = [row for row in rows if row["target"] is not None and row["before"] is not None]
    return [row["figure"] for row in judged if row["now"] is None or _is_worse(row, factor)]


def _is_worse(row: Mapping[str, Any], factor: float) -> bool:
    change = row["now"] - row["before"]
    loss, share = (-change, 1 - 1 / factor) if at_least(row["figure"]) else (change, factor - 1)
    return bool(loss > share * abs(row["before"]))  # by difference, so that figures may be 0 or negative
