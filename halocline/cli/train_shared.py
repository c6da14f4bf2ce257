"""Several runs on the same ranks: ``halocline train A.toml B.toml``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from ..sizes import bytes_from, size_text
from ..train.checkpoints import CHECKPOINTS, Folder
from ..train.elastic import check_ranks
from ..train.heartbeat import follow_launcher
from ..train.launch import RESULT, LaunchError, LocalRanks, this_rank
from ..train.log import json_line, read_log, with_numbers, write_whole
from ..train.signals import PREEMPTED
from . import end_at_once_on_failure
from .local_ranks import rank_command, work_as_rank
from .output import fact_table, number_table, progress_console, say, set_quiet, stderr, stdout
from .stopping import Stop
from .train_rank import progress_line, step_facts

if TYPE_CHECKING:  # which needs pydantic; the other commands do without
    from ..train.settings import Settings

SHARED = "shared.json"  # in the first run's folder: the outcome of all runs
Runs = list[tuple["Settings", Path]]


def run_shared(runs: Runs, memory: str | None, turn: int) -> dict[str, Any]:
    """This process's part in all runs."""
    from ..train.sharing import train_together

    limit = None if memory is None else bytes_from("--memory", memory)
    first = this_rank() == 0
    told = [(settings, folder, _teller(settings, folder) if first else _silent) for settings, folder in runs]
    shared = train_together(told, limit, turn)
    outcomes = [
        {"run": str(folder), "steps": one.steps, "metrics": one.metrics, "stopped": one.stopped,
         "preempted": one.preempted, "seconds": seconds}
        for (_, folder), one, seconds in zip(runs, shared.results, shared.own_seconds, strict=True)
    ]  # fmt: skip
    if first:
        for (_, folder), outcome in zip(runs, outcomes, strict=True):
            write_whole(folder / RESULT, json_line(outcome))
    return {
        "runs": outcomes,
        "makespan": shared.seconds,
        "one_after_another": sum(shared.own_seconds),
        "switching": shared.switching,
        "spilled_bytes": shared.spilled,
        "most_kept_bytes": shared.most_kept,
        "limit": limit,
    }


def _silent(kind: str, values: dict[str, Any]) -> None:
    """For ranks other than the first."""


def _teller(settings: Settings, folder: Path) -> Callable[[str, dict[str, Any]], None]:
    """Lines that begin with the run's name: two bars in turns would be unreadable."""
    console, every = progress_console(), max(1, settings.steps // 20)

    def tell(kind: str, values: dict[str, Any]) -> None:
        if kind == "step" and values["step"] % every:
            return
        text = f"step {values['step']}: {step_facts(values)}" if kind == "step" else progress_line(kind, values)
        console.print(f"{folder.name}: {text}", soft_wrap=True, markup=False)

    return tell


def shared_on_this_machine(ranks: int, runs: Runs, memory: str | None, turn: int) -> dict[str, Any]:
    """Train in processes that are started here."""
    from ..train.config import CONFIG, write_settings
    from ..train.own import check_paths
    from ..train.trust import mark_run

    for settings, _ in runs:
        check_ranks(settings, ranks)
        check_paths(settings)
    for settings, folder in runs:
        checkpoints = Folder(folder / CHECKPOINTS)
        checkpoints.claim()  # before any file of a run that may still be active in this folder is changed
        try:
            write_settings(settings, folder / CONFIG)
            mark_run(folder, settings)
        finally:
            checkpoints.release()
    told = {"folders": [str(folder) for _, folder in runs], "memory": memory, "turn": turn}
    command = rank_command("train_shared", json.dumps(told))
    settings, folder = runs[0]
    with Stop() as stop:
        ending = stop.follow(lambda: LocalRanks(command, ranks, folder, settings.deadline))
    if ending is None:
        outcome = with_numbers(json.loads((folder / SHARED).read_text()))
        for result in outcome["runs"]:
            result["preempted"] = result["stopped"] and stop.preempted
        return outcome
    words = str(ending)
    if stop.preempted:
        say(stderr(), f"stopped on request before the ranks could write a checkpoint ({escape(words)})")
        raise typer.Exit(PREEMPTED)
    raise LaunchError(words)


def show_shared(outcome: dict[str, Any], folders: list[Path], as_json: bool) -> None:
    """Print the outcome of the runs and the makespan, as JSON or as tables."""
    if as_json:
        losses = [[entry["loss"] for entry in read_log(folder, "step")] for folder in folders]
        runs = [{**one, "losses": each} for one, each in zip(outcome["runs"], losses, strict=True)]
        print(json_line({**outcome, "runs": runs}), flush=True)
        return
    rows = []
    for one, folder in zip(outcome["runs"], folders, strict=True):
        found = [entry["loss"] for entry in read_log(folder, "step")]
        curve = f"{found[0]:.4g}, {found[-1]:.4g}" if found else "-"
        state = "stopped" if one["stopped"] else "trained"
        rows.append([str(folder), state, str(one["steps"]), curve, f"{one['seconds']:.1f}"])
    stdout().print(number_table("runs", ("run", "", "steps", "loss, first and last", "own seconds"), rows))
    facts = {"makespan, s": f"{outcome['makespan']:.1f}",
             "one after another, s": f"{outcome['one_after_another']:.1f}",
             "of the makespan for changing runs, s": f"{outcome['switching']:.1f}",
             "put out to files, rank 0": size_text(outcome["spilled_bytes"]),
             "state kept at once, rank 0": size_text(outcome["most_kept_bytes"])}  # fmt: skip
    stdout().print(fact_table("together", facts))


def main() -> None:
    """``python -m halocline.cli.train_shared ARGUMENTS``, for the processes that ``halocline train`` starts."""
    from ..train.config import read_settings

    told = json.loads(sys.argv[1])
    folders = [Path(one) for one in told["folders"]]
    follow_launcher()
    set_quiet("--quiet" in sys.argv)

    def work() -> None:
        outcome = run_shared([(read_settings(one), one) for one in folders], told["memory"], told["turn"])
        if this_rank() == 0:
            write_whole(folders[0] / SHARED, json_line(outcome))

    work_as_rank(folders[0], work)


if __name__ == "__main__":
    end_at_once_on_failure(main)
