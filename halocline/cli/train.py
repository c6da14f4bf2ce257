"""``halocline train``: trains a workload, or a network of your own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, HaloclineError
from ..train.elastic import TAKE_BACK, RankCount, for_ranks
from ..train.launch import launched, this_rank
from ..train.log import json_line, read_log
from ..train.signals import PREEMPTED
from ..world import this_rank_info
from ..world.launcher import rendezvous_of
from .attempts import on_this_machine
from .local_ranks import started_by_launcher
from .output import Debug, Json, clear_errors, fact_table, number_table, stdout
from .train_rank import run_rank

if TYPE_CHECKING:  # which needs pydantic; the other commands do without
    from ..train.settings import Settings

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET",
        help="A workload's name, a TOML file, or the folder of a run to resume; several share the ranks in turns.",
    ),
]
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
        "--least-ranks",
        min=1,
        help="Go on with fewer ranks, down to so many, if some are lost; with more when they are back.",
    ),
]
Slots = Annotated[
    Path | None,
    typer.Option(
        "--slots",
        help="For --least-ranks: a file with the number of ranks that there is room for now; read repeatedly.",
    ),
]
TakeBack = Annotated[
    float,
    typer.Option(
        "--take-back",
        min=0,
        help="For --least-ranks without --slots: seconds until ranks that were lost are tried again.",
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
Memory = Annotated[
    str | None,
    typer.Option("--memory", help="For several runs: what a rank may hold of all together, such as 8GiB."),
]
Turn = Annotated[int, typer.Option("--turn", min=1, help="For several runs: steps that each makes in its turn.")]
Trace = Annotated[bool, typer.Option("--trace", help="Write trace.json of a few steps, for ui.perfetto.dev.")]


def train(
    targets: Targets,
    changes: Set = None,
    ranks: Ranks = 1,
    out: Out = None,
    restarts: Restarts = 0,
    least: Least = None,
    slots: Slots = None,
    take_back: TakeBack = TAKE_BACK,
    full: Full = False,
    plan: PlanOption = None,
    machine: MachineOption = None,
    trace: Trace = False,
    trust: Trust = False,
    memory: Memory = None,
    turn: Turn = 10,
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

    - `halocline train run.toml --ranks 4 --restarts 20 --least-ranks 2 --slots room`: on two to four ranks, as many as
      the file `room` says at the time.

    - `halocline train a.toml b.toml --ranks 2 --memory 4GiB`: two runs on the same ranks, ten steps each in turn; what
      does not fit goes to a file meanwhile. Each has its own folder, and the numbers that it has alone.

    - `torchrun --nproc-per-node 8 -m halocline.cli train run.toml --out runs/a`: torchrun starts the ranks; or srun.

    **A network of your own**, in run.toml: `model = "package.module:factory"`, `loss = "package.module:function"`, and
    `data = "path.h5"` with datasets x and y, or `data.x = "images/"` and `data.y = "labels/"`. Everything else has a
    default; the page Settings of the documentation lists all, and so does the error of an unknown setting.

    **Exit status**: 0 trained, or stopped by Ctrl-C after a checkpoint; 75 asked to leave by SIGTERM or SIGUSR1, to go
    on when started again; 2 otherwise, with one line that says why.
    """
    with clear_errors("train", debug), ExitStack() as cleaning:
        if debug:  # for ranks that are started here
            os.environ["HALOCLINE_DEBUG"] = "1"
        told = [*(changes or []), *(["trace=true"] if trace else [])]
        told += [f"{key}={value}" for key, value in (("plan", plan), ("machine", machine)) if value is not None]
        if len(targets) > 1:
            chosen = [_settings(one, told, full, out and out / Path(one).stem, trust) for one in targets]
            _train_shared(chosen, ranks, bool(restarts or least or slots), memory, turn, as_json)
            return
        if memory is not None:
            raise ConfigError("--memory is what several runs share; for one run it is --set memory=SIZE")
        settings, folder = _settings(targets[0], told, full, out, trust)
        if out is None:
            cleaning.enter_context(_no_empty_run(folder))
        if launched():
            if ranks > 1 or restarts or slots is not None:
                raise ConfigError(
                    "--ranks, --restarts and --slots are for ranks that this command starts; here a launcher did"
                )
            if least is not None:
                settings = _for_these_ranks(settings, least)
            result = run_rank(settings, folder)
            if this_rank() != 0:
                _exit_if_preempted(result)
                return
        elif slots is not None and least is None:
            raise ConfigError("--slots: give --least-ranks, too, down to which the run goes on")
        elif least is not None and least > ranks:
            raise ConfigError(f"--least-ranks {least}: more than --ranks {ranks}")
        elif ranks == 1 and not restarts:  # no other process is needed
            result = run_rank(settings, folder)
        else:
            counts = RankCount(ranks, least or ranks, slots, take_back)
            result = on_this_machine(settings, folder, counts, restarts)
    _show(result, folder, as_json)
    _exit_if_preempted(result)


def _for_these_ranks(settings: Settings, least: int) -> Settings:
    """The settings for the ranks that a launcher has started: torchrun's elastic agents start now more, now fewer."""
    place = this_rank_info()
    if place is not None and 0 < place.size < least:
        raise ConfigError(f"--least-ranks {least}: the launcher has started {place.size}")
    if rendezvous_of(os.environ).served and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"--least-ranks {least}: torchrun's agents keep one store for all rounds, and ranks of a new round meet "
            "under the addresses of the last; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where you start torchrun"
        )
    return settings if place is None or not place.size else for_ranks(settings, place.size)


def _train_shared(
    runs: list[tuple[Settings, Path]],
    ranks: int,
    restarts: bool,
    memory: str | None,
    turn: int,
    as_json: bool,
) -> None:
    """Train several runs on the same ranks."""
    from .train_shared import run_shared, shared_on_this_machine, show_shared

    if restarts:
        raise ConfigError("--restarts, --least-ranks and --slots are for one run; start several again by their folders")
    here = started_by_launcher(ranks) or ranks == 1
    outcome = (run_shared if here else partial(shared_on_this_machine, ranks))(runs, memory, turn)
    if this_rank() == 0:
        show_shared(outcome, [folder for _, folder in runs], as_json)
    for result in outcome["runs"]:
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


@contextmanager
def _no_empty_run(folder: Path) -> Iterator[None]:
    """A new run that fails before it has read any data leaves no folder, so that the next one has its name."""
    from ..train.inputs import INPUT

    new = not folder.exists() and not launched()
    try:
        yield
    except HaloclineError:
        if new and folder.exists() and not (folder / INPUT).exists() and not list(folder.rglob("*.traceback")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_folder(name: str) -> Path:
    """``runs/NAME-1``, or the next number that is free. ConfigError for ranks of a launcher, which need one folder."""
    place = this_rank_info()
    if place is not None and place.size != 1:
        raise ConfigError("under torchrun, srun and mpiexec all ranks must write into one folder: give --out")
    number = 1  # two commands at once may choose the same: the lock on checkpoints then refuses one
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{number}"


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
    table = number_table("validation, by class", ("class", *names), texts=("class",), whole=True)
    for each in classes:
        values = (metrics.get(f"{name}/{each}") for name in names)
        table.add_row(escape(each), *("" if value is None else f"{value:.4g}" for value in values))
    return table
