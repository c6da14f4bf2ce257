"""``halocline train``: trains a workload, or a network of your own."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, HaloclineError
from ..train.checkpoints import CHECKPOINTS, Folder
from ..train.launch import LaunchError, LocalRanks, launched, this_rank
from ..train.log import json_line, read_log, with_numbers
from ..train.signals import PREEMPTED
from ..world import this_rank_info
from .output import Debug, Json, clear_errors, fact_table, is_quiet, say, stderr, stdout
from .stopping import Stop
from .train_rank import RESULT, run_rank

if TYPE_CHECKING:  # which needs pydantic; the other commands do without
    from ..train.settings import Settings

Target = Annotated[str, typer.Argument(help="A workload's name, a TOML file, or the folder of a run to resume.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as optimizer.lr=1e-3; may be repeated."),
]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Processes to start on this machine (not under torchrun or srun).")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run. Resumes an existing run.")]
Restarts = Annotated[
    int, typer.Option("--restarts", min=0, help="Number of restarts from the last checkpoint when a rank dies.")
]
Least = Annotated[
    int | None,
    typer.Option(
        "--least-ranks", min=1, help="If a restart makes no progress, go on with one rank less, down to so many."
    ),
]
Full = Annotated[
    bool, typer.Option("--full", help="Use the size of the workload's paper instead of the small default.")
]

PlanOption = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="FILE|auto", help="Follow a plan of `halocline plan --out`, or make one at the start."
    ),
]
MachineOption = Annotated[
    str | None, typer.Option("--machine", help="For --plan: a shipped machine or a file; by default here.json.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="To resume a folder: execute the code it names, though another user made or changed it."
    ),
]
Trace = Annotated[bool, typer.Option("--trace", help="Write trace.json of a few steps, for ui.perfetto.dev.")]


def train(
    target: Target,
    changes: Set = None,
    ranks: Ranks = 1,
    out: Out = None,
    restarts: Restarts = 0,
    least: Least = None,
    full: Full = False,
    plan: PlanOption = None,
    machine: MachineOption = None,
    trace: Trace = False,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a workload, or a network of your own, on samples cut over ranks.

    The run's folder holds its settings (config.toml), a log (log.jsonl), checkpoints, and the result. Ctrl-C, SIGTERM
    and SIGUSR1 end the current step, write a checkpoint and exit; a second one ends the run at once. The same command
    with `--out` and that folder resumes, on any number of ranks.

    **Examples**

    - `halocline train cosmoflow`: a small default that takes minutes on two cores.

    - `halocline train unet3d --ranks 4 --set mesh.D=2 --set mesh.H=2`: every sample cut over 2 x 2 processes.

    - `halocline train unet3d --ranks 4 --plan auto`: the cut that is predicted to be fastest on this machine; the
      report shows predicted beside measured.

    - `halocline train run.toml --set optimizer.lr=1e-3`: settings from a file, one of them changed.

    - `torchrun --nproc-per-node 8 -m halocline.cli train run.toml --out runs/a`: torchrun starts the ranks; or srun.

    **A network of your own**, in run.toml: `model = "package.module:factory"`, `loss = "package.module:function"`, and
    `data = "path.h5"` with datasets x and y, or `data.x = "images/"` and `data.y = "labels/"`. Everything else has a
    default; docs/settings.md lists all settings.

    **Exit status**: 0 trained, or stopped by Ctrl-C after a checkpoint; 75 asked to leave by SIGTERM or SIGUSR1, to go
    on when started again; 2 otherwise, with one line that says why.
    """
    with clear_errors("train", debug):
        if debug:  # for ranks that are started here
            os.environ["HALOCLINE_DEBUG"] = "1"
        told = [*(changes or []), *(["trace=true"] if trace else [])]
        told += [f"{key}={value}" for key, value in (("plan", plan), ("machine", machine)) if value is not None]
        settings, folder = _settings(target, told, full, out, trust)
        if launched():
            if ranks > 1 or restarts or least is not None:
                raise ConfigError(
                    "--ranks, --restarts and --least-ranks are for ranks that this command starts; here a launcher did"
                )
            result = run_rank(settings, folder)
            if this_rank() != 0:
                _exit_if_preempted(result)
                return
        elif ranks == 1 and not restarts:  # no other process is needed
            result = run_rank(settings, folder)
        else:
            result = on_this_machine(settings, folder, ranks, restarts, least or ranks)
    _show(result, folder, as_json)
    _exit_if_preempted(result)


def _exit_if_preempted(result: Mapping[str, Any]) -> None:
    """Exit with the status on which a launcher starts the run again."""
    if result["preempted"]:
        raise typer.Exit(PREEMPTED)


def _settings(
    target: str, changes: list[str], full: bool, out: Path | None, trust: bool = False
) -> tuple[Settings, Path]:
    """The settings and the folder of a run, from a run's folder, a TOML file or a workload's name. Raises
    ConfigError."""
    # Imported here: settings need pydantic, which other commands do without.
    from ..train.config import CONFIG, load_settings, make_settings, read_toml, with_changes
    from ..train.task import defaults_of
    from ..workloads import WORKLOADS

    path = Path(target)
    if (path / CONFIG).exists():
        if full:
            raise ConfigError("--full: a resumed run keeps its size; leave --full out")
        from ..train.trust import check_trusted

        check_trusted(path, load_settings(path / CONFIG), trust)  # what the command line adds is the user's own
        return load_settings(path / CONFIG, changes), out or path
    # Say what the target is not, before it is taken for a workload's name.
    if path.suffix != ".toml" and target not in WORKLOADS:
        if path.exists():
            raise ConfigError(f"{target} is neither a TOML file nor the folder of a run: it has no {CONFIG}")
        if path.suffix or len(path.parts) > 1:  # else a workload's name, perhaps misspelt
            raise ConfigError(
                f"{target} is neither a workload ({', '.join(WORKLOADS)}) nor, seen from {Path.cwd()}, a TOML file or "
                "the folder of a run"
            )
    is_file = path.suffix == ".toml"
    told = read_toml(path) if is_file else {"workload": target}
    where = str(path) if is_file else "the settings"
    chosen = with_changes(told, changes)  # the file or a change may name a workload, and its scale
    defaults = {}
    if chosen.get("workload") is not None:
        changes = [*changes, "scale=full"] if full else changes
        defaults = defaults_of(chosen["workload"], "full" if full else chosen.get("scale", "small"))
    elif full:
        raise ConfigError(f"--full: {target} is not a workload, and only workloads have a full size")
    return make_settings(told, changes, defaults, where), out or _new_folder(path.stem)


