"""``halocline report``: what came of a run, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .output import Debug, Json, clear_errors, print_json, say, stdout

Run = Annotated[Path, typer.Argument(help="Folder of a run, as `halocline train` makes one.")]
Out = Annotated[Path | None, typer.Option("--out", help="File to write, in place of RUN/report.html.")]


def report(run: Run, out: Out = None, as_json: Json = False, debug: Debug = False) -> None:
    """Tell a run on one page: RUN/report.html, a single file that opens in any browser, without a network.

    It shows the loss and what validation measured, answers of the network beside the truth, where the time of a step
    goes (computing; waiting for halos, for gradients, for data), memory of each rank, how samples are cut over ranks,
    and all settings. Resting the pointer on a chart tells its numbers.

    A run that still goes on, or was interrupted, has a page too: parts that it has nothing for are named at its end,
    with the reason. Written again, the page of an unchanged run is the same to the byte.

    **Examples**

    - `halocline report runs/cosmoflow-1`: writes runs/cosmoflow-1/report.html, and prints where it is.

    - `halocline report runs/cosmoflow-1 --out cosmoflow.html`: to hand on; the file holds all it needs.

    **Exit status**: 0 written, 2 not: with one line that says why.
    """
    with clear_errors("report", debug):
        from ..train.reporting import write_report

        written = write_report(run, out)
    if as_json:
        print_json({"report": str(written.path), "bytes": written.bytes, "sections": written.sections})
        return
    say(stdout(), escape(str(written.path)))
