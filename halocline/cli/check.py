"""``halocline check``: compares a network that runs cut with its run on one rank"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..layout import AUTO_LAYOUTS
from ..testing.check import BadUsage, NetworkReport, check_network
from .output import (
    Debug,
    Json,
    activity,
    clear_errors,
    fact_table,
    print_json,
    progress_console,
    say,
    size_text,
    stdout,
)
from .parsing import parse_cut, parse_numbers
from .stopping import exit_on_sigterm
from .zoo import check_all, list_names

MOST_NAMES = 24  # of cut parameters that are shown
STATUS = {"exact": 0, "gathered": 0, "wrong": 1, "refused": 3}  # exit status by verdict
MEANING = {
    "exact": "[green]exact[/green]: the cut run gives the answer of one rank, to rounding",
    "gathered": "[yellow]gathered[/yellow]: the answer is right, but so much is gathered that cutting saves little",
    "wrong": "[red]wrong[/red]: the cut run gives another answer; this should never be, please report it",
    "refused": "[yellow]refused[/yellow]: the network calls something without an exact cut; "
    "docs/tutorials/refused.md shows what to do",
}

Target = Annotated[
    str | None,
    typer.Argument(
        help="A workload such as unet3d or cosmoflow, zoo/network, or package.module:factory.", show_default=False
    ),
]
Zoo = Annotated[
    str | None,
    typer.Option(
        "--zoo",
        metavar="ZOO",
        help="All networks of a zoo: monai, transformers, neuralop, losses, or package.module:zoo.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Only this network of the zoo; may be repeated."),
]
AtLeast = Annotated[int, typer.Option("--at-least", help="Fail if fewer networks of the zoo are exact or gathered.")]
Names = Annotated[bool, typer.Option("--list", help="Only print the names of the zoo's networks.")]
Arguments = Annotated[
    str, typer.Option("--args", metavar="JSON", help="Arguments of the factory, such as '{\"width\": 8}'.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="N,C,D,H,W", help="Shape of an input, once for each; the first is the volume."),
]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Number of ranks. Default: as many as the cut needs, or 2.")]
Cut = Annotated[
    str | None,
    typer.Option("--cut", metavar="AXIS=N,...", help="Ranks along data, depth, height, width; width is the last dim."),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="JSON|auto",
        help='Parameters that are cut over a further axis of --cut: \'{"*.fc1.weight": {"0": "model"}}\'; or auto: '
        "chosen by predicted time, at least half of their bytes; auto-memory: by the peak of memory. "
        "Default: that of the workload, if the cut has an axis model.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float64, where exact means 1e-8, or float32.")]
Steps = Annotated[
    int, typer.Option("--steps", help="Also train this many steps on both sides, and compare the loss curves.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and inputs, the same on every rank.")]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline", help="Seconds for the cut run, once its ranks have started. Default: many times that of one rank."
    ),
]


def check(
    target: Target = None,
    zoo: Zoo = None,
    only: Only = None,
    at_least: AtLeast = 0,
    names: Names = False,
    args: Arguments = "{}",
    shape: Shapes = None,
    ranks: Ranks = None,
    cut: Cut = None,
    layout: Layout = None,
    dtype: Dtype = "float64",
    steps: Steps = 0,
    seed: Seed = 0,
    deadline: Deadline = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check that a network runs cut, and that its answer is that of one rank.

    The command runs the unchanged network on one rank, then cut over real processes on this machine, with the same
    weights and inputs. It compares outputs, the gradient of every parameter and input, and batch-norm statistics.

    **Examples**

    - `halocline check unet3d`: a built-in network on 2 ranks, cut in depth.

    - `halocline check cosmoflow --cut depth=2,height=2,width=2 --steps 20`: on 8 ranks, with the loss curves of 20
      optimizer steps.

    - `halocline check mypackage.models:make_net --shape 2,1,48,48,48 --cut data=2,depth=2`: your own network, made by
      any function that returns a torch.nn.Module.

    - `halocline check vit3d --cut depth=2,model=2`: samples cut in depth, weights over the axis model.

    - `halocline check transformer --cut data=2,model=2 --layout auto`: which weights are cut is chosen by cost.

    - `halocline check --zoo monai`: 49 networks of MONAI, one after another; `halocline check monai/UNet` is one of
      them. They need their package: `pip install -c constraints.txt -e '.[zoo-monai]'` (or `zoo-transformers`,
      `zoo-neuralop`). `--zoo losses`: losses and metrics, of MONAI among others.

    **Exit status**: 0 the answer is the same (exact; or gathered: right, but little memory saved); 1 it is wrong; 3 the
    library refuses the network and says why; 2 the check cannot run as asked. For a zoo: 1 if any network is wrong or
    too few are right (`--at-least`), else 0; refused networks are listed.
    """
    with clear_errors("check", debug):
        plan = parse_cut(cut) if cut is not None else None
        settings: dict[str, Any] = {"ranks": ranks, "cut": plan, "dtype": dtype, "steps": steps, "seed": seed}
        settings |= {"deadline": deadline, "layout": None if layout is None else parse_layout(layout)}
        if target is None or zoo or only or names:  # a zoo, or a mistake that zoo_alone names
            named = zoo_alone(target, zoo, bool(shape) or args != "{}")
            if names:
                raise typer.Exit(list_names(named))
            with exit_on_sigterm():
                raise typer.Exit(check_all(named, only or [], settings, as_json, at_least))
        inputs = {"arguments": parse_arguments(args), "shapes": parse_shapes(shape)}
        # Progress goes to stderr, so that stdout holds the result alone.
        with exit_on_sigterm(), activity("starting ranks") as tell:
            report = check_network(target, say=tell, remark=_remark, **inputs, **settings)  # type: ignore[arg-type]
    if as_json:
        print_json(report.as_json())
    else:
        show(report)
    raise typer.Exit(STATUS[report.verdict])


