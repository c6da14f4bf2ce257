"""``halocline bench collectives``: the command, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from halocline.cli.output import Debug, Json, clear_errors, print_json, progress_console, say, stdout

COMMAND = "bench collectives"
MISSED = 1  # exit status where a target was
QUICK_ROUNDS = 3
ALL = "block,cyclic,rails,scatter,loopback"

Parts = Annotated[str, typer.Option("--parts", help="What is measured, with commas between.")]
Nodes = Annotated[int, typer.Option("--nodes", help="Nodes of the emulated cluster, two or more.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=1, help="In each, every way has its turn; 7, or 3 with --quick.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Two minutes: few rounds, sums of up to 16 MB.")]
Install = Annotated[bool, typer.Option("--install", help="Let apt-get install iproute2 if it is missing (as root).")]


def collectives(
    parts: Parts = ALL,
    nodes: Nodes = 4,
    rounds: Rounds = None,
    quick: Quick = False,
    install: Install = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Which way of summing over ranks is the fastest? torch's with gloo beside the library's own, by size.

    Nodes are network namespaces of this machine, joined by links of 1 Gbit/s. It takes root and iproute2, and some
    eight minutes; *loopback* alone takes neither.

    **Parts**

    - *block*, *cyclic*: two ranks on each node, numbered 0 0 1 1 or 0 1 0 1. A flat ring (gloo) sends everything
      over the links as often as ranks follow each other across nodes; *levels* sums inside nodes first, and each
      rank carries its share; in *leaders:k* the first k ranks of a node do.

    - *rails*: one rank and two cards of 500 Mbit/s a node. One sum of gloo's uses one card, the library's chunks both.

    - *scatter*: a reduce-scatter, of which torch with gloo makes a whole all-reduce.

    - *loopback*: 1 KB on this machine alone, as ranks agree on something: gloo, the library's own sockets, and MPI
      where mpi4py is installed.

    **Examples**

    - `sudo halocline bench collectives --quick`: everything, roughly.

    - `sudo halocline bench collectives --parts cyclic --rounds 11`: one part, more closely.

    - `halocline bench collectives --parts loopback`: without root.

    - `sudo halocline bench collectives --json | tail -1`: everything, the spread of the rounds too.

    **Reading it**: milliseconds are medians over rounds of the slowest rank; *speed-up* is over torch's. *auto* has
    tried the others when it was made, and should be close to the best of them.

    **Exit status**: 0 every target met, 1 one missed, 2 no root, no iproute2, or a part that is not there.
    """
    from .. import cluster
    from ..collectives import CollectivesPlan, measure_collectives

    progress = progress_console()
    with clear_errors(COMMAND, debug):
        if install:
            cluster.install()
        plan = CollectivesPlan(
            parts=tuple(part.strip() for part in parts.split(",") if part.strip()),
            nodes=nodes,
            rounds=rounds or (QUICK_ROUNDS if quick else CollectivesPlan.rounds),
            quick=quick,
        )
        result = measure_collectives(plan, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        show_collectives(result)
    if not all(target["met"] for target in result["targets"]):
        raise typer.Exit(MISSED)


def show_collectives(result: Mapping[str, Any]) -> None:
    stdout().print(case_table(result))
    for line in lines(result):
        say(stdout(), line)


def case_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="Milliseconds of a sum over ranks (medians)", title_style="bold", title_justify="left")
    for heading in ("part", "way"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "size", "ms", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in result["cases"]:
        cells = str(case["ranks"]), _size(case["bytes"]), milliseconds(case["seconds"]), f"{case['speedup']:.2f}"
        table.add_row(case["part"], case["way"], *cells)
    return table


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(1.2345), milliseconds(0.0001234)
    ('1234', '0.123')
    """
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


def _size(size: int) -> str:
    from ..collectives import size_words

    return size_words(size)


def lines(result: Mapping[str, Any]) -> Iterable[str]:
    from .app import disturbance

    for target in result["targets"]:
        met = "" if target["met"] else "  [red]missed[/red]"
        yield f"{target['name']}: {target['speedup']:.2f} times faster (aim: at least {target['least']:g}){met}"
    yield from disturbance(result)
