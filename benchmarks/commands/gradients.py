"""``halocline bench gradients``: the command, and its table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from halocline.cli.output import Debug, Json, clear_errors, print_json, progress_console, say, stdout
from halocline.errors import HaloclineError

COMMAND = "bench gradients"
QUICK_ROUNDS = 3
ALL = "resnet24mb,unet3d,resnet18,resnet50"

Nodes = Annotated[int, typer.Option("--nodes", help="Nodes of the cluster, two or more.")]
PerNode = Annotated[str, typer.Option("--ranks-per-node", help="Ranks on each node, a cluster for each, such as 1,2.")]
Rate = Annotated[str, typer.Option("--rate", help="Speed of every link, such as 500mbit or 1gbit.")]
Models = Annotated[str, typer.Option("--models", help="Models, with commas between them.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=1, help="In each, every way has one step; 7, or 3 with --quick.")
]
Placed = Annotated[str, typer.Option("--placement", help="Ranks on nodes: block (0 0 1 1) or cyclic (0 1 0 1).")]
Quick = Annotated[bool, typer.Option("--quick", help="At most four minutes: few rounds, few settings of DDP.")]
Cores = Annotated[
    float | None, typer.Option("--cores", help="Confine each rank to such a share of a core, such as 0.33 (cgroups).")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Write a step of every rank here, for ui.perfetto.dev.", dir_okay=False)
]
Install = Annotated[bool, typer.Option("--install", help="Let apt-get install iproute2 if it is missing (as root).")]


def gradients(
    nodes: Nodes = 4,
    ranks_per_node: PerNode = "1,2",
    rate: Rate = "1gbit",
    models: Models = ALL,
    rounds: Rounds = None,
    placement: Placed = "block",
    quick: Quick = False,
    cores: Cores = None,
    trace: Trace = None,
    install: Install = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How well are gradient averages hidden behind backward? DDP beside `hc.distribute`, on an emulated cluster.

    Nodes are network namespaces of this machine, joined by links of a given speed. The same training step runs in
    turn: without averages (compute), only the averages (wire), under DDP as it comes and as the best of 24 settings
    (bucket caps, bucket views, static graph), and under `hc.distribute(model, hc.Mesh(data=-1))`: as it comes, with
    `overlap="next-forward"`, the same in bfloat16, and with `lag=1`. It takes root and iproute2, and an hour.

    **Models**: *resnet18* computes, all ranks on the cores of this machine. *resnet50*, *resnet24mb* (the same, of
    smaller width) and *unet3d* have all the parameters of their namesakes under emulated compute: layers sleep, as if
    an accelerator worked, for as long altogether as the wire is busy.

    **Examples**

    - `sudo halocline bench gradients --quick`: as much of it as four minutes allow; what was left out is said.

    - `sudo halocline bench gradients --models resnet24mb --ranks-per-node 1`: one case, more closely.

    - `sudo halocline bench gradients --models unet3d --ranks-per-node 2 --placement cyclic --rate 500mbit`: a bad
    network.

    - `sudo halocline bench gradients --quick --models resnet24mb --ranks-per-node 1 --cores 0.33`: slow cores.

    - `sudo halocline bench gradients --quick --models unet3d --trace step.json`: when each bucket was ready and sent.

    - `sudo halocline bench gradients --json | tail -1`: everything, the spread of the rounds too.

    **Reading it**: *bound* is the best that any step could be which overlaps with backward alone: the wire is busy
    from the first gradient on whenever one waits. *ideal*, the larger of compute and wire, would need overlap with
    forward too, and *its bound* of next-forward is the best that a synchronous step could do with that.
    *over bound* should be at most 1.05. *over DDP* and *over tuned* are speed-ups: 1.10 means that DDP's
    step takes 10 % longer. *CPU over DDP* compares processor seconds a step and rank, of all
    threads. What counts are the worst figures of the models under emulated compute.

    **Exit status**: 0 measured, 2 no root, no iproute2, or a model, rate or placement that is not there.
    """
    from .. import cluster
    from ..gradients import GradientsPlan, measure_gradients

    progress = progress_console()
    with clear_errors(COMMAND, debug):
        plan = GradientsPlan(
            nodes=nodes,
            ranks_per_node=numbers(ranks_per_node),
            rate=rate.strip(),
            models=tuple(part.strip() for part in models.split(",") if part.strip()),
            rounds=rounds or (QUICK_ROUNDS if quick else GradientsPlan.rounds),
            placement=cast(Any, placement),  # checked with the rest
            quick=quick,
            cores=cores,
        )
        plan.check()
        if install:
            cluster.install()
        events: list[Any] | None = open_trace(trace)
        result = measure_gradients(plan, lambda text: say(progress, text), events)
        if trace is not None:
            trace.write_text(json.dumps({"traceEvents": events}))
    if as_json:
        print_json(result)
    else:
        show_gradients(result)


