"""``halocline taskbench``: what the runtime itself costs, beside bare messages and other runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from .output import Debug, Json, clear_errors, number_table, print_json, progress_bar, say, stderr, stdout
from .stopping import exit_on_sigterm

if TYPE_CHECKING:
    from ..taskbench.measure import TaskBenchSettings

Patterns = Annotated[str, typer.Option("--pattern", help="Patterns of dependences, such as stencil_1d,fft; or all.")]
Runtimes = Annotated[str, typer.Option("--runtime", help="Runtimes, such as world,torch; or ours, bare, all.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Ranks on this machine, one thread each.")]
Steps = Annotated[int, typer.Option("--steps", min=2, help="Rows of tasks.")]
Width = Annotated[int, typer.Option("--width", min=0, help="Tasks in a row; 0: one for each rank.")]
Radix = Annotated[int, typer.Option("--radix", min=1, help="Inputs of a task of nearest, spread, random_nearest.")]
Output = Annotated[int, typer.Option("--output-bytes", min=16, help="Bytes that every dependence carries.")]
KernelName = Annotated[str, typer.Option("--kernel", help="What a task does: compute_bound, memory_bound, ...")]
Imbalance = Annotated[float, typer.Option("--imbalance", min=0, max=2, help="Spread of load_imbalance.")]
Graphs = Annotated[int, typer.Option("--graphs", min=1, help="Graphs that run at once.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Runs of each size; the median counts.")]
Inject = Annotated[
    str, typer.Option("--inject", metavar="STEP,COLUMN", help="Mix up the inputs of this task, which has to fail.")
]
MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE.json", help="Write METG of stencil_3d into this machine description."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw efficiency against granularity.")]


def taskbench(
    pattern: Patterns = "stencil_1d,nearest,fft",
    runtime: Runtimes = "all",
    ranks: Ranks = 2,
    steps: Steps = 100,
    width: Width = 0,
    radix: Radix = 5,
    output_bytes: Output = 16,
    kernel: KernelName = "compute_bound",
    imbalance: Imbalance = 1.0,
    graphs: Graphs = 1,
    repeat: Rounds = 5,
    inject: Inject = "",
    plot: Plot = None,
    machine: MachineFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the smallest task that a runtime handles well, as Task Bench does.

    Rows of tasks, each of which needs outputs of the row before, run over this library's worlds, through a convolution
    on a sharded tensor, over bare torch.distributed and mpi4py, and on Dask and Ray where installed. Every task checks
    its inputs. Tasks shrink until half the best rate is lost: that length is **METG**, the minimum effective task
    granularity. The shorter, the better.

    **Examples**

    - `halocline taskbench --pattern stencil_1d,fft --runtime world,tensor,torch --plot curves.svg`: three runtimes on
      two patterns, in about a minute.

    - `halocline taskbench --pattern stencil_3d --runtime tensor --output-bytes 65536 --machine here.json`: METG of a
      spatial cut with faces of 64 KiB; `halocline plan --machine here.json` then leaves out smaller tiles.

    **Patterns**: trivial, no_comm, stencil_1d, stencil_1d_periodic, dom, tree, fft, all_to_all, nearest, spread,
    random_nearest, stencil_3d. **Kernels**: empty, busy_wait, compute_bound, memory_bound, load_imbalance.

    **Reading it**: a training step with E exchanges that takes S seconds on one rank stops scaling at about
    S / (E x METG) ranks. Let nothing else run meanwhile. docs/taskbench.md has the whole table.
    """
    with clear_errors("taskbench", debug), exit_on_sigterm():
        from ..taskbench.graph import PATTERNS
        from ..taskbench.measure import TaskBenchSettings, measure
        from ..taskbench.runtimes import chosen_runtimes
        from ..taskbench.summary import summary

        settings = TaskBenchSettings(
            patterns=tuple(PATTERNS) if pattern == "all" else _names(pattern),
            runtimes=tuple(chosen_runtimes(_names(runtime))),
            ranks=ranks,
            steps=steps,
            width=width,
            radix=radix,
            output_bytes=output_bytes,
            kernel=kernel,
            imbalance=imbalance,
            graphs=graphs,
            rounds=repeat,
            fault=_fault(inject),
        )
        with progress_bar(counted=False) as bar:
            task = bar.add_task("starting", total=1.0)
            result = measure(settings, lambda p, r, share: bar.update(task, description=f"{p}, {r}", completed=share))
        told = summary(settings, result)
        if machine is not None:
            from ..taskbench.spatial import write_spatial_metg

            write_spatial_metg(machine, settings, result)
        if plot is not None:
            from ..taskbench.chart import draw_curves

            plot.write_text(draw_curves(f"Task Bench on {ranks} ranks", result.curves) + "\n", "utf-8")
    if as_json:
        print_json(told)
    else:
        show(told, settings)


def _names(words: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in words.split(",") if name.strip()))


def _fault(words: str) -> tuple[int, int] | None:
    """A step and a column, given as STEP,COLUMN."""
    from ..taskbench.graph import TaskBenchError

    parts = words.split(",")
    if not words:
        return None
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise TaskBenchError(f"--inject {words!r}: give a step and a column, such as 3,1")
    return int(parts[0]), int(parts[1])


def show(told: Mapping[str, Any], settings: TaskBenchSettings) -> None:
    """Print METG by pattern and runtime, ratios to the bare runtime of the same transport, and what was skipped."""
    rows = []
    for pattern, by_runtime in told["runtimes"].items():
        for name, entry in by_runtime.items():
            ratio = entry["over_bare"]
            cells = [_micro(entry["metg_us"]), _micro(entry["low_us"]), _micro(entry["high_us"])]
            rows.append([pattern, name, *cells, _micro(entry["overhead_us"]), f"{ratio:.2f}" if ratio else ""])
    width = settings.width or settings.ranks
    title = f"METG(50 %) in microseconds: {settings.ranks} ranks, {settings.steps} rows of {width} tasks"
    headings = ("pattern", "runtime", "METG", "least", "most", "overhead", "over bare")
    stdout().print(number_table(title, headings, rows))
    for skipped in told["skipped"]:
        say(stderr(), escape(f"skipped {skipped['runtime']} on {skipped['pattern']}: {skipped['reason']}"))


def _micro(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
