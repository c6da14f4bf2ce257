"""The command line: one file for each command. Only this package uses typer and rich."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable

__all__ = ["main"]


def main() -> None:
    """Run ``halocline``. A rank of a launcher ends at once if it fails, so that other ranks do not wait for it."""
    # Else the interpreter looks for garbage in all of torch as it ends: most of a second, on a busy machine many.
    atexit.register(gc.freeze)
    try:
        from .app import app
    except ModuleNotFoundError as error:
        # Only the packages of the extra "cli" are reported; anything else missing is a bug.
        if error.name not in ("typer", "rich", "click", "pydantic", "annotated_types"):
            raise
        sys.exit(f"halocline: the commands need {error.name}; install them with: pip install 'halocline[cli]'")
    if _is_rank():
        from ..train.heartbeat import follow_launcher

        follow_launcher()
        end_at_once_on_failure(app)
    else:
        app()


def _is_rank() -> bool:
    """Did a launcher start this process as a rank? Not mpiexec: MPI ends on all ranks together, in its own way."""
    from ..errors import MeshError
    from ..world import this_rank_info

    try:
        place = this_rank_info()
    except MeshError:  # the command itself says what is wrong with the environment
        return False
    return place is not None and place.by != "MPI"


def end_at_once_on_failure(run: Callable[[], object]) -> None:
    """For a rank: a failure waits neither for threads nor for other ranks, which notice the end of the process."""
    try:
        run()
    except SystemExit as ending:
        if ending.code in (None, 0):
            raise
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  it ends the process, as it would have
        traceback.print_exc()
        status = 1
    else:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