def _new_folder(name: str) -> Path:
    """``runs/NAME-1``, or the next number that is free. ConfigError for ranks of a launcher, which need one folder."""
    place = this_rank_info()
    if place is not None and place.size != 1:
        raise ConfigError("under torchrun, srun and mpiexec all ranks must write into one folder: give --out")
    number = 1  # two commands at once may choose the same: the lock on checkpoints then refuses one
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{number}"


def on_this_machine(
    settings: Settings, folder: Path, ranks: int, restarts: int, least: int | None = None
) -> dict[str, Any]:
    """Train in processes that are started here, and restart them after a failure, at most ``restarts`` times.

    If a restart makes no progress, the next one has a rank less, down to ``least``.
    """
    from ..train.config import CONFIG, write_settings
    from ..train.trust import mark_run

    checkpoints = Folder(folder / CHECKPOINTS)
    checkpoints.claim()  # before any file of a run that may still be active in this folder is changed
    try:
        write_settings(settings, folder / CONFIG)
        mark_run(folder, settings)
        with Stop() as stop:
            return _attempts(settings, folder, range(least or ranks, ranks + 1), restarts, stop, checkpoints)
    finally:
        checkpoints.release()


def _attempts(
    settings: Settings, folder: Path, allowed: range, restarts: int, stop: Stop, checkpoints: Folder
) -> dict[str, Any]:
    """Start the ranks until they succeed; LaunchError if they fail too often, or would fail again.

    ``allowed`` are the numbers of ranks that may be started, of which the largest is.
    """
    command = [sys.executable, "-m", "halocline.cli.train_rank", str(folder), *(["--quiet"] if is_quiet() else [])]
    ranks = allowed[-1]
    for attempt in range(restarts + 1):
        before = checkpoints.steps()[-1:]
        starting = partial(LocalRanks, command, ranks, folder, settings.deadline, checkpoints.lock)
        ending = stop.follow(starting)
        if ending is None:
            result = with_numbers(json.loads((folder / RESULT).read_text()))
            return {**result, "preempted": result["stopped"] and stop.preempted, "restarts": attempt}
        words = f"rank {ending.rank}: {ending.words}"
        if stop.preempted:
            say(stderr(), f"stopped on request before the ranks could write a checkpoint ({escape(words)})")
            raise typer.Exit(PREEMPTED)
        if stop.asked:
            raise LaunchError(f"stopped on request before the ranks could write a checkpoint ({words})")
        if attempt == restarts or ending.is_final:  # wrong settings would fail again
            raise LaunchError(words)
        more = ""
        if attempt and checkpoints.steps()[-1:] == before and ranks - 1 in allowed:
            ranks -= 1
            settings = _for_ranks(settings, folder, ranks)
            more = f", on {ranks} rank{'s' if ranks > 1 else ''}, since a restart made no progress"
        say(stderr(), f"{escape(words)}; starting again from the last checkpoint{more}")
    raise HaloclineError("unreachable")  # for mypy: the last attempt returns or raises


def _for_ranks(settings: Settings, folder: Path, ranks: int) -> Settings:
    """The settings for another number of ranks: a mesh that does not fit is left to the default. Written for ranks."""
    from ..train.config import CONFIG, write_settings

    if settings.mesh and math.prod(settings.mesh.values()) != ranks:
        settings = replace(settings, mesh={})
    write_settings(settings, folder / CONFIG)
    return settings


def _show(result: dict[str, Any], folder: Path, as_json: bool) -> None:
    """Print the result as JSON or as tables."""
    losses = [entry["loss"] for entry in read_log(folder, "step")]
    if as_json:
        print(json_line({**result, "losses": losses}), flush=True)
        return
    facts = {"run": escape(str(folder)), "steps": str(result["steps"]), "seconds": f"{result['seconds']:.1f}"}
    if losses:
        facts["loss, first and last"] = f"{losses[0]:.4g}, {losses[-1]:.4g}"
    totals = {name: value for name, value in result["metrics"].items() if "/" not in name}
    facts |= {f"validation {name}": f"{value:.4g}" for name, value in totals.items()}
    stdout().print(fact_table("stopped, after a checkpoint" if result["stopped"] else "trained", facts))
    table = class_table(result["metrics"])
    if table is not None:
        stdout().print(table)


def class_table(metrics: Mapping[str, float]) -> Table | None:
    """A table of metrics by class, such as ``dice/liver``, a row for each class; None if there are none."""
    names = list(dict.fromkeys(key.partition("/")[0] for key in metrics if "/" in key))
    classes = list(dict.fromkeys(key.partition("/")[2] for key in metrics if "/" in key))
    if not classes:
        return None
    table = Table(title="validation, by class", title_justify="left", title_style="bold")
    table.add_column("class", style="cyan", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for each in classes:
        values = (metrics.get(f"{name}/{each}") for name in names)
        table.add_row(escape(each), *("" if value is None else f"{value:.4g}" for value in values))
    return table
