"""``halocline bench copies``: what copies of the state in memory cost, and how soon a run is back from them."""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, progress_console, stdout
from halocline.cli.stopping import exit_on_sigterm

Every = Annotated[int, typer.Option("--every", min=2, help="Steps between copies.")]
Rounds = Annotated[int, typer.Option("--repeat", min=2, help="Blocks of steps with copies, and without.")]
Case = Annotated[str | None, typer.Option("--case", help="Only this one.")]
Limit = Annotated[float, typer.Option("--limit", min=1, help="Seconds for each case.")]


def copies(
    every: Every = 10,
    repeat: Rounds = 8,
    case: Case = None,
    limit: Limit = 600.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What do copies of the state in memory cost, and how soon is a run back when one of four nodes is lost?

    Each of four ranks stands for a node. Blocks of steps with and without copies alternate; then one node's memory is
    lost just before the next copy, a new node comes, and all ranks load what the others kept. Weights must come back
    bit for bit. Targets: copies cost less than 3 % of a step, coming back takes at most two steps, and no more steps
    are repeated than lie between copies.

    **Examples**

    - `halocline bench copies --json`

    - `halocline bench copies --case "cut weights" --every 5`

    **Exit status**: 0 targets met, 1 missed, 2 could not be run.
    """
    from ..copies import CASES, measure_copies

    with clear_errors("bench copies", debug), exit_on_sigterm(), progress_console().status("training"):
        if case is not None and case not in CASES:
            raise typer.BadParameter(f"there are: {', '.join(CASES)}", param_hint="--case")
        result = measure_copies(list(CASES) if case is None else [case], every, repeat, limit)
    if as_json:
        print_json(result)
    else:
        rows = [
            (
                name,
                f"{1000 * each['step']:.1f}",
                f"{100 * each['cost']:+.2f}",
                f"{1000 * each['restore']:.1f}",
                str(each["repeated"]),
                "yes" if each["same_bits"] else "no",
            )
            for name, each in result["cases"].items()
        ]
        columns = ("case", "step, ms", "cost, %", "coming back, ms", "steps repeated", "same bits")
        stdout().print(number_table(f"copies every {every} steps, four nodes", columns, rows))
    raise typer.Exit(0 if result["met"] else 1)
