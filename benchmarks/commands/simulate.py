"""``halocline bench simulate`` and ``bench coordinator``: the commands, and their tables."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from halocline.cli.output import Debug, Json, clear_errors, fact_table, print_json, progress_console, say, stdout
from halocline.errors import HaloclineError

Nodes = Annotated[str, typer.Option("--nodes", help="Numbers of nodes, one rank each, such as 2,4,8.")]
Rates = Annotated[str, typer.Option("--rates", help="Links of the emulated cluster, such as 100mbit,400mbit.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Turns of three steps; their median counts.")]


def simulate(
    nodes: Nodes = "2,4,8",
    rates: Rates = "50mbit,150mbit,400mbit",
    repeat: Repeat = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Are simulated steps right? Runs them on an emulated cluster, which takes root and iproute2.

    Three networks on every number of nodes at every rate. Where ranks outnumber cores nobody can compute at once, so
    each layer sleeps for as long as a described device would compute; gradients are averaged truly. It takes about four
    minutes, in which nothing else may run.

    **Examples**

    - `sudo halocline bench simulate`: a table.

    - `sudo halocline bench simulate --nodes 2 --rates 100mbit --json | tail -1`: one place, everything.

    **Reading it**: *error* is simulated over measured, less one; *spread* the range of the turns over their median.
    """
    from .. import cluster
    from ..simulate import measure_simulate

    progress = progress_console()
    with clear_errors("bench simulate", debug):
        cluster.check_possible()
        counts, speeds = _numbers(nodes), [rate.strip() for rate in rates.split(",") if rate.strip()]
        result = measure_simulate(counts, speeds, repeat, lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    table = Table(title="Step in ms", title_style="bold", title_justify="left")
    table.add_column("run")
    for heading in ("measured", "spread", "simulated", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in result["cases"]:
        times = [f"{case[name] * 1e3:.0f}" for name in ("measured_s", "predicted_s")]
        table.add_row(case["case"], times[0], f"{case['spread']:.0%}", times[1], f"{case['error']:+.0%}")
    stdout().print(table)
    say(stdout(), f"median error {result['median_error']:.2f} (aim: {result['targets']['median_error']:.2f})")


def _numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise HaloclineError(f"--nodes {text}: numbers, such as 2,4,8") from None
    if min(found) < 2:
        raise HaloclineError(f"--nodes {text}: two nodes or more, so that gradients travel")
    return found


def coordinator(repeat: Repeat = 3, as_json: Json = False, debug: Debug = False) -> None:
    """What does it cost one rank to hear all others? The costs that `halocline simulate --control` uses.

    Processor time of rank 0 in agreements of 3 to 13 ranks on this machine, by least squares: a round, each other rank,
    each tensor of each rank. It takes about a minute.

    **Examples**

    - `halocline bench coordinator`: a table.

    - `halocline bench coordinator --json | tail -1`: every case.

    **Reading it**: *a rank* is what the coordinator needs to hear one other, *with an answer* to answer it too.
    """
    from ..coordinator import measure_coordinator

    progress = progress_console()
    with clear_errors("bench coordinator", debug):
        result = measure_coordinator(repeat, lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    facts = {
        "a round": f"{result['round_us']:.1f} us",
        "a rank": f"{result['message_us']:.1f} us",
        "with an answer": f"{result['message_with_answer_us']:.1f} us",
        "a tensor of a rank": f"{result['tensor_us'] * 1e3:.2f} ns",
    }
    stdout().print(fact_table("Processor time of a coordinator", facts))
