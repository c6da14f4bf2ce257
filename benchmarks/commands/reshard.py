"""``halocline bench reshard``: the command, and its table."""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, progress_console, say, stdout

Pairs = Annotated[int, typer.Option("--pairs", min=1, help="Nodes that send, and as many others that receive.")]
Rates = Annotated[str, typer.Option("--rates", help="Speeds of every link, such as 200mbit,1gbit.")]
Megabytes = Annotated[float, typer.Option("--megabytes", min=0.01, help="Size of the whole tensor.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Rounds; in each, every way has a turn.")]


def reshard(
    pairs: Pairs = 4,
    rates: Rates = "200mbit",
    megabytes: Megabytes = 64.0,
    repeat: Rounds = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How fast does a tensor go from one mesh to another? Against gather-and-scatter, on an emulated cluster.

    Nodes are network namespaces of this machine, joined by links of a given speed (as root, on Linux). Half of them
    hold a tensor, cut or whole, and the other half get it, cut or whole, by `hc.move`. Gather-and-scatter gathers it on
    one sender, sends it to one receiver, and scatters or broadcasts it there, by torch.distributed.

    **Examples**

    - `sudo halocline bench reshard`: 64 MB from four nodes to four, in about four minutes.

    - `sudo halocline bench reshard --rates 100mbit,500mbit --json | tail -1`

    **Reading it**: *wire* is how long the busiest link needs for the bytes that any algorithm must send over it; *over
    wire* should be at most 1.15, *speed-up* over gather-and-scatter at least 2. *adjoint* is the gradient's way back.
    """
    from ..reshard import measure_reshard

    with clear_errors("bench reshard", debug), progress_console().status("starting") as status:
        speeds = [rate.strip() for rate in rates.split(",")]
        result = measure_reshard(pairs, speeds, megabytes, repeat, status.update)
    if as_json:
        print_json(result)
        return
    rows = [
        [each["case"], each["rate"], *(f"{each[key]:.3f}" for key in ("wire_s", "move_s", "adjoint_s", "gather_s")),
         f"{each['over_wire']:.2f}", f"{each['speedup']:.1f}"]
        for each in result["cases"]
    ]  # fmt: skip
    headings = ("case", "links", "wire", "move", "adjoint", "gather", "over wire", "speed-up")
    stdout().print(number_table(f"Seconds for {megabytes:g} MB, {pairs} to {pairs} ranks", headings, rows))
    say(stdout(), f"worst: {result['over_wire']:.2f} of the wire, {result['speedup']:.1f} times gather-and-scatter")
    if result["machine"]["disturbed"]:
        taken = result["machine"]["others_share"]
        say(stdout(), f"[yellow]disturbed[/yellow]: other programs took {taken:.0%} of the cores' time")
