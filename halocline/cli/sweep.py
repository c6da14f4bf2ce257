"""``halocline sweep``: trains with many settings, and finds the best."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .output import Debug, Json, clear_errors, number_table, print_json, progress_console, say, stdout
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
        mode = "experiment"                # each trial on one rank; "data": each on all ranks; "auto": planned
        metric = "loss"                    # of the last validation
        pruner = "median"                  # ends bad trials early; needs validate_every
        settings = ["steps=100", "validate_every=20"]

        [space]
        "optimizer.lr" = { low = 1e-4, high = 1e-2, log = true }
        "network.width" = { choices = [2, 4] }

    Optuna proposes the settings. Each trial trains in processes of its own, in a folder of its own, so a trial that
    fails does not end the others. The same command goes on with a sweep that was stopped or killed: finished trials
    stay, others go on from their last checkpoint. Mode "auto" shares the ranks as the planner predicts it to be over
    first, on `machine` (default: what `halocline calibrate` wrote here). With backend = "ray" (extra `ray`) trials run
    on all machines of the cluster of RAY_ADDRESS, which share the folder.

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
            runner, speedups = _compared(told, folder)
        else:
            runner = _run(told, folder)
        records = runner.records
        (folder / "report.html").write_text(sweep_page(told, records, speedups, runner.mix_text))
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


def _run(told: Any, folder: Path) -> Any:
    """The sweep, after all its trials."""
    from ..train.sweeps import SweepRunner

    runner = SweepRunner(told, folder, COMMAND, lambda words: say(progress_console(), escape(words)))
    if runner.mix is not None:
        say(progress_console(), escape(runner.mix_text))
    runner.run()
    return runner


def _compared(told: Any, folder: Path) -> tuple[Any, dict[str, float]]:
    """The same trials on one rank, side by side, and each on all ranks; with mode "auto" also in the planned mix.

    Returns the sweep in its own mode, and the speed-ups over one rank.
    """
    told = replace(told, sampler="random", pruner="none")
    alone = _run(replace(told, ranks=1, mode="experiment"), folder / "one-rank")
    modes = {"experiment": "experiment-parallel", "data": "data-parallel", "auto": "planned mix"}
    runs = {
        mode: _run(replace(told, mode=mode), folder / mode) for mode in modes if mode != "auto" or told.mode == "auto"
    }
    return runs[told.mode], speedups_of(alone, {modes[mode]: each for mode, each in runs.items()})


def speedups_of(alone: Any, runs: Mapping[str, Any]) -> dict[str, float]:
    """How much faster than on one rank each run was. A run in which a trial failed has none, and that is said."""
    failed = {
        name: sum(record.state != "complete" for record in each.records)
        for name, each in {"on one rank": alone, **runs}.items()
    }
    for name, count in failed.items():
        if count:
            say(
                progress_console(),
                f"{name}: {count} trial{'s'[: count > 1]} failed, so that its time cannot be compared",
            )
    if failed["on one rank"]:
        return {}
    return {name: alone.seconds / each.seconds for name, each in runs.items() if not failed[name]}
