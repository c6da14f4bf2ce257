"""``halocline bench``: what things cost. The measuring itself is in the package above this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from halocline.cli.output import (
    Debug,
    Json,
    add_command,
    clear_errors,
    fact_table,
    new_app,
    print_json,
    progress_bar,
    progress_console,
    say,
    size_text,
    stdout,
)
from halocline.errors import HaloclineError

from .chaos import chaos
from .collectives import collectives
from .copies import copies
from .foresight import foresight
from .gpu import gpu
from .gradients import gradients
from .history import history
from .io import io
from .limit_line import limit_line
from .long_run import long_run
from .model_axes import model_axes
from .pigan import pigan, pigan_scaling
from .pipeline import pipeline
from .plan_speed import plan_speed
from .recurrent import recurrent
from .reshard import reshard
from .simulate import coordinator, simulate
from .slurm import slurm
from .stage import stage
from .training import curves, lag, quality, whole_vs_crops

bench = new_app(help="Measure what things cost on this machine.")
add_command(bench, chaos)
add_command(bench, collectives)
add_command(bench, copies)
add_command(bench, foresight)
add_command(bench, gpu)
add_command(bench, gradients)
add_command(bench, io)
add_command(bench, limit_line, "limit-line")
add_command(bench, long_run, "long-run")
add_command(bench, model_axes, "model-axes")
add_command(bench, pigan)
add_command(bench, pigan_scaling, "pigan-scaling")
add_command(bench, pipeline)
add_command(bench, plan_speed, "plan-speed")
add_command(bench, recurrent)
add_command(bench, reshard)
add_command(bench, simulate)
add_command(bench, coordinator)
add_command(bench, slurm)
add_command(bench, stage)
add_command(bench, quality)
add_command(bench, curves)
add_command(bench, lag)
add_command(bench, whole_vs_crops, "whole-vs-crops")
bench.add_typer(history, name="history")

Size = Annotated[int, typer.Option("--size", help="Side of the cube.")]
Data = Annotated[int, typer.Option("--data", help="Samples side by side, one along each rank of the data axis.")]
Depth = Annotated[int, typer.Option("--depth", help="Ranks along depth.")]
Height = Annotated[int, typer.Option("--height", help="Ranks along height.")]
Rank = Annotated[int, typer.Option("--rank", help="Which rank to write down.")]
Repeat = Annotated[int, typer.Option("--repeat", help="How often; the median counts.")]
Rounds = Annotated[int, typer.Option("--repeat", min=2, help="Rounds; in each, everybody has a turn of 40 calls.")]
Nodes = Annotated[str, typer.Option("--nodes", help="Numbers of nodes, one rank each, such as 2,4.")]
Rates = Annotated[str, typer.Option("--rates", help="Speeds of every link, such as 200mbit,1gbit.")]
Width = Annotated[int, typer.Option("--width", min=1, help="Of the U-Net: channels of its first convolution.")]
Steps = Annotated[int, typer.Option("--repeat", min=1, help="Rounds; in each, every way has one step.")]
Install = Annotated[bool, typer.Option("--install", help="Let apt-get install iproute2 if it is missing (as root).")]


@bench.callback()
def group() -> None:
    """Measure what things cost on this machine."""


def dry(
    size: Size = 256,
    data: Data = 1725,
    depth: Depth = 4,
    height: Height = 4,
    rank: Rank = 13_800,
    repeat: Repeat = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write down a training step of the 3D U-Net as one rank of many would run it, and say how long that takes.

    Nothing is computed and nothing moves: the program runs on meta tensors, through the code that runs between
    processes. By default rank 13,800 of 27,600, a sample of 256 cubed cut over 4 x 4 ranks.
    """
    from ..dry import measure_dry

    with clear_errors("bench dry", debug), progress_console().status("writing down a step"):
        result = measure_dry(size, {"data": data, "depth": depth, "height": height}, rank, repeat)
    if as_json:
        print_json(result)
        return
    stdout().print(
        fact_table(
            f"rank {rank} of {result['ranks']}, 3D U-Net at {size} cubed",
            {
                "seconds to record": f"{result['seconds']:.2f}",
                "local operations": str(result["operations"]),
                "floating-point operations": f"{result['flops'] / 1e12:.2f} T",
                "messages": str(result["messages"]),
                "handed to the transport": size_text(result["sent_bytes"]),
            },
        )
    )


def overhead(repeat: Rounds = 30, as_json: Json = False, debug: Debug = False) -> None:
    """What does the library add to an operation? Small tiles on two ranks, where nothing hides it.

    Two processes on this machine, one thread each, each with a tile of 1 x 4 x 8 x 8 x 8 of a volume cut in depth. Each
    operation is done by plain torch on the tile, by this library, by torch's DTensor where DTensor gives the right
    answer, and, where something must move, by the bare message or sum underneath. Turns alternate, so that noise hits
    all alike; figures are medians of single calls in microseconds.

    **Examples**

    - `halocline bench overhead`: a table, in about half a minute.

    - `halocline bench overhead --repeat 100`: steadier figures.

    - `halocline bench overhead --json | tail -1`: everything, backward and spread too.

    **Reading it**: *added* is this library less plain torch. Of a 3x3x3 convolution the halo's share is *added* over
    the bare exchange of the same slab. If the run is called disturbed, other programs used the cores: gloo's threads
    spin, and each call that waits for the scheduler loses milliseconds; run it again on a quiet machine.
    """
    from ..overhead import measure_overhead

    with clear_errors("bench overhead", debug), progress_bar() as bar:
        task = bar.add_task("measuring", total=repeat)
        result = measure_overhead(repeat, lambda: bar.advance(task))
    if as_json:
        print_json(result)
    else:
        show_overhead(result)


