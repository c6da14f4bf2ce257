"""``halocline bench limit-line``: the command, and its table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, progress_console, say, stdout

Sides = Annotated[str, typer.Option("--sides", help="Height and width of the volumes, such as 16,32,64.")]
Width = Annotated[int, typer.Option("--width", min=1, help="Of the U-Net: channels of its first convolution.")]
Gigaflops = Annotated[float, typer.Option("--gigaflops", min=0.1, help="What a rank computes in a second.")]
Rate = Annotated[str, typer.Option("--rate", help="Speed of every link.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Steps of each case; the median counts.")]


def limit_line(
    sides: Sides = "8,16,32",
    width: Width = 8,
    gigaflops: Gigaflops = 20.0,
    rate: Rate = "1gbit",
    repeat: Rounds = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Does METG predict where strong scaling ends? U-Nets on 1 to 16 emulated nodes.

    Each rank is a node of an emulated cluster (as root, on Linux). Its part of a U-Net's training step sleeps where it
    would compute, and its halo exchanges are real. Beside it METG of a stencil with equally large faces is measured.

    **Example**

    - `halocline bench limit-line --json | tail -1`: three sizes of volume, in about four minutes.

    **Reading it**: scaling ends where half of a step is work (*measured*); *fastest* is the count with the shortest
    step. *predicted* is where METG x exchanges crosses ideal scaling; it should be within a factor of 2 of *measured*.
    """
    from ..limit_line import measure_limit_line

    with clear_errors("bench limit-line", debug), progress_console().status("starting") as status:
        volumes = [int(each) for each in sides.split(",")]
        result = measure_limit_line(volumes, width, gigaflops, rate, repeat, status.update)
    if as_json:
        print_json(result)
        return
    rows = [
        [f"{each['depth']} x {each['side']} x {each['side']}", f"{each['one_rank_s']:.2f}", *_cells(each)]
        for each in result["cases"]
    ]
    headings = ("volume", "one rank, s", "fastest", "measured", "predicted", "ratio")
    stdout().print(number_table("Ranks at which strong scaling ends", headings, rows))
    worst = result["worst_factor"]
    say(stdout(), f"worst factor {worst:.2f}" if worst else "some scaling does not end within the ranks measured")


def _cells(entry: dict[str, Any]) -> list[str]:
    names = ("fastest_ranks", "measured_end", "predicted_end", "predicted_over_measured")
    return ["-" if entry[name] is None else f"{entry[name]:.2f}" for name in names]
