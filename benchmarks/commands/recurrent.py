"""``halocline bench recurrent``: the command, and its table."""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import (
    Debug,
    Json,
    clear_errors,
    number_table,
    print_json,
    progress_console,
    say,
    size_text,
    stdout,
)

Ranks = Annotated[int, typer.Option("--ranks", min=2, help="Ranks, which share the hidden units.")]
Units = Annotated[int, typer.Option("--units", min=2, help="Hidden units, and features of the input.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Time steps.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Samples.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Rounds; in each, both ways have a turn.")]


def recurrent(
    ranks: Ranks = 2,
    units: Units = 1024,
    steps: Steps = 20,
    samples: Samples = 64,
    repeat: Rounds = 9,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What does an LSTM cost whose weights are cut by hidden units? Against the same with gathered weights.

    **Examples**

    - `halocline bench recurrent`: 1024 units on 2 ranks of this machine.

    - `halocline bench recurrent --units 512 --steps 40 --samples 32`: where messages weigh more than arithmetic.

    **Reading it**: medians of forward and backward on the slowest rank, and the most memory that a step takes beyond
    the weights; *over gathered* is the median of ratios within a round.
    """
    from ..recurrent import Sizes, measure_recurrent

    with clear_errors("bench recurrent", debug), progress_console().status("measuring"):
        result = measure_recurrent(ranks, Sizes(units, steps, samples), repeat)
    if as_json:
        print_json(result)
        return
    rows = [
        [way, f"{seconds * 1e3:.1f}", size_text(result["peak_bytes"][way])]
        for way, seconds in result["seconds"].items()
    ]
    title = f"LSTM of {units} units, {steps} steps of {samples} samples, {ranks} ranks"
    stdout().print(number_table(title, ("", "ms a step", "memory"), rows))
    say(stdout(), f"over gathered: {result['time_over_gathered']:.2f} of the time")
