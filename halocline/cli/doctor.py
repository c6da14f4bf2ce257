"""``halocline doctor``: checks this machine and its ranks"""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..doctor import DoctorReport, Finding, examine
from .output import Debug, Json, clear_errors, print_json, say, stderr, stdout

MARK = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "problem": "[red]problem[/red]"}

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

    **Reading the result**: with a *problem* runs will fail; with a *warning* some may fail or be slow. Latency is half
    the median round trip of a small message, bandwidth that of messages of 8 MiB; both are those of the slowest pair.

    **Exit status**: 0 no problems (warnings are allowed); 1 problems; 2 the doctor cannot run as asked.
    """
    with clear_errors("doctor", debug), stderr().status("") as status:
        report = examine(ranks, not no_ranks, deadline, say=status.update)
    if report.voice == "all":
        tell(report, as_json)
    elif report.voice == "problems":
        complain(report)
    if report.stuck:  # no ordinary exit gets past a transport that waits without end
        sys.stdout.flush()
        os._exit(1)
    raise typer.Exit(1 if report.problems else 0)


def tell(report: DoctorReport, as_json: bool) -> None:
    if as_json:
        print_json(report.as_json())
    else:
        show(report, stdout())


def complain(report: DoctorReport) -> None:
    for one in report.findings:
        if one.status == "problem":
            say(stderr(), escape(f"halocline doctor: {one.name}: {one.found}; {one.remedy}"))


def show(report: DoctorReport, console: Console) -> None:
    table = Table(title="What the doctor found", title_style="bold", title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", style="cyan")
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    ordered = sorted(report.findings, key=lambda one: order(report, one))
    for topic, findings in groupby(ordered, key=lambda one: one.topic):
        for number, one in enumerate(findings):
            table.add_row("" if number else topic, escape(one.name), MARK[one.status], words(one))
        table.add_section()
    console.print(table)
    say(console, verdict(report))


def order(report: DoctorReport, finding: Finding) -> int:
    """Topics in the order they were looked at: other ranks' findings come last, but belong to their topics."""
    return [one.topic for one in report.findings].index(finding.topic)


def words(finding: Finding) -> str:
    return escape(finding.found) + (f"\n[bold]do:[/bold] {escape(finding.remedy)}" if finding.remedy else "")


def verdict(report: DoctorReport) -> str:
    warnings = f"{report.warnings} warning{'' if report.warnings == 1 else 's'}"
    if report.problems:
        return f"[red]{report.problems} problem{'' if report.problems == 1 else 's'}[/red], {warnings}"
    return f"[green]healthy[/green], {warnings}"
