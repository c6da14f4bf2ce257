"""``halocline simulate``: a step on a whole cluster, how it scales, and what would have to improve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import did_you_mean
from .check import Arguments, Shapes, parse_arguments, parse_shapes
from .output import Debug, Json, clear_errors, print_json, progress_console, say
from .parsing import parse_cut, parse_numbers
from .plan import MachineName, subject_of

if TYPE_CHECKING:
    from ..simulate.step import Simulation

Target = Annotated[
    str | None, typer.Argument(help="A workload such as stemdl, at full size, or package.module:factory.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Devices of the run.")]
Local = Annotated[int | None, typer.Option("--local", min=1, help="Samples on each rank of the data axis; default 1.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Samples of a step over all ranks, instead.")]
Cut = Annotated[str | None, typer.Option("--cut", metavar="AXIS=N,...", help="Cut samples, such as depth=4.")]
PrecisionName = Annotated[str, typer.Option("--precision", help="float32, or mixed: float16 by autocast.")]
Base = Annotated[int | None, typer.Option("--base", min=1, help="Devices that efficiency is counted by; default one.")]
Control = Annotated[
    str, typer.Option("--control", help="How ranks agree on gradients: planned, bits, tree or coordinator.")
]
Grouping = Annotated[bool, typer.Option("--grouping/--no-grouping", help="Sum gradients in groups, or one by one.")]
Lag = Annotated[bool, typer.Option("--lag", help="Apply gradients one step late.")]
Wire = Annotated[str | None, typer.Option("--wire", help="bf16 or fp16: halves the bytes of gradients.")]
RingsName = Annotated[str, typer.Option("--rings", help="nccl, flat, levels or hybrid.")]
Bandwidth = Annotated[float, typer.Option("--bandwidth", help="What if all links had so many times the bandwidth?")]
Latency = Annotated[float, typer.Option("--latency", help="What if all links had so many times the latency?")]
Card = Annotated[str | None, typer.Option("--card", metavar="MACHINE", help="What if it had this machine's devices?")]
Reach = Annotated[float | None, typer.Option("--reach", help="Say what would have to improve for this efficiency.")]
Sweep = Annotated[bool, typer.Option("--sweep", help="Weak scaling, from one device to all of --gpus.")]
Strong = Annotated[bool, typer.Option("--strong", help="Strong scaling: the samples of a step stay.")]
Sizes = Annotated[str | None, typer.Option("--sizes", metavar="N,N,...", help="Numbers of devices of a sweep.")]
Waterfall = Annotated[bool, typer.Option("--waterfall", help="What each lever of the founding systems is worth.")]
Picture = Annotated[Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw the sweep or the waterfall.")]
Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE.json", help="Write a Chrome trace of a step.")]
Dataset = Annotated[float | None, typer.Option("--dataset", metavar="BYTES", help="Size of all data, to stage it.")]
InputBytes = Annotated[
    int | None, typer.Option("--input-bytes", min=0, help="Bytes of one sample on disk; 0: kept in memory.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the sampled delays.")]
Validate = Annotated[bool, typer.Option("--validate", help="Hold the simulator against published runs.")]


def simulate(
    target: Target = None,
    machine: MachineName = "summit",
    gpus: Gpus = 1024,
    shape: Shapes = None,
    args: Arguments = "{}",
    local: Local = None,
    batch: Batch = None,
    cut: Cut = None,
    precision: PrecisionName = "float32",
    base: Base = None,
    control: Control = "planned",
    grouping: Grouping = True,
    lag: Lag = False,
    wire: Wire = None,
    rings: RingsName = "nccl",
    bandwidth: Bandwidth = 1.0,
    latency: Latency = 1.0,
    card: Card = None,
    reach: Reach = None,
    sweep: Sweep = False,
    strong: Strong = False,
    sizes: Sizes = None,
    waterfall: Waterfall = False,
    picture: Picture = None,
    trace: Trace = None,
    dataset: Dataset = None,
    input_bytes: InputBytes = None,
    seed: Seed = 0,
    validate: Validate = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How does a training step scale to thousands of devices, what does it wait for, and what would help?

    The step of each class of ranks is recorded without computing anything and replayed on the described machine, as
    `halocline plan` does it. Added are what ranks do to each other: agreement before sums, links that several use, and
    the slowest of all ranks, sampled from how unequal devices and hosts are. It takes seconds, for any number of
    devices.

    **Examples**

    - `halocline simulate stemdl --machine summit --gpus 27600 --precision mixed --input-bytes 0`: one step on all of
      Summit, with samples in the hosts' memory.

    - `halocline simulate deepcam --machine perlmutter --gpus 2048 --local 2 --sweep --picture scaling.svg`: weak
      scaling with its picture; `--strong` keeps the samples of a step instead.

    - `halocline simulate mypackage.models:make_net --shape 1,1,256,256,256 --gpus 512 --cut depth=4`: your own network,
      each sample cut over four devices.

    - `halocline simulate stemdl --gpus 6000 --control coordinator`: with a rank that hears all others, as systems had
      it before; `--waterfall` adds one lever after another.

    - `halocline simulate deeplab --gpus 4096 --bandwidth 2 --latency 0.5 --card perlmutter`: what if.

    - `halocline simulate deeplab --gpus 4096 --reach 0.97`: what would have to improve.

    - `halocline simulate stemdl --gpus 27600 --dataset 500e12`: how long half a petabyte takes to reach the nodes.

    - `halocline simulate --validate --json | tail -1`: simulated against published runs.

    **Reading it**: *efficiency* is the rate of a device over that of the same device in a run of `--base` devices.
    *exposed* is what computation does not hide, by cause; *stragglers* is the wait for the slowest rank. The band holds
    nine steps of ten. *sustained* counts the floating-point operations of the mean step, *peak* those of its computing
    part alone. Constants that nobody measured are marked in the machine file.

    **Exit status**: 0, or 2 if it cannot be simulated as asked; with `--validate` 1 if a row misses its tolerance.
    """
    from . import simulate_table as show

    tell = partial(say, progress_console())
    with clear_errors("simulate", debug):
        from ..simulate import what_if
        from ..simulate.long_run import long_run, staging
        from ..simulate.scenario import ScenarioError
        from ..simulate.step import simulate as simulated
        from ..simulate.trace import chrome_trace
        from ..simulate.validate import validate as validated

        if validate:
            result = validated(tell, seed)
            print_json(result) if as_json else show.show_validation(result)
            raise typer.Exit(0 if result["rows"] == result["rows_within"] else 1)
        if target is None:
            raise ScenarioError("which network? Give one such as stemdl, or package.module:factory with --shape")
        if picture is not None and not (sweep or strong or sizes or waterfall):
            raise ScenarioError("--picture draws a sweep or a waterfall; give --sweep, --strong or --waterfall too")
        levers = {"control": control, "grouping": grouping, "lag": lag, "wire": wire, "rings": rings}
        scenario = _scenario(
            target, machine, gpus, [tuple(one) for one in parse_shapes(shape)], parse_arguments(args),
            local, batch, parse_cut(cut) if cut else {}, precision, levers, input_bytes,
            {"bandwidth": bandwidth, "latency": latency, "card": card},
        )  # fmt: skip
        found = simulated(scenario, base, seed, trace=trace is not None)
        if trace is not None:
            trace.write_text(chrome_trace(found), "utf-8")
        chosen = parse_numbers("--sizes", sizes, int, "numbers of devices, such as 6,96,1536") if sizes else []
        points = _swept(scenario, chosen, strong, base, seed, tell) if sweep or strong or chosen else None
        stages = what_if.waterfall(scenario, seed, tell) if waterfall else None
        improvements = None if reach is None else what_if.to_reach(scenario, reach, base, seed)
        state = found.slowest_class.recorded
        run = long_run(scenario.machine, gpus, state.weights + state.optimizer)
        staged = None if dataset is None else staging(scenario.machine, gpus, dataset)
        if picture is not None:
            from ..train.reporting.simulation_picture import draw_sweep, draw_waterfall

            text = draw_waterfall(target, stages) if stages else draw_sweep(target, points or [], strong)
            picture.write_text(text, "utf-8")
    if as_json:
        print_json(show.all_as_json(found, points, stages, improvements, run, staged))
        return
    show.show_step(target, found, run, staged)
    if points:
        show.show_sweep(points, strong)
    if stages:
        show.show_waterfall(stages)
    if improvements is not None and reach is not None:
        show.show_improvements(reach, found, improvements)


