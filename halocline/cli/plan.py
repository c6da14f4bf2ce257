"""``halocline plan``: which cut, will it fit, how long will a step take, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .check import Arguments, Shapes, parse_arguments, parse_cut, parse_shape
from .output import Debug, Json, clear_errors, print_json, say, size_text, stderr, stdout

Target = Annotated[str, typer.Argument(help="A workload such as unet3d, zoo/network, or package.module:factory.")]
MachineName = Annotated[
    str, typer.Option("--machine", help="A machine that is shipped, such as summit, or a file.json.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Devices to plan for.")]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, help="Samples of a step; by default one on each rank of the data axis.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="adam or sgd; it takes memory and time.")]
WhyNot = Annotated[
    str | None, typer.Option("--why-not", metavar="AXIS=N,...", help="Price this cut too, and say what it loses by.")
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Time the network's operations on this machine, at the shapes of each cut.")
]
Speeds = Annotated[
    str | None, typer.Option("--speeds", metavar="S,S,...", help="Relative speeds of unequal devices, by rank.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON.")]


def plan(
    target: Target,
    machine: MachineName = "summit",
    gpus: Gpus = 8,
    shape: Shapes = None,
    args: Arguments = "{}",
    batch: Batch = None,
    dtype: Dtype = "float32",
    optimizer: Optimizer = "adam",
    why_not: WhyNot = None,
    measure: Measure = False,
    speeds: Speeds = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Which cut, will it fit, how long will a step take, and why?

    The network's own training step is recorded on tensors without values, as one rank of each mesh would run it, and
    replayed on a described machine. Nothing is computed, and no GPU is needed.

    **Examples**

    - `halocline plan unet3d --shape 1,1,256,256,256 --machine perlmutter --gpus 64`: a table of cuts, the best first.

    - `halocline plan mypackage.models:make_net --shape 1,4,512,512,512 --machine summit --gpus 96 --batch 12`: your own
      network, with 12 samples a step.

    - `halocline plan cosmoflow --gpus 32 --why-not depth=32`: what another cut would lose, and to what.

    - `halocline calibrate; halocline plan unet3d --machine here.json --gpus 2 --measure`: this machine, with the times
      of the network's own operations.

    - `halocline plan unet3d --machine mine.json --json | tail -1`: a machine of your own, everything as JSON.

    **Exit status**: 0, or 2 if nothing fits or the plan cannot be made as asked; the message says what would help.
    """
    with clear_errors("plan", debug):
        from ..arrangement import Arrangement
        from ..plan.api import check_devices
        from ..plan.cost import Prices
        from ..plan.explain import as_plan, lost_by
        from ..plan.machine import load_machine
        from ..plan.search import chosen, price, search

        described = load_machine(machine)
        check_devices(described, gpus)
        subject = subject_of(target, parse_arguments(args), [parse_shape(one) for one in shape or ()], dtype, optimizer)
        other = _whole_mesh(parse_cut(why_not), subject, gpus) if why_not else None
        prices, device = Prices(described.device), _device() if measure else None
        with Progress(TextColumn("recording meshes"), BarColumn(), MofNCompleteColumn(), console=stderr()) as bar:
            task = bar.add_task("", total=None)
            candidates = search(
                subject,
                described,
                gpus,
                batch,
                prices,
                device,
                lambda done, total: bar.update(task, completed=done, total=total),
                parse_speeds(speeds),
            )
        best = chosen(candidates, described)
        rival = price(subject, described, Arrangement(other), batch, prices, device) if other else None
        made = as_plan(target, subject, described, best, candidates)
        if out is not None:
            made.save(out)
    if as_json:
        print_json({**made.model_dump(mode="json"), "why_not": rival and lost_by(best, rival)})
        return
    _show(target, described, best, candidates)
    if rival:
        say(stdout(), lost_by(best, rival))


def subject_of(
    target: str, arguments: Mapping[str, Any], shapes: Sequence[Sequence[int]], dtype: str, optimizer: str
) -> Any:
    """The network that ``target`` names, with the loss that ``halocline check`` uses for any network."""
    import torch

    from ..plan.recording import Subject
    from ..testing.observe import loss_of, named
    from ..testing.task import BadUsage, make_model, make_task

    dtypes = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
    optimizers: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    for name, allowed, chosen in (("dtype", dtypes, dtype), ("optimizer", optimizers, optimizer)):
        if chosen not in allowed:
            raise BadUsage(f"no {name} {chosen!r}; it is {' or '.join(allowed)}")
    task = make_task(target, arguments, shapes or None, dtype="float32")
    if task.shapes[0][0] != 1:
        raise BadUsage(
            f"the shape of one sample begins with 1, not {task.shapes[0][0]}; --batch says how many a step has"
        )
    return Subject(
        make_model=lambda: make_model(task),
        loss=lambda outputs: loss_of(dict(named(outputs))),
        shapes=task.shapes,
        dtype=dtypes[dtype],
        optimizer=optimizers[optimizer],
    )


def _device() -> Any:
    """The GPU, or one thread of the CPU, as a rank has."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    torch.set_num_threads(1)
    return torch.device("cpu")


def parse_speeds(text: str | None) -> list[float]:
    """Such as "2,1"; nothing where all devices are equal."""
    from ..testing.task import BadUsage

    try:
        return [float(speed) for speed in text.split(",")] if text else []
    except ValueError:
        raise BadUsage(f"--speeds {text}: a number for each device, such as 2,1") from None


def _whole_mesh(cut: Mapping[str, int], subject: Any, gpus: int) -> dict[str, int]:
    """The cut with the data axis filled up to all devices."""
    from ..plan.search import NoPlan

    axes = ["data", *subject.volume]
    unknown = [axis for axis in cut if axis not in axes]
    if unknown:
        raise NoPlan(f"--why-not: no axis {unknown[0]!r}; the axes of this network's input are {', '.join(axes)}")
    rest = math.prod(size for axis, size in cut.items() if axis != "data")
    if gpus % rest or cut.get("data", gpus // rest) * rest != gpus:
        raise NoPlan(f"--why-not: {cut} does not divide {gpus} devices; give sizes whose product is {gpus}")
    return {axis: cut.get(axis, gpus // rest if axis == "data" else 1) for axis in axes}


def _show(target: str, machine: Any, best: Any, candidates: list[Any]) -> None:
    table = Table(
        title=f"{target} on {math.prod(best.sizes.values()):,} devices of {machine.name}", title_justify="left"
    )
    for name in (
        "mesh",
        "step",
        "per sample",
        "compute",
        "waits: halo",
        "statistics",
        "gradients",
        "memory",
        "bound by",
    ):
        table.add_column(name, justify="left" if name in ("mesh", "bound by") else "right")
    for each in candidates[:10]:
        line, exposed = each.timeline, each.timeline.exposed
        waits = [_time(exposed.get(kind, 0.0)) for kind in ("halo", "statistics", "gradients")]
        cells = [str(each), _time(line.seconds), _time(each.seconds_per_sample), _time(line.compute), *waits]
        memory = size_text(each.recorded.memory) + ("" if each.fits else " (too much)")
        table.add_row(*cells, memory, each.binds, style="bold" if each is best else "" if each.fits else "dim")
    stdout().print(table)
    assumed = ", ".join(path for path, _ in machine.assumed())
    say(stdout(), f"Take {best}. Assumed, not measured: {assumed}." if assumed else f"Take {best}.")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
