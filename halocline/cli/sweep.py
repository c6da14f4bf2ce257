"""``halocline sweep``: trains with many settings, and finds the best."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .output import Debug, Json, clear_errors, number_table, print_json, say, stderr, stdout
from .stopping import exit_on_sigterm

Spec = Annotated[Path, typer.Argument(help="A TOML file that describes the sweep.", show_default=False)]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the sweep. Goes on with an existing one.")]
Mode = Annotated[str | None, typer.Option("--mode", help="experiment, data or auto, in place of the file's.")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Run the sweep on one rank, then in both modes, and show both speed-ups.")
]
COMMAND = [sys.executable, "-m", "halocline.cli.train_rank"]


def sweep(
    spec: Spec,
    out: Out = None,
    mode: Mode = None,
    compare: Compare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train with many settings at once, and find the best.

    **The file**, such as sweep.toml:

        target = "unet3d"                  # a workload, or the TOML file of a run
        trials = 8
        ranks = 2                          # of all trials together
        mode = "experiment"                # each trial on one rank; "data": each on all ranks; "auto"
        metric = "loss"                    # of the last validation
        pruner = "median"                  # ends bad trials early; needs validate_every
        settings = ["steps=100", "validate_every=20"]

        [space]
        "optimizer.lr" = { low = 1e-4, high = 1e-2, log = true }
        "network.width" = { choices = [2, 4] }

    Optuna proposes the settings. Each trial trains in processes of its own, in a folder of its own, so a trial that
    fails does not end the others. The same command goes on with a sweep that was stopped or killed: finished trials
    stay, others go on from their last checkpoint.

    **Examples**

    - `halocline sweep sweep.toml --out sweeps/a`: results in sweeps/a, the page in sweeps/a/report.html.

    - `halocline sweep sweep.toml --compare`: how much faster trials side by side are than each trial on all ranks.

    **Exit status**: 0 if at least one trial has a result; 2 otherwise.
    """
    with clear_errors("sweep", debug), exit_on_sigterm():
        from ..train.reporting.sweep_page import best, summary, sweep_page
        from ..train.sweeps import read_spec

        told = read_spec(spec)
        told = told if mode is None else replace(told, mode=mode)
        folder = out or Path("sweeps") / spec.stem
        speedups: dict[str, float] = {}
        if compare:
            records, speedups = _compared(told, folder)
        else:
            records, _ = _run(told, folder)
        (folder / "report.html").write_text(sweep_page(told, records, speedups))
    found = best(told, records)
    if as_json:
        result: dict[str, Any] = {"sweep": str(folder), "trials": [asdict(record) for record in records]}
        print_json({**result, "best": None if found is None else found.number, "speedups": speedups})
    else:
        rows = [
            (str(r.number), r.state, "" if r.value is None else f"{r.value:.4g}", f"{r.seconds:.1f}") for r in records
        ]
        stdout().print(number_table(f"{told.target}: {told.mode}", ("trial", "state", told.metric, "seconds"), rows))
        say(stdout(), escape(summary(told, records)))
        for name, value in speedups.items():
            say(stdout(), f"{name}: {value:.2f} times as fast as one trial after another on one rank")
    raise typer.Exit(0 if found is not None else 2)


def _run(told: Any, folder: Path) -> tuple[list[Any], float]:
    """The trials, and the seconds that they took."""
    from ..train.sweeps import SweepRunner

    began = time.monotonic()
    runner = SweepRunner(told, folder, COMMAND, lambda words: say(stderr(), escape(words)))
    return runner.run(), time.monotonic() - began


def _compared(told: Any, folder: Path) -> tuple[list[Any], dict[str, float]]:
    """The same trials on one rank, side by side, and each on all ranks."""
    told = replace(told, sampler="random", pruner="none")
    _, alone = _run(replace(told, ranks=1, mode="experiment"), folder / "one-rank")
    records, beside = _run(replace(told, mode="experiment"), folder / "experiment")
    _, data = _run(replace(told, mode="data"), folder / "data")
    return records, {"experiment-parallel": alone / beside, "data-parallel": alone / data}
