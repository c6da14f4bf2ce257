"""``halocline check --zoo``: a line for each network when it is done, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..testing.check import NetworkReport
from ..testing.zoo import ZooReport, check_zoo
from ..zoo import find_zoo
from .output import print_json, progress_bar, say, size_text, stderr, stdout

COLOURS = {"exact": "green", "wrong": "red"}  # of verdicts; yellow for others


def list_names(zoo: str) -> int:
    """Print the names of a zoo's networks; returns the exit status."""
    for name in find_zoo(zoo).names:
        stdout().print(name, markup=False)
    return 0


def check_all(zoo: str, only: Sequence[str], settings: Mapping[str, Any], as_json: bool, at_least: int = 0) -> int:
    """Check the networks of a zoo. The exit status is 1 if any is wrong, or fewer than ``at_least`` are right."""

    # A line for each network, so that progress shows where the output is a pipe.
    def done(count: str, name: str, result: NetworkReport) -> None:
        console.print(f"{count}, {name}: {result.verdict} ({result.seconds:.0f} s)", markup=False, soft_wrap=True)
        bar.advance(task)

    names = only or find_zoo(zoo).names
    with progress_bar() as bar:
        console, task = bar.console, bar.add_task("starting ranks", total=len(names))
        report = check_zoo(zoo, only=only, say=lambda words: bar.update(task, description=words), done=done, **settings)
    if as_json:
        print_json(report.as_json())
    else:
        show(report)
    # Gathered networks give the right answer, too.
    right = report.counts["exact"] + report.counts["gathered"]
    if right < at_least:
        say(stderr(), f"[red]{right} networks are exact or gathered, and {at_least} were to be[/red]")
    return 1 if report.counts["wrong"] or right < at_least else 0


def show(report: ZooReport) -> None:
    """Print a table of all networks, why some are not exact, and the counts."""
    console = stdout()
    title = f"{report.zoo}: {len(report.networks)} networks on {report.ranks} ranks ({cuts(report)})"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("network", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    shares = [one.cut_share for one in report.networks.values() if one.cut_share is not None]
    for column in ("output", "gradient", "memory", "gathered", *(["cut"] if shares else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in report.networks.items():
        table.add_row(escape(name), coloured(one.verdict), *figures(one))
    console.print(table)
    for name, one in report.networks.items():
        for text in reasons(one):
            say(console, f"{escape(name)}: {coloured(one.verdict)}: {escape(text)}")
    if shares:
        mean = sum(shares) / len(shares)
        say(console, f"at least {min(shares):.0%} of the parameters' bytes are cut, {mean:.0%} on average")
    say(console, ", ".join(f"{count} {coloured(verdict)}" for verdict, count in report.counts.items()))


def cuts(report: ZooReport) -> str:
    """The cuts in words: by default each network is cut along its first spatial dim."""
    shown = {", ".join(f"{axis}={size}" for axis, size in one.cut.items()): None for one in report.networks.values()}
    return " or ".join(shown)


def coloured(verdict: str) -> str:
    """A verdict with its colour."""
    colour = COLOURS.get(verdict, "yellow")
    return f"[{colour}]{verdict}[/{colour}]"


def figures(one: NetworkReport) -> list[str]:
    """The cells of a network: errors of output and worst gradient, a rank's peak of activations as a share of one
    rank's, bytes gathered, and the share of parameters that is cut."""
    if one.output_error is None or one.gradient_error is None:
        return []
    ratio = "" if one.activation_ratio is None else f"{one.activation_ratio:.2f}"
    gathered = size_text(one.gathered_bytes) if one.gathered_bytes else ""
    share = [] if one.cut_share is None else [f"{one.cut_share:.0%}"]
    return [f"{one.output_error:.0e}", f"{one.gradient_error:.0e}", ratio, gathered, *share]


def reasons(one: NetworkReport) -> list[str]:
    """Why a network is not exact, in words."""
    if one.verdict == "gathered":
        return [", ".join(f"{where} ({often})" for where, often in one.gathers.items())]
    if one.why:
        return [next(iter(one.why.splitlines()))]
    if one.verdict == "wrong":
        return [
            f"the output is {one.output_error:.0e} off, the gradient of {one.worst_parameter} {one.gradient_error:.0e}"
        ]
    return ["{operation} in {place}: {why}; {remedy}".format(**refusal) for refusal in one.refusals]
