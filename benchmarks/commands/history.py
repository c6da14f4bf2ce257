"""``halocline bench history``: the commands, and their tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from halocline.cli.output import Debug, Json, add_command, clear_errors, new_app, number_table, print_json, say, stdout
from halocline.errors import HaloclineError, did_you_mean

from .. import history as records
from ..history import HISTORY, BenchRun

WORSE = 1  # exit status where --fail-above is exceeded
SHOWN = 3  # runs of one bench side by side; more do not fit into 80 columns

Result = Annotated[str, typer.Argument(metavar="RESULT", help="What a bench printed with --json; - for stdin.")]
Bench = Annotated[str, typer.Argument(metavar="NAME", help="A bench, such as overhead.")]
MaybeBench = Annotated[str | None, typer.Argument(metavar="NAME", help="A bench; without it, every run in a line.")]
Name = Annotated[str, typer.Option("--name", help="The bench that printed the result, such as overhead.")]
Command = Annotated[str, typer.Option("--command", help="The command that was run, with its options.")]
Date = Annotated[datetime | None, typer.Option("--date", formats=["%Y-%m-%d"], help="Day of the run. Default: today.")]
Commit = Annotated[
    str | None, typer.Option("--commit", help="Commit that was measured. Default: that of the checkout.")
]
FailAbove = Annotated[
    float | None, typer.Option("--fail-above", min=1.0, help="Exit with 1 if a figure with a target is worse by more.")
]
File = Annotated[
    Path | None, typer.Option("--file", help="The history. Default: benchmarks/history.jsonl.", dir_okay=False)
]

history = new_app(help="Keep figures of benchmarks in the repository, and compare a run with them.")


def add(
    result: Result,
    name: Name,
    command: Command,
    date: Date = None,
    commit: Commit = None,
    file: File = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Add a run to the history: the numbers at the top level of its JSON, and their targets.

    A result that names no machine counts as measured on this one. A run that other programs disturbed is refused.

    **Example**

    - `halocline bench overhead --json | halocline bench history add - --name overhead --command "halocline bench
    overhead --json"`
    """
    with clear_errors("bench history add", debug):
        _check_bench(name)
        measured = _read(result)
        if records.machine_facts(measured).get("disturbed"):
            raise HaloclineError("other programs disturbed this run; measure again on a quiet machine")
        day = (date or datetime.now()).date().isoformat()
        run = records.make_run(measured, name, command, day, commit or _checked_out())
        records.append_run(file or HISTORY, run)
    if as_json:
        print_json(asdict(run))
    else:
        say(stdout(), f"added {len(run.figures)} figures of {name} ({_words(run.machine)}) to {(file or HISTORY).name}")


def show(name: MaybeBench = None, file: File = None, as_json: Json = False, debug: Debug = False) -> None:
    """Show the runs of the history, or the figures of one bench's newest runs side by side."""
    with clear_errors("bench history show", debug):
        runs = records.read_history(file or HISTORY)
        chosen = runs if name is None else records.runs_of(name, runs)[-SHOWN:]
    if as_json:
        print_json({"runs": [asdict(run) for run in chosen]})
    elif name is None:
        rows = [[run.bench, run.date, run.commit, *_cells(run.machine), _met(run)] for run in chosen]
        headings = ("bench", "date", "commit", "cores", "torch", "device", "targets met")
        stdout().print(number_table("Measured runs", headings, rows))
    else:
        _show_bench(name, chosen)


def _show_bench(name: str, runs: Sequence[BenchRun]) -> None:
    targets = runs[-1].targets
    figures = dict.fromkeys(figure for run in reversed(runs) for figure in (*run.targets, *run.figures))
    rows = [
        [_spaced(figure), *(_number(run.figures.get(figure)) for run in runs), _target(figure, targets.get(figure))]
        for figure in figures
    ]
    heads = ["\n".join([run.date, run.commit, f"{run.machine['cores']} cores", run.machine["torch"]]) for run in runs]
    stdout().print(number_table(f"Figures of {name}", ["figure", *heads, "target"], rows))
    say(stdout(), f"newest run: {runs[-1].command}")


