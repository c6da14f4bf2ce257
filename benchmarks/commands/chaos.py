"""``halocline bench chaos``: trainings that are killed, stopped, starved and damaged, and what came of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from halocline.cli.output import Debug, Json, clear_errors, fact_table, number_table, print_json, say, stderr, stdout
from halocline.cli.stopping import exit_on_sigterm

Trials = Annotated[int, typer.Option("--trials", min=1, help="Number of faults.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the faults and their moments.")]
Limit = Annotated[float, typer.Option("--limit", min=1, help="Seconds after which a run counts as hanging.")]
Journal = Annotated[
    Path | None, typer.Option("--journal", help="File to which each trial is appended; trials in it are not repeated.")
]
Case = Annotated[str | None, typer.Option("--case", help="Only this kind of fault.")]


def chaos(
    trials: Trials = 30,
    seed: Seed = 0,
    limit: Limit = 40.0,
    journal: Journal = None,
    case: Case = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Do trainings survive faults? A small training on two ranks, and one fault in each trial.

    Ranks and the launcher are killed, stopped and signalled; disks are full or read-only; checkpoints lose bits and
    files; memory runs out; strangers connect to the ranks' ports. Faults come at random moments, and by count inside an
    exchange, an optimizer step and a checkpoint's rename. Then the run is started again, and must end with the losses
    of an undisturbed run, to the bit.

    A trial ends as *recovered*, as *reported* (the run ended with a line that says why, and went on when started
    again), or as a defect: hung, orphans (processes that outlived the run), lost (progress beyond the newest complete
    checkpoint), different (another curve, or no word), leftovers (half files, shared memory).

    **Examples**

    - `halocline bench chaos --trials 200 --journal chaos.jsonl`: may be interrupted, and goes on where it stopped.

    - `halocline bench chaos --case "full disk" --trials 3 --seed 7`

    **Exit status**: 0 no defects, 1 defects, 2 could not be run.
    """
    from ..chaos import DEFECTS, Trial, cases, measure_chaos

    progress = stderr()

    def tell(trial: Trial) -> None:
        text = f"{trial.trial}: {trial.case} ({trial.moment}): {trial.outcome} in {trial.seconds:.1f} s"
        say(progress, escape(text + (f"; {trial.detail}" if trial.detail else "")))

    with clear_errors("bench chaos", debug), exit_on_sigterm():
        if case is not None and case not in cases():
            raise typer.BadParameter(f"there are: {', '.join(cases())}", param_hint="--case")
        result = measure_chaos(trials, seed, limit, journal, tell, case)
    if as_json:
        print_json(result)
    else:
        shown = ("trials", "recovered", "reported", *DEFECTS, "seconds_to_training", "longest_trial")
        stdout().print(fact_table("chaos", {name: str(result[name]) for name in shown}))
        rows = [(name, ", ".join(f"{n} {what}" for what, n in told.items())) for name, told in result["cases"].items()]
        stdout().print(number_table("by kind of fault", ("fault", "outcomes"), rows))
    raise typer.Exit(1 if any(result[name] for name in DEFECTS) else 0)
