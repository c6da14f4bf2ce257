"""``halocline plan``: which cut, will it fit, how long will a step take, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..errors import HaloclineError, did_you_mean
from .check import Arguments, Shapes, parse_arguments, parse_shapes
from .output import Debug, Json, clear_errors, print_json, progress_bar, say, stdout
from .parsing import parse_cut, parse_numbers
from .plan_table import show_candidates, show_difference, show_pipelines

if TYPE_CHECKING:
    from ..arrangement import Arrangement
    from ..plan.candidate import Candidate

Target = Annotated[str, typer.Argument(help="A workload such as unet3d, zoo/network, or package.module:factory.")]
MachineName = Annotated[
    str, typer.Option("--machine", help="A machine that is shipped, such as summit, or a file.json.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Devices to plan for.")]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        help="Samples of a step. Default: one for each rank of the axis data, so that plans differ in their batch.",
    ),
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
InputBytes = Annotated[
    int | None,
    typer.Option("--input-bytes", min=0, help="Bytes of one sample on disk; by default those of its tensors."),
]
LayoutKind = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="auto",
        help="Also search meshes with an axis model, and which weights it cuts; auto-memory: take the least memory.",
    ),
]
StagesKind = Annotated[
    str | None,
    typer.Option("--stages", metavar="auto", help="Also price pipelines: meshes of stages and data. Takes --batch."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON.")]
Compare = Annotated[
    Path | None, typer.Option("--compare", metavar="FILE", help="Another plan: the difference, term by term.")
]
Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE.svg", help="Draw time against memory and devices, and a rank's memory."),
]


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
    input_bytes: InputBytes = None,
    layout: LayoutKind = None,
    stages: StagesKind = None,
    out: Out = None,
    compare: Compare = None,
    picture: Picture = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Which cut, will it fit, how long will a step take, and why?

    The network's own training step is recorded on tensors without values, as one rank of each mesh would run it, and
    replayed on a described machine. Nothing is computed, and no GPU is needed.

    **Examples**

    - `halocline plan unet3d --shape 1,1,256,256,256 --machine perlmutter --gpus 64 --batch 8`: a table of
      cuts, the best first.

    - `halocline plan mypackage.models:make_net --shape 1,4,512,512,512 --machine summit --gpus 96 --batch 12`: your own
      network, with 12 samples a step.

    - `halocline plan transformer --gpus 8 --batch 8 --layout auto`: weights may be cut too, over an axis `model`.

    - `halocline plan resnet50 --shape 1,3,224,224 --gpus 8 --batch 64 --stages auto`: pipelines too, and where the
      network is cut.

    - `halocline plan cosmoflow --gpus 32 --why-not depth=32`: what another cut would lose, and to what.

    - `halocline calibrate; halocline plan unet3d --machine here.json --gpus 2 --measure`: this machine, with the times
      of the network's own operations.

    - `halocline plan unet3d --machine mine.json --json | tail -1`: a machine of your own, everything as JSON.

    - `halocline plan unet3d --gpus 64 --compare monday.json --picture plan.svg`: what differs from another plan, and a
      picture of time against memory and devices.

    **Reading it**: *step* is the predicted time with its range: every constant of the machine that nobody measured at
    its better and at its worse end. *compute* and *waits* add up to it; waits are what computation does not hide.
    *bound by* is the largest term; *memory* that it does not fit, *input* that reading takes longer than the step.
    Plain data parallel (`data=N`) is kept unless another cut is predicted at least 3 % faster for a sample.

    **Exit status**: 0, or 2 if nothing fits or the plan cannot be made as asked; the message says what would help.
    """
    with clear_errors("plan", debug):
        from ..plan.api import check_devices, check_layout, check_stages
        from ..plan.cost import Prices
        from ..plan.explain import as_plan, difference, difference_text
        from ..plan.front import memory_curve, over_devices
        from ..plan.machine import load_machine
        from ..plan.pipelines import explain_pipelines, pipelines
        from ..plan.plan_file import read_plan
        from ..plan.search import RefusedCut, chosen, price, search
        from ..train.reporting.plan_picture import draw_plan

        described = load_machine(machine)
        relative = parse_numbers("--speeds", speeds, float, "a number for each device, such as 2,1") if speeds else []
        check_devices(described, gpus)
        check_layout(layout)
        check_stages(stages, batch)
        subject = subject_of(target, parse_arguments(args), parse_shapes(shape), dtype, optimizer)
        other = _rival(why_not, subject, gpus, batch) if why_not else None
        earlier = read_plan(compare) if compare else None
        prices, device = Prices(described.device), _device(described) if measure else None
        refused: list[RefusedCut] = []
        with progress_bar() as bar:
            task = bar.add_task("recording meshes", total=None)
            candidates = search(
                subject, described, gpus, batch, prices, device,
                lambda done, total: bar.update(task, completed=done, total=total),
                relative, input_bytes, refused, layout,
            )  # fmt: skip
        staged = pipelines(subject, described, gpus, batch, prices) if stages else []
        best = chosen(candidates, described, layout == "auto-memory", staged)
        told = (batch, prices, device, relative, input_bytes)
        answer = _why_not(best, other, lambda: price(subject, described, other, *told)) if other else None
        made = as_plan(target, subject, described, best, candidates, refused, relative, input_bytes, staged)
        if out is not None:
            made.save(out)
        if picture is not None:
            points = over_devices(subject, described, best, prices, batch, input_bytes)
            drawn = draw_plan(target, described, best, candidates, points, memory_curve(subject, best))
            picture.write_text(drawn, "utf-8")
    if as_json:
        compared = earlier and [vars(each) for each in difference(earlier, made)]
        print_json({**made.model_dump(mode="json"), "why_not": answer, "compared": compared})
        return
    show_candidates(target, described, best, candidates, refused, batch)
    if stages:
        show_pipelines(staged)
        for line in explain_pipelines(staged, best.seconds_per_sample, str(best)):
            say(stdout(), escape(line))
    if answer:
        say(stdout(), answer)
    if earlier:
        show_difference(earlier, made, difference(earlier, made))
        say(stdout(), difference_text(earlier, made))