def compare(
    name: Bench,
    result: Result,
    fail_above: FailAbove = None,
    file: File = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a run with the newest one of the same bench in the history, on the same kind of machine if there is one.

    **Examples**

    - `halocline bench overhead --json | halocline bench history compare overhead -`: a table.

    - `halocline bench history compare overhead result.json --fail-above 1.2`: fail if a figure with a target is worse
    by more than a fifth, or missing.

    **Reading it**: *ratio* is now over before. Targets are upper limits (<=), or lower ones (>=) of speedups and of
    *ranking*. Only figures with a target are judged; the others may be settings or counts.

    **Exit status**: 0 compared, 1 worse than `--fail-above`, 2 nothing to compare, or with `--fail-above` no run on
    the same kind of machine.
    """
    with clear_errors("bench history compare", debug):
        _check_bench(name)
        measured = _read(result)
        now = records.make_run(measured, name, "", "", "")
        before = records.baseline(records.runs_of(name, records.read_history(file or HISTORY)), now.machine)
        same = before.machine == now.machine
        if fail_above and not same:
            raise HaloclineError(f"--fail-above: the history has no run of {name!r} on {_words(now.machine)}")
        rows = records.compare_runs(before, now)
        worse = records.worsened(rows, fail_above) if fail_above else []
    if as_json:
        facts = {"same_machine": same, "machine": now.machine, "before": asdict(before)}
        print_json({"bench": name, **facts, "figures": rows, "worse": worse})
    else:
        _show_comparison(rows, before)
        _remark(measured, before, now, worse)
    if worse:
        raise typer.Exit(WORSE)


def _show_comparison(rows: Sequence[Mapping[str, Any]], before: BenchRun) -> None:
    cells = [
        [
            _spaced(row["figure"]),
            *(_number(row[when]) for when in ("before", "now")),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            _target(row["figure"], row["target"]),
            {None: "", True: "yes", False: "no"}[row["met"]],
        ]
        for row in rows
    ]
    title = f"{before.bench}, compared with {before.commit} of {before.date}"
    stdout().print(number_table(title, ("figure", "before", "now", "ratio", "target", "met"), cells))


def _remark(measured: Mapping[str, Any], before: BenchRun, now: BenchRun, worse: Sequence[str]) -> None:
    say(stdout(), f"before: {before.command}")
    if before.machine != now.machine:
        kinds = f"before {_words(before.machine)}, now {_words(now.machine)}"
        say(stdout(), f"[yellow]another kind of machine[/yellow]: {kinds}; times say little")
    if records.machine_facts(measured).get("disturbed"):
        say(stdout(), "[yellow]disturbed[/yellow]: other programs used the cores; measure again on a quiet machine")
    if worse:
        say(stdout(), f"[red]worse[/red]: {', '.join(worse)}")


def _check_bench(name: str) -> None:
    from .app import bench

    known = {each.name for each in bench.registered_commands if each.name}
    if name not in known:
        raise HaloclineError(f"no bench {name!r}{did_you_mean(name, known)}; `halocline bench --help` lists them")


def _read(result: str) -> dict[str, Any]:
    if result == "-":
        return records.parse_result(sys.stdin.read(), "stdin")
    return records.parse_result(Path(result).read_text("utf-8", errors="replace"), result)


def _checked_out() -> str:
    """The commit of this checkout."""
    git = ["git", "-C", str(HISTORY.parent), "rev-parse", "--short=7", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise HaloclineError("git does not name the commit of this checkout; give --commit") from error


def _cells(machine: Mapping[str, Any]) -> list[str]:
    return [str(machine[fact]) for fact in ("cores", "torch", "device")]


def _words(machine: Mapping[str, Any]) -> str:
    return "{} cores, torch {}, {}".format(*_cells(machine))


def _met(run: BenchRun) -> str:
    met = [records.is_met(figure, run.figures[figure], target) for figure, target in run.targets.items()]
    return f"{sum(met)} of {len(met)}" if met else "-"


def _spaced(figure: str) -> str:
    return figure.replace("_", " ")  # wraps between words


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _target(figure: str, target: float | None) -> str:
    return "" if target is None else f"{'>=' if records.at_least(figure) else '<='} {_number(target)}"


for _command in (add, show, compare):
    add_command(history, _command)
