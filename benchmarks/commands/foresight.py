"""``halocline bench foresight``: the command, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from halocline.cli.output import Debug, Json, clear_errors, print_json, progress_console, say, stdout

Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Turns; in each, every run has three steps.")]
Rates = Annotated[
    str, typer.Option("--rates", help="Links of the emulated cluster, such as 1gbit,300mbit; empty: no cluster.")
]
Seconds = Annotated[float, typer.Option("--seconds", min=10, help="At most so long for timing operations.")]
Install = Annotated[bool, typer.Option("--install", help="Let apt-get install iproute2 if it is missing (as root).")]

FIGURES = {
    "median_error": "step time, median error",
    "worst_error": "step time, worst error",
    "memory_error": "peak memory, median error",
    "ranking": "pairs of cuts ranked right",
}


def foresight(
    repeat: Repeat = 7,
    rates: Rates = "1gbit,300mbit",
    seconds: Seconds = 200.0,
    install: Install = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Are predictions right? Calibrates this machine, predicts runs that calibration has not seen, and runs them.

    Networks x sizes x cuts x ranks, on this machine and on two nodes of an emulated cluster with slow links (which
    takes root and iproute2). No operation of a judged run is timed by the calibration. Predicted are the seconds of a
    training step and the peak of memory, as `halocline plan` does it. It takes about fifteen minutes, in which nothing
    else may run.

    **Examples**

    - `sudo halocline bench foresight`: a table, the figures below it.

    - `halocline bench foresight --rates ''`: without the cluster.

    - `sudo halocline bench foresight --json | tail -1`: everything, spread and exposed communication too.

    **Reading it**: *error* is predicted over measured, less one. *spread* is the range of the turns over their median:
    no prediction can be better than that. Pairs of cuts of one network count as ranked if they differ by more than a
    tenth.
    """
    from .. import cluster
    from ..foresight import measure_foresight

    progress, speeds = progress_console(), [rate.strip() for rate in rates.split(",") if rate.strip()]
    with clear_errors("bench foresight", debug):
        if install and speeds:
            cluster.install()
        if speeds:
            cluster.check_possible()
        result = measure_foresight(repeat, speeds, seconds, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        show_foresight(result)


def show_foresight(result: Mapping[str, Any]) -> None:
    """A row a run, then the figures beside their targets."""
    from .app import disturbance

    table = Table(title="Step in ms, peak in MB", title_style="bold", title_justify="left")
    table.add_column("run", max_width=34)
    for heading in ("measured", "spread", "predicted", "error", "peak", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in result["cases"]:
        table.add_row(
            case["case"],
            f"{case['measured_s'] * 1e3:.0f}",
            f"{case['spread']:.0%}",
            f"{case['predicted_s'] * 1e3:.0f}",
            f"{case['error']:+.0%}",
            f"{case['measured_bytes'] / 1e6:.0f}",
            f"{case['memory_error']:+.0%}",
        )
    stdout().print(table)
    for key, words in FIGURES.items():
        value = result[key]
        say(stdout(), f"{words}: {'-' if value is None else f'{value:.2f}'} (aim: {result['targets'][key]:.2f})")
    for line in disturbance(result):
        say(stdout(), line)
