"""Both ends of a command that starts ranks on this machine: the command that asks, and the rank that answers."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import ConfigError, HaloclineError
from ..train.explain import explain
from ..train.launch import (
    LOGS,
    REQUEST,
    RESULT,
    WRONG_SETTINGS,
    LaunchError,
    LocalRanks,
    launched,
    this_rank,
    write_rank_error,
)
from .output import is_quiet
from .stopping import Stop


def started_by_launcher(ranks: int) -> bool:
    """Is this process a rank of torchrun, Slurm or MPI? Then ConfigError if ``--ranks`` asks for more."""
    if launched() and ranks > 1:
        raise ConfigError("--ranks is for ranks that this command starts; here a launcher did")
    return launched()


def rank_command(module: str, *arguments: str) -> list[str]:
    """The command that starts a rank, with ``--quiet`` if this command has it."""
    return [sys.executable, "-m", f"halocline.cli.{module}", *arguments, *(["--quiet"] if is_quiet() else [])]


def ask_ranks(module: str, request: Mapping[str, Any], ranks: int, folder: Path | None = None) -> dict[str, Any]:
    """Start ranks of a module, and return the result that rank 0 left in the folder, by default a temporary one.

    Raises LaunchError if a rank fails.
    """
    with ExitStack() as opened:
        place = folder or Path(opened.enter_context(TemporaryDirectory()))
        (place / REQUEST).write_text(json.dumps(request))
        stop = opened.enter_context(Stop())
        ending = stop.follow(lambda: LocalRanks(rank_command(module, str(place)), ranks, place))
        if ending is None:
            result: dict[str, Any] = json.loads((place / RESULT).read_text())
            return result
        if stop.asked:
            raise LaunchError("stopped on request before everything was written")
        # The file with a traceback goes with a temporary folder.
        raise LaunchError(str(ending) if folder else str(ending).partition(" (traceback in ")[0])


def work_as_rank(folder: Path, work: Callable[[], object]) -> None:
    """Do a rank's work. An error goes to the launcher as one line, by a file in the folder, and ends the process."""
    try:
        work()
    except Exception as error:  # the user's own code may raise anything
        if os.environ.get("HALOCLINE_DEBUG") == "1":
            raise
        write_rank_error(folder, this_rank(), _error_line(error, folder))
        raise SystemExit(WRONG_SETTINGS if isinstance(error, ConfigError) else 1) from None


def _error_line(error: Exception, folder: Path) -> str:
    """An error in one line. The traceback of an error in the user's own code goes to a file, which the line names."""
    if isinstance(error, (HaloclineError, OSError)):
        return explain(error)
    path = folder / LOGS / f"rank-{this_rank()}.traceback"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(traceback.format_exception(error)))
    return f"{explain(error)} (traceback in {path})"
