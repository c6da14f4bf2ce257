"""``halocline bench slurm``: trainings under a real Slurm on this machine, preempted and requeued."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, say, stderr, stdout
from halocline.cli.stopping import exit_on_sigterm

Limit = Annotated[float, typer.Option("--limit", min=1, help="Seconds that a job may take to its end.")]
Case = Annotated[str | None, typer.Option("--case", help="Only this one.")]


def slurm(limit: Limit = 180.0, case: Case = None, as_json: Json = False, debug: Debug = False) -> None:
    """Does a preempted job come back under a real Slurm, with the same curve?

    Starts munged, slurmctld and four slurmd on loopback ports of this machine, with their files in a temporary folder,
    and submits the script of `halocline launch --slurm` over two nodes. In mid-run the job gets SIGTERM, SIGUSR1, a
    time limit of two minutes, or `scontrol requeue`, or one of its nodes is set down. It must be requeued once, and end
    with the losses of a job that was left alone, to the bit. Takes minutes; needs Slurm's programs and munge, as in
    Debian's packages slurm-wlm and munge.

    **Examples**

    - `halocline bench slurm`: all cases.

    - `halocline bench slurm --case "node down" --json`

    **Exit status**: 0 all jobs came back, 1 some did not, 2 could not be run.
    """
    from ..slurm import CASES, SlurmCase, measure_slurm

    def tell(one: SlurmCase) -> None:
        say(stderr(), escape(f"{one.case}: {one.outcome}" + (f"; {one.detail}" if one.detail else "")))

    with clear_errors("bench slurm", debug), exit_on_sigterm():
        if case is not None and case not in CASES:
            raise typer.BadParameter(f"there are: {', '.join(CASES)}", param_hint="--case")
        result = measure_slurm([case] if case is not None else list(CASES), limit, tell)
    if as_json:
        print_json(result)
    else:
        columns = {"case": "case", "outcome": "outcome", "requeued": "requeued", "left": "left after, s",
                   "again": "next step after, s", "repeated": "steps repeated", "nodes": "nodes at last"}  # fmt: skip
        rows = [tuple("-" if each[key] is None else str(each[key]) for key in columns) for each in result["cases"]]
        stdout().print(number_table(f"jobs under {result['slurm']}", tuple(columns.values()), rows))
    raise typer.Exit(0 if result["recovered"] == result["jobs"] else 1)