def _remark(text: str) -> None:
    """Print what will be slow; progress, and so silent with --quiet."""
    say(progress_console(), f"[yellow]{escape(text)}[/yellow]")


def zoo_alone(target: str | None, zoo: str | None, inputs: bool) -> str:
    """The zoo that was asked for. BadUsage if an option was given that goes with one network only."""
    if zoo is None:
        raise BadUsage("name a network, such as unet3d, or a zoo, such as --zoo monai; --only and --list go with a zoo")
    if target is not None:
        raise BadUsage(f"{target} and --zoo {zoo}: name one network, or a zoo with --only to choose from it")
    if inputs:
        raise BadUsage("networks of a zoo have inputs and arguments of their own; leave out --shape and --args")
    return zoo


def parse_arguments(text: str) -> dict[str, Any]:
    """The JSON of ``--args`` as a dict. Raises BadUsage."""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise BadUsage(f"--args {text}: this is no JSON ({error}); write it such as '{{\"width\": 8}}'") from error
    if not isinstance(arguments, dict):
        raise BadUsage(f"--args {text}: a JSON object of names and values is needed, such as '{{\"width\": 8}}'")
    return arguments


def parse_shapes(texts: list[str] | None) -> list[list[int]]:
    """Shapes such as ``1,1,32,32,32``. Raises ConfigError."""
    hint = "a shape is a row of sizes, such as 1,1,32,32,32"
    return [parse_numbers("--shape", text, int, hint) for text in texts or ()]


def parse_layout(text: str) -> dict[str, dict[int, str]] | str:
    """The JSON of ``--layout``, or its word. Raises BadUsage."""
    if text in AUTO_LAYOUTS:
        return text
    try:
        layout = {name: {int(dim): str(axis) for dim, axis in dims.items()} for name, dims in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise BadUsage(
            f"--layout {text}: it maps names of parameters to dims and axes, such as "
            f'\'{{"*.weight": {{"0": "model"}}}}\' ({error}); or {" or ".join(AUTO_LAYOUTS)}'
        ) from error
    return layout


def show(report: NetworkReport) -> None:
    """Print the report of one network as a table, and what its verdict means."""
    console = stdout()
    cut = ", ".join(f"{axis}={size}" for axis, size in report.cut.items())
    facts = refused_facts(report) if report.verdict == "refused" else measured_facts(report)
    console.print(fact_table(f"{report.target} on {report.ranks} ranks ({cut}), {report.dtype}", facts))
    say(console, f"{MEANING[report.verdict]} ({report.seconds:.0f} s)")
    if report.gradient_zero:
        say(console, "[yellow]Every gradient of the one-rank run is zero, so the comparison says little.[/yellow]")


def measured_facts(report: NetworkReport) -> dict[str, str]:
    """The rows of a network that ran: errors, memory, and what was moved and gathered."""
    worst = f"{report.worst_parameter}; allowed {report.tolerance:.0e}"
    facts = {
        "output error": f"{report.output_error:.1e}",
        "worst gradient error": escape(f"{report.gradient_error:.1e} ({worst})"),
        "buffer error": f"{report.buffer_error:.1e}",
    }
    if report.noise is not None:
        facts["noise of the network itself"] = f"{report.noise:.1e} on one rank, by one unit in the last place"
    if report.loss_error is not None:
        facts[f"loss curve, {report.steps} steps"] = f"{report.loss_error:.1e} apart"
    peaks = f"{size_text(report.peak_bytes or 0)} a rank, {size_text(report.one_rank_peak_bytes or 0)} on one"
    ratio = f" (ratio {report.activation_ratio:.2f})" if report.activation_ratio is not None else ""
    where = f" ({', '.join(report.gathers)})" if report.gathers else ""
    facts["peak activations"] = peaks + ratio
    if report.cut_share is not None:
        facts["parameters cut"] = f"{report.cut_share:.0%} of their bytes"
        layout = (f"{name} {dims_text(dims)}" for name, dims in report.layout.items())
        facts["layout"] = escape(", ".join(islice(layout, MOST_NAMES)))
    facts["moved"] = f"{size_text(report.moved_bytes or 0)} in {report.messages} messages a rank and step"
    facts["gathered"] = escape(f"{size_text(report.gathered_bytes or 0)} a rank and step{where}")
    facts["operations with no rule"] = "none"
    return facts


def dims_text(dims: Mapping[int, str]) -> str:
    """Such as "0: model"."""
    return "{" + ", ".join(f"{dim}: {axis}" for dim, axis in dims.items()) + "}"


def refused_facts(report: NetworkReport) -> dict[str, str]:
    """The rows of a network that was refused: where, why, and what to do."""
    facts: dict[str, str] = {}
    for refusal in report.refusals:
        facts |= {part: escape(text) for part, text in refusal.items()}
    facts["operations with no rule"] = escape(", ".join(report.without_rule)) or "none"
    return facts
