"""``halocline checkpoint``: look at the checkpoints of a run, verify them, and remove old ones."""

from __future__ import annotations

import datetime
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..errors import ConfigError
from ..train.checkpoints import CHECKPOINTS, Folder
from ..train.checkpoints.cloud import CloudFolder, is_url
from ..train.checkpoints.files import surplus
from ..train.checkpoints.inspect import CheckpointInfo, describe, verify_checkpoint
from .output import (
    Debug,
    Json,
    add_command,
    clear_errors,
    new_app,
    number_table,
    print_json,
    progress_bar,
    say,
    size_text,
    stderr,
)
from .output import stdout as console

DAMAGED = 1  # exit status of `verify` if a checkpoint is damaged

Run = Annotated[str, typer.Argument(help="Folder of a run, or of its checkpoints; or a URL such as s3://bucket/run.")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Only the checkpoint of this step.")]
Keep = Annotated[int, typer.Option("--keep", min=1, help="Good checkpoints that stay, the newest ones.")]
Every = Annotated[int, typer.Option("--keep-every", min=0, help="Also keep those at multiples of so many steps.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]

checkpoint = new_app(help="Look at the checkpoints of a run, verify them, and remove old ones.")


@checkpoint.callback()
def group() -> None:
    """Look at the checkpoints of a run, verify them, and remove old ones."""


def ls(run: Run, as_json: Json = False, debug: Debug = False) -> None:
    """List the checkpoints of a run: step, time, size, ranks. Reads the manifests alone; `verify` reads all files.

    **Exit status**: 0, or 2 if there is no such folder.
    """
    with clear_errors("checkpoint ls", debug):
        folder = _folder(run)
        found = [_described(folder, step) for step in folder.steps()]
    _show(folder, found, as_json)


def verify(run: Run, step: Step = None, as_json: Json = False, debug: Debug = False) -> None:
    """Read every file of the checkpoints and compare it with the checksum in the manifest.

    **Exit status**: 0 all are whole; 1 some are damaged, and each damaged file is named; 2 there is none to verify.
    """
    with clear_errors("checkpoint verify", debug):
        folder = _folder(run)
        steps = [each for each in folder.steps() if step in (None, each)]
        if not steps:
            raise ConfigError(f"{_place(folder)} has no checkpoint{'' if step is None else f' of step {step}'}")
        with progress_bar(shown=not as_json) as bar:
            found = [_verified(folder, each) for each in bar.track(steps, description="checkpoints")]
    _show(folder, found, as_json)
    if any(each.problems for each in found):
        raise typer.Exit(DAMAGED)


def prune(
    run: Run,
    keep: Keep = 3,
    every: Every = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove all but the newest good checkpoints. All are verified first: a damaged one does not count as kept.

    Damaged checkpoints are removed as well, unless no good one is left. A folder in which a run is writing is refused.

    **Exit status**: 0, or 2 if nothing could be done, with one line that says why.
    """
    with clear_errors("checkpoint prune", debug):
        folder = _folder(run)
        with ExitStack() as opened:
            if isinstance(folder, Folder):
                folder.claim()
                opened.callback(folder.release)
            found = [_verified(folder, step) for step in folder.steps()]
            damaged = [each.step for each in found if each.problems]
            if damaged and len(damaged) == len(found):
                raise ConfigError(
                    f"{_place(folder)}: no checkpoint is whole, so none is removed; see `checkpoint verify`"
                )
            gone = surplus([each.step for each in found], keep, damaged, every)
            if not dry_run:
                folder.remove(gone)
    result = {"removed": gone, "kept": [each.step for each in found if each.step not in gone], "dry_run": dry_run}
    if as_json:
        print_json(result)
    else:
        freed = sum(each.size for each in found if each.step in gone)
        verb = "would remove" if dry_run else "removed"
        say(console(), f"{verb} {len(gone)} of {len(found)} checkpoints, {size_text(freed)}")


for _command in (ls, verify, prune):  # as help lists them
    add_command(checkpoint, _command)


def _described(folder: Folder | CloudFolder, step: int) -> CheckpointInfo:
    return describe(folder, step) if isinstance(folder, Folder) else folder.describe(step)


def _verified(folder: Folder | CloudFolder, step: int) -> CheckpointInfo:
    return verify_checkpoint(folder, step) if isinstance(folder, Folder) else folder.verify(step)


def _place(folder: Folder | CloudFolder) -> str:
    return str(folder.root) if isinstance(folder, Folder) else folder.url


def _folder(place: str) -> Folder | CloudFolder:
    """The folder of checkpoints of a run, or the one that was given itself."""
    if is_url(place):
        return CloudFolder(place)
    run = Path(place)
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder; give that of a run")
    inner = run / CHECKPOINTS
    folder = Folder(inner if inner.is_dir() else run)
    if not inner.is_dir() and not folder.steps():
        raise ConfigError(f"{run} is neither the folder of a run nor one of checkpoints: it has no {CHECKPOINTS}/")
    return folder


def _show(folder: Folder | CloudFolder, found: list[CheckpointInfo], as_json: bool) -> None:
    """Print what was found as JSON or as a table, with a line for each problem."""
    if as_json:
        print_json({"folder": _place(folder), "checkpoints": [each.as_dict() for each in found]})
        return
    rows = [_row(each) for each in found]
    console().print(number_table("checkpoints", ("step", "written", "size", "files", "ranks", "torch", "state"), rows))
    if any(not (each.verified or each.problems) for each in found):
        say(console(), f"To compare checksums: halocline checkpoint verify {escape(_place(folder))}")
    for each in found:
        for problem in each.problems:
            say(stderr(), escape(problem))


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    """A line of the table."""
    written: Any = datetime.datetime.fromtimestamp(info.written).strftime("%Y-%m-%d %H:%M")
    state = "damaged" if info.problems else "whole" if info.verified else "not verified"
    ranks = "" if info.ranks is None else str(info.ranks)
    return str(info.step), written, size_text(info.size), str(info.files), ranks, escape(info.torch), state
