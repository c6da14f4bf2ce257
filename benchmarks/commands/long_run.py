"""``halocline bench long-run``: does a rank grow over thousands of steps?"""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, progress_console, stdout
from halocline.cli.stopping import exit_on_sigterm

Steps = Annotated[int, typer.Option("--steps", min=20, help="Steps of each mode.")]
Mode = Annotated[str | None, typer.Option("--mode", help="Only this one.")]
Limit = Annotated[float, typer.Option("--limit", min=1, help="Seconds for each mode.")]


def long_run(
    steps: Steps = 10_000, mode: Mode = None, limit: Limit = 1800.0, as_json: Json = False, debug: Debug = False
) -> None:
    """Do memory, descriptors and threads of four ranks stay flat over 10,000 steps, in each mode?

    Modes: overlap, next-forward, lag, rings, halos (cut along width), MPI. A network of 25 weights, so that a step is
    all overhead. Numbers are compared after the first 1,000 steps; 8 MB of memory count as flat.

    **Examples**

    - `halocline bench long-run`: takes minutes.

    - `halocline bench long-run --mode lag --steps 2000 --json`

    **Exit status**: 0 flat, 1 something grew, 2 could not be run.
    """
    from ..long_run import MODES, measure_long_run

    there = [*MODES, "MPI"]
    with clear_errors("bench long-run", debug), exit_on_sigterm(), progress_console().status("training"):
        if mode is not None and mode not in there:
            raise typer.BadParameter(f"there are: {', '.join(there)}", param_hint="--mode")
        result = measure_long_run(there if mode is None else [mode], steps, limit)
    if as_json:
        print_json(result)
    else:
        rows = [
            (name, *(f"{each['growth'][key]:+.1f}" for key in ("megabytes", "descriptors", "threads")))
            for name, each in result["modes"].items()
        ]
        columns = ("mode", "MB", "descriptors", "threads")
        stdout().print(number_table(f"growth of the worst rank, {steps} steps", columns, rows))
    raise typer.Exit(0 if result["flat"] else 1)
