"""``halocline doctor``: checks this machine and its ranks"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..doctor import DoctorReport, examine
from .output import Debug, Json, activity, clear_errors, print_json, say, stderr, stdout

#: How a status is shown.
MARK = {
    "ok": "[green]ok[/green]",
    "hint": "[cyan]hint[/cyan]",
    "warning": "[yellow]warning[/yellow]",
    "problem": "[red]problem[/red]",
}

Ranks = Annotated[int, typer.Option("--ranks", min=2, help="Number of ranks to start on this machine.")]
NoRanks = Annotated[bool, typer.Option("--no-ranks", help="Look at this machine only; start or join no ranks.")]
Deadline = Annotated[
    float,
    typer.Option("--deadline", min=1.0, help="Seconds that ranks may take for each stage."),
]


def doctor(
    ranks: Ranks = 2,
    no_ranks: NoRanks = False,
    deadline: Deadline = 60.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine and the links between ranks, and say how to solve each problem.

    The doctor looks at versions and packages, cores, memory and GPUs, system limits, network interfaces, the port where
    ranks meet, and the variables that torchrun or Slurm set. Then it starts ranks that exchange messages and sums,
    checks the results, and measures latency and bandwidth.

    **Examples**

    - `halocline doctor`: this machine, with two ranks.

    - `halocline doctor --no-ranks`: this machine, in a few seconds.

    - `torchrun --nproc-per-node 4 --no-python halocline doctor` or `srun halocline doctor`: checks the
      ranks of that run, on all its machines. Rank 0 prints, and names ranks that are missing or have other versions.

    - `GLOO_SOCKET_IFNAME=eth0 halocline doctor`: uses that interface. By default ranks started here use
      loopback, which shows the speed of this machine, not of its network.

    **Reading the result**: with a *problem* runs will fail; with a *warning* some may fail or be slow; a
    *hint* is for some ways to start ranks. Latency is half the median round trip of a small message, bandwidth that of
    messages of 8 MiB; both are those of the slowest pair.

    **Exit status**: 0 no problems (warnings are allowed); 1 problems; 2 the doctor cannot run as asked.
    """
    with clear_errors("doctor", debug), activity("looking") as tell:
        report = examine(ranks, not no_ranks, deadline, say=tell)
    if report.voice == "all" and as_json:
        print_json(report.as_json())
    elif report.voice == "all":
        show(report, stdout())
    elif report.voice == "problems":
        for one in (each for each in report.findings if each.status == "problem"):
            say(stderr(), escape(f"halocline doctor: {one.name}: {one.found}; {one.remedy}"))
    if report.stuck:  # an ordinary exit would wait for a transport that waits for ever
        sys.stdout.flush()
        os._exit(1)
    raise typer.Exit(1 if report.problems else 0)


def show(report: DoctorReport, console: Console) -> None:
    """Print a row for each finding, in the order of topics, and the verdict."""
    table = Table(title="What the doctor found", title_style="bold", title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", style="cyan")
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    # Topics in the order of the checks: findings of other ranks come last, but belong to their topics.
    for topic in dict.fromkeys(one.topic for one in report.findings):
        for number, one in enumerate(each for each in report.findings if each.topic == topic):
            remedy = f"\n[bold]do:[/bold] {escape(one.remedy)}" if one.remedy else ""
            table.add_row("" if number else topic, escape(one.name), MARK[one.status], escape(one.found) + remedy)
        table.add_section()
    console.print(table)
    problems = f"{report.problems} problem{'' if report.problems == 1 else 's'}"
    verdict = f"[red]{problems}[/red]" if report.problems else "[green]healthy[/green]"
    say(console, f"{verdict}, {report.warnings} warning{'' if report.warnings == 1 else 's'}")
