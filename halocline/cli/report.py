"""``halocline report``: the report of a run, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .output import Debug, Json, clear_errors, print_json, say, stdout

Run = Annotated[Path, typer.Argument(help="Folder of a run, as `halocline train` makes one.")]
Out = Annotated[Path | None, typer.Option("--out", help="File to write, in place of RUN/report.html.")]


def report(run: Run, out: Out = None, as_json: Json = False, debug: Debug = False) -> None:
    """Write a report of a run: RUN/report.html, a single file that opens in any browser and needs no network.

    It shows the loss and the validation metrics, predictions beside the truth, where the time of a step goes
    (computing; waiting for halos, gradients or data), the memory of each rank, how samples are cut over ranks, and all
    settings. Charts show their numbers under the pointer.

    It works for a run that is still going on or was interrupted: the end of the page lists the parts that have no data
    yet, and why. The report of an unchanged run is always the same, byte for byte.

    **Examples**

    - `halocline report runs/cosmoflow-1`: writes runs/cosmoflow-1/report.html and prints its path.

    - `halocline report runs/cosmoflow-1 --out cosmoflow.html`: a self-contained file to share.

    **Exit status**: 0 written; 2 not written, with one line that says why.
    """
    with clear_errors("report", debug):
        from ..train.reporting import write_report

        written = write_report(run, out)
    if as_json:
        print_json({"report": str(written.path), "bytes": written.bytes, "sections": written.sections})
        return
    say(stdout(), escape(str(written.path)))