def open_trace(path: Path | None) -> list[Any] | None:
    """Where to gather events; a file that cannot be written is better known before the minutes pass than after."""
    if path is None:
        return None
    path.touch()
    return []


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise HaloclineError(f"{text!r}: give numbers with commas between them, such as 1,2") from error


#: What a step costs when all is waited for at the end of backward, and when sums may go on.
TABLES = {
    "waiting when backward ends": (
        {
            "compute": "compute_s",
            "wire": "communication_s",
            "DDP": "ddp_s",
            "tuned": "ddp_tuned_s",
            "ours": "ours_s",
            "bound": "bound_s",
        },
        {
            "over\nbound": "step_over_bound",
            "over\nDDP": "speedup_over_ddp",
            "over\ntuned": "speedup_over_tuned_ddp",
            "CPU over\nDDP": "cpu_over_ddp",
        },
    ),
    "going on after it": (
        {"next\nforward": "ahead_s", "bound": "ahead_bound_s", "so in\nbf16": "ahead_bf16_s", "lag": "lag_s"},
        {
            "over\nbound": "ahead_over_bound",
            "over\ntuned": "ahead_speedup_over_tuned_ddp",
            "bf16 over\nideal": "bf16_over_ideal",
            "lag over\nideal": "lag_over_ideal",
            "CPU over\nDDP": "ahead_cpu_over_ddp",
        },
    ),
}


def show_gradients(result: Mapping[str, Any]) -> None:
    for words in TABLES:
        stdout().print(case_table(result, words))
    for line in lines(result):
        say(stdout(), line)


def case_table(result: Mapping[str, Any], words: str) -> Table:
    milliseconds, ratios = TABLES[words]
    title = f"Milliseconds of a step, links of {result['rate']} (medians), {words}"
    table = Table(title=title, title_style="bold", title_justify="left", padding=(0, 0))
    table.add_column("model", no_wrap=True)
    for heading in ("ranks", "MB", *milliseconds, *ratios):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in result["cases"]:
        where = f"{case['nodes']}x{case['ranks_per_node']}"
        shown = [f"{case[key] * 1000:.0f}" for key in milliseconds.values()]
        shown += ["-" if case[key] is None else f"{case[key]:.2f}" for key in ratios.values()]
        table.add_row(case["model"], where, f"{case['megabytes']:.0f}", *shown)
    return table


AIMS = {
    "step_over_bound": ("step over the bound", "at most"),
    "speedup_over_tuned_ddp": ("speed-up over tuned DDP", "at least"),
    "speedup_over_ddp_small_resnets": ("speed-up over DDP, ResNets under 25 MB", "at least"),
    "ahead_over_bound": ("next-forward over its bound", "at most"),
    "ahead_speedup_over_tuned_ddp": ("next-forward, speed-up over tuned DDP", "at least"),
    "ahead_speedup_over_tuned_ddp_resnets": ("the same, ResNets", "at least"),
    "bf16_over_ideal_resnets": ("bf16 over the larger of compute and wire, ResNets", "at most"),
    "bf16_over_ideal_others": ("the same, U-Net", "at most"),
    "lag_over_ideal": ("lag over the larger of compute and wire", "at most"),
    "cpu_over_ddp": ("processor time over DDP's", "at most"),
    "ahead_cpu_over_ddp": ("the same, next-forward", "at most"),
}


def lines(result: Mapping[str, Any]) -> Iterable[str]:
    from .app import disturbance

    for key, (words, side) in AIMS.items():
        if result[key] is not None:
            yield f"{words}, at worst: {result[key]:.3f} (aim: {side} {result['targets'][key]})"
    for case in result["cases"]:
        if case["cpu_s"]:
            shown = ", ".join(f"{way} {1e3 * seconds:.0f}" for way, seconds in case["cpu_s"].items())
            where = f"{case['model']} on {case['nodes']}x{case['ranks_per_node']}"
            yield f"{where}, milliseconds of processors a step and rank: {shown}"
    if result["left_out"]:
        yield f"[yellow]no time was left for[/yellow] {', '.join(result['left_out'])}"
    yield from disturbance(result)
    if any(case["oversubscribed"] for case in result["cases"]):
        yield f"some cases have more ranks than this machine's {result['machine']['cores']} cores"
