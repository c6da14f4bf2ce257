"""``halocline train``: a workload, or a network of your own, trained from one command."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import HaloclineError
from ..train.config import CONFIG, load_settings, make_settings, read_settings, write_settings
from ..train.launch import LaunchError, LocalRanks, launched
from ..train.log import read_log
from ..train.settings import ConfigError, Settings
from .output import Debug, Json, clear_errors, fact_table, print_json, say, stderr, stdout
from .train_rank import RESULT, run_rank

Target = Annotated[str, typer.Argument(help="A workload's name, a TOML file, or the folder of a run to go on with.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="A setting, such as optimizer.lr=1e-3; may be repeated.")]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Processes to start on this machine; torchrun and srun have their own.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run. One that exists is gone on with.")]
Restarts = Annotated[
    int, typer.Option("--restarts", min=0, help="How often to start again when a rank dies, from the last checkpoint.")
]
Full = Annotated[
    bool, typer.Option("--full", help="The workload at the size of its paper, in place of the small default.")
]

Trace = Annotated[bool, typer.Option("--trace", help="Write trace.json of a few steps, for ui.perfetto.dev.")]


def train(
    target: Target,
    changes: Set = None,
    ranks: Ranks = 1,
    out: Out = None,
    restarts: Restarts = 0,
    full: Full = False,
    trace: Trace = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a workload, or a network of your own, on samples cut over ranks.

    The run's folder holds its settings (config.toml), a log (log.jsonl), checkpoints, and what came of it. Ctrl-C or
    SIGTERM writes a checkpoint and ends; the same command with `--out` and that folder goes on, on any number of ranks.

    **Examples**

    - `halocline train cosmoflow`: a small default that takes minutes on two cores.

    - `halocline train unet3d --ranks 4 --set mesh.D=2 --set mesh.H=2`: every sample cut over 2 x 2 processes.

    - `halocline train run.toml --set optimizer.lr=1e-3`: settings from a file, one of them changed.

    - `torchrun --nproc-per-node 8 -m halocline.cli train run.toml --out runs/a`: torchrun starts the ranks; or srun.

    **A network of your own**, in run.toml: `model = "package.module:factory"`, `loss = "package.module:function"`,
    `data = "path.h5"` with datasets x and y. Everything else has a default.

    **Exit status**: 0 trained, 2 not: with one line that says why.
    """
    with clear_errors("train", debug):
        if debug:
            os.environ["HALOCLINE_DEBUG"] = "1"
        told = [*(changes or []), *(["trace=true"] if trace else [])]
        settings, folder = _settings(target, told, full, out)
        if launched():
            result = run_rank(settings, folder)
            if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
                return
        elif ranks == 1 and not restarts:
            result = run_rank(settings, folder)
        else:
            result = on_this_machine(settings, folder, ranks, restarts)
    _show(result, folder, as_json)


def _settings(target: str, changes: list[str], full: bool, out: Path | None) -> tuple[Settings, Path]:
    from ..train.task import defaults_of

    if (Path(target) / CONFIG).exists():
        folder = out or Path(target)
        told = read_settings(Path(target)).as_dict()
        return make_settings(told, changes), folder
    if Path(target).suffix == ".toml":
        first = load_settings(Path(target), changes) if _needs_no_workload(Path(target)) else None
        name = Path(target).stem
        settings = first or load_settings(Path(target), changes, defaults_of(*_workload_of(Path(target), full)))
    else:
        name = target
        settings = make_settings({}, changes, defaults_of(target, "full" if full else "small"))
    return settings, out or _new_folder(name)


def _needs_no_workload(path: Path) -> bool:
    return _told(path).get("workload") is None


def _workload_of(path: Path, full: bool) -> tuple[str, str]:
    told = _told(path)
    return told["workload"], "full" if full else told.get("scale", "small")


def _told(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return {}  # said better by whoever reads it next


def _new_folder(name: str) -> Path:
    """``runs/NAME-1``, or the next number that is free. Ranks of a launcher must be told one folder."""
    if launched() and int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) > 1:
        raise ConfigError("under torchrun or srun all ranks must write into one folder: give --out")
    number = 1
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{number}"


def on_this_machine(settings: Settings, folder: Path, ranks: int, restarts: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(settings, folder / CONFIG)
    command = [sys.executable, "-m", "halocline.cli.train_rank", str(folder)]
    for attempt in range(restarts + 1):
        running = LocalRanks(command, ranks, folder)
        before = {number: signal.signal(number, lambda n, _: running.signal(signal.SIGTERM)) for number in _ENDINGS}  # noqa: B023
        try:
            ending = running.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if ending is None:
            return {**json.loads((folder / RESULT).read_text()), "restarts": attempt}
        words = f"rank {ending.rank}: {ending.words}"
        if attempt == restarts:
            raise LaunchError(words)
        say(stderr(), f"{words}; starting again from the last checkpoint")
    raise HaloclineError("unreachable")


_ENDINGS = (signal.SIGTERM, signal.SIGINT)


def _show(result: dict[str, Any], folder: Path, as_json: bool) -> None:
    losses = [entry["loss"] for entry in read_log(folder, "step")]
    if as_json:
        print_json({**result, "losses": losses})
        return
    facts = {"run": str(folder), "steps": f"{len(losses)}", "seconds": f"{result['seconds']:.1f}"}
    if losses:
        facts["loss, first and last"] = f"{losses[0]:.4g}, {losses[-1]:.4g}"
    facts |= {f"validation {name}": f"{value:.4g}" for name, value in result["metrics"].items()}
    stdout().print(fact_table("stopped, after a checkpoint" if result["stopped"] else "trained", facts))