def _scenario(
    target: str,
    machine: str,
    gpus: int,
    shapes: list[tuple[int, ...]],
    arguments: Any,
    local: int | None,
    batch: int | None,
    cut: dict[str, int],
    precision: str,
    levers: dict[str, Any],
    input_bytes: int | None,
    changes: dict[str, Any],
) -> Any:
    import math

    from ..plan.machine import load_machine
    from ..simulate.levers import Levers
    from ..simulate.published import full_subject
    from ..simulate.scenario import Scenario, ScenarioError, changed_machine, local_batch
    from ..workloads import WORKLOADS

    if precision not in ("float32", "mixed"):
        raise ScenarioError(
            f"no precision {precision!r}{did_you_mean(precision, ('float32', 'mixed'))}; it is float32 or mixed"
        )
    if local is not None and batch is not None:
        raise ScenarioError("--local counts the samples of a rank and --batch those of all; give one of them")
    described = changed_machine(load_machine(machine), **changes)
    mixed = precision == "mixed"
    if target in WORKLOADS:
        subject = full_subject(target, shapes[0] if shapes else None, arguments, mixed)
    else:
        subject = subject_of(target, arguments, shapes, "float32", "sgd")
        if mixed:
            raise ScenarioError("--precision mixed is for built-in networks; give your own one in float32")
    samples = local or 1
    if batch is not None:
        samples = local_batch(batch, gpus, math.prod(cut.values()))
    return Scenario(target, subject, described, gpus, samples, cut, Levers(**levers), input_bytes)


def _swept(
    scenario: Any, sizes: list[int], strong: bool, base: int | None, seed: int, tell: Callable[[str], None]
) -> list[Simulation]:
    """The scenario on other numbers of devices, by default the usual ones up to its own."""
    from ..simulate import sweep

    chosen = sizes or sweep.usual_sizes(scenario.machine, scenario.devices, scenario.replica)
    if strong:
        return sweep.strong(scenario, chosen, seed, tell)
    return sweep.weak(scenario, chosen, base, seed, tell)
