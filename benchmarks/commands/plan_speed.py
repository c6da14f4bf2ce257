"""``halocline bench plan-speed``: the command, and its table."""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import (
    Debug,
    Json,
    clear_errors,
    fact_table,
    print_json,
    progress_console,
    say,
    size_text,
    stdout,
)

Size = Annotated[int, typer.Option("--size", min=16, help="Side of the sample.")]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Devices to plan for.")]


def plan_speed(size: Size = 256, gpus: Gpus = 1024, as_json: Json = False, debug: Debug = False) -> None:
    """How long does `halocline plan` take, and does its search grow with a network's depth?

    The command is run on one core, with the interpreter's start. Then networks of 10 and 100 equal residual blocks are
    planned for; the time of the search counts apart from that of recording and replaying steps, which grows with their
    operations.

    **Examples**

    - `halocline bench plan-speed`: a table, in about a minute.

    - `halocline bench plan-speed --json | tail -1`: everything.

    **Reading it**: *wall* should be at most 10 s, the search for ten times as deep a network at most twice as long,
    and *peak memory* below 2 GB.
    """
    from ..plan_speed import PlanSpeedTrial, measure_plan_speed

    progress = progress_console()
    with clear_errors("bench plan-speed", debug):
        result = measure_plan_speed(PlanSpeedTrial(size, gpus), lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    facts = {
        "wall": f"{result['wall_s']:.1f} s",
        "processor time": f"{result['cpu_s']:.1f} s",
        "peak memory": size_text(result["peak_bytes"]),
    }
    for blocks, figures in result["depth"].items():
        facts[f"{blocks} blocks: search"] = f"{figures['search_s']:.2f} s"
        recorded = f"{figures['recording_s']:.2f} s for {figures['recorded_steps']} steps"
        facts[f"{blocks} blocks: recording, replay"] = f"{recorded}, {figures['replay_s']:.2f} s"
    facts["search, ten times as deep"] = f"{result['depth_ratio']:.2f} times as long"
    stdout().print(fact_table(f"Planning at {size} cubed for {gpus:,} devices", facts))