NAMES = {
    "relu": "relu",
    "add": "x + y",
    "window": "nn.Conv3d 1x1x1",
    "window function": "F.conv3d 1x1x1",
    "halo": "nn.Conv3d 3x3x3",
    "norm": "batch norm",
}


def show_overhead(result: Mapping[str, Any]) -> None:
    table = Table(title="Microseconds a call (medians)", title_style="bold", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("plain", "halocline", "DTensor", "raw", "added"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, words in (("forward", "forward"), ("forward_and_backward", "and backward")):
        for subject, ways in result["details"].items():
            table.add_row(NAMES[subject], words, *_cells(ways[kind], result["dtensor"][subject]))
        table.add_section()
    stdout().print(table)
    for line in _overhead_lines(result):
        say(stdout(), line)


def _cells(row: Mapping[str, Any], dtensor: str) -> Iterable[str]:
    for who in ("plain", "halocline"):
        yield _micro(row[who]["median_us"])
    yield _micro(row["dtensor"]["median_us"]) if row["dtensor"] else dtensor.split()[0].rstrip(":")
    raw = [figure["median_us"] for who, figure in row.items() if who.startswith("raw")]
    yield _micro(min(raw)) if raw else ""
    yield _micro(row["added_us"])


def _micro(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _overhead_lines(result: Mapping[str, Any]) -> Iterable[str]:
    for key, words in (
        ("pointwise_added_us", "added to a pointwise operation, us"),
        ("window_added_us", "added to a 1x1x1 convolution, us"),
        ("halo_over_raw", "a halo's cost over the bare exchange"),
    ):
        yield f"{words}: {result[key]:.1f} (aim: {result['targets'][key]})"
    for subject, note in result["dtensor"].items():
        if note != "right":
            yield f"DTensor, {NAMES[subject]}: {note}"
    yield from disturbance(result)


def disturbance(result: Mapping[str, Any]) -> Iterable[str]:
    machine = result["machine"]
    if machine["disturbed"]:
        taken = f"other programs took {machine['others_share']:.0%} of the cores' time"
        yield f"[yellow]disturbed[/yellow]: {taken}; measure again on a quiet machine"


def halo(
    nodes: Nodes = "2,4",
    rates: Rates = "200mbit,500mbit,1gbit,2gbit",
    size: Size = 64,
    width: Width = 16,
    repeat: Steps = 5,
    install: Install = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How much of the exchanges shows in a training step? A 3D U-Net on an emulated cluster.

    One volume is cut in depth over nodes that are network namespaces of this machine, joined by links of a given speed.
    The same step (forward and backward; the averaging of gradients is left out, for it is not what is measured) is
    timed in turn: untouched on a plain tile, cut with the exchanges switched off (compute), cut, and cut with
    overlap switched off. It takes root and iproute2, and several minutes.

    **Examples**

    - `sudo halocline bench halo`: two and four nodes at four speeds.

    - `sudo halocline bench halo --nodes 2 --rates 500mbit --size 96 --repeat 9`: one case, more closely.

    - `sudo halocline bench halo --nodes 2 --rates 1gbit --json | tail -1`: everything about it.

    **Reading it**: *wire* is how long the busiest link is busy; no program is faster than the larger of compute and
    wire. *exposed* is the part of the step in which nothing was computed: (step - compute) / step. The figure that
    counts is the worst among the cases whose wire takes less than half the compute. More ranks than cores share cores
    in all ways alike.
    """
    from .. import cluster
    from ..halo import measure_halo

    progress = progress_console()
    with clear_errors("bench halo", debug):
        if install:
            cluster.install()
        counts, speeds = numbers(nodes), [rate.strip() for rate in rates.split(",")]
        result = measure_halo(counts, speeds, size, width, repeat, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        show_halo(result)


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise HaloclineError(f"{text!r}: give numbers with commas between them, such as 2,4") from error


HALO_COLUMNS = {
    "plain": "plain_s",
    "compute": "compute_s",
    "step": "step_s",
    "no\noverlap": "step_without_overlap_s",
    "wire": "wire_s",
}


def show_halo(result: Mapping[str, Any]) -> None:
    title = f"Seconds of a step, 3D U-Net of width {result['width']} at {result['size']} cubed (medians)"
    table = Table(title=title, title_style="bold", title_justify="left")
    for heading in ("nodes", "links", *HALO_COLUMNS, "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in result["cases"]:
        seconds = [f"{case[key]:.3f}" if case[key] is not None else "-" for key in HALO_COLUMNS.values()]
        table.add_row(str(case["nodes"]), case["rate"], *seconds, f"{case['exposed_share']:.1%}")
    stdout().print(table)
    worst, aim = result["exposed_share"], result["targets"]["exposed_share"]
    if worst is None:
        say(stdout(), "in no case is there compute enough to hide the wire: take faster links or a larger --width")
    else:
        say(stdout(), f"exposed where the wire takes less than half the compute: {worst:.1%} (aim: {aim:.0%})")
    for line in disturbance(result):
        say(stdout(), line)
    if any(case["oversubscribed"] for case in result["cases"]):
        say(stdout(), f"some cases have more ranks than this machine's {result['machine']['cores']} cores")


for _command in (dry, overhead, halo):
    add_command(bench, _command)