def _rival(why_not: str, subject: Any, gpus: int, batch: int | None) -> Arrangement:
    """The cut that --why-not names. Raises NoPlan if samples or batch do not allow it."""
    from ..arrangement import Arrangement
    from ..plan.search import NoPlan, meshes

    other = _whole_mesh(parse_cut(why_not, "--why-not"), subject, gpus)
    if other not in meshes(subject, gpus, batch):
        raise NoPlan(
            f"--why-not {why_not}: no mesh of this cut fits samples of {list(subject.shapes[0])} and batch "
            f"{batch or 'one on each rank of the data axis'}"
        )
    return Arrangement(other)


def _why_not(best: Candidate, other: Arrangement, price: Callable[[], Candidate]) -> str:
    """What the other cut would lose, or why it is refused."""
    from ..plan.explain import lost_by

    try:
        return lost_by(best, price())
    except HaloclineError as error:
        return f"{other} is refused: {error}"


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
            raise BadUsage(f"no {name} {chosen!r}{did_you_mean(chosen, allowed)}; it is {' or '.join(allowed)}")
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


def _device(machine: Any) -> Any:
    """The GPU, or one thread of the CPU, as a rank has; refused where the plan is for another device."""
    import torch

    from ..plan.calibrate import device_name
    from ..testing.task import BadUsage

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device_name(device) != machine.device.name:
        raise BadUsage(
            f"--measure times operations on {device_name(device)}, and {machine.name} has {machine.device.name}; plan "
            "for a file that `halocline calibrate` wrote here"
        )
    if device.type == "cpu":
        torch.set_num_threads(1)
    return device


def _whole_mesh(cut: Mapping[str, int], subject: Any, gpus: int) -> dict[str, int]:
    """The cut with the data axis filled up to all devices."""
    from ..arrangement import axis_meant
    from ..plan.search import NoPlan

    axes = ["data", *subject.volume]
    unknown = [axis for axis in cut if axis not in axes]
    if unknown:
        near = axis_meant(unknown[0], axes)
        raise NoPlan(f"--why-not: no axis {unknown[0]!r}{near}; the axes of this network's input are {', '.join(axes)}")
    rest = math.prod(size for axis, size in cut.items() if axis != "data")
    if gpus % rest or cut.get("data", gpus // rest) * rest != gpus:
        raise NoPlan(f"--why-not: {cut} does not divide {gpus} devices; give sizes whose product is {gpus}")
    return {axis: cut.get(axis, gpus // rest if axis == "data" else 1) for axis in axes}
