"""``halocline bench pigan`` and ``bench pigan-scaling``: the commands, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from halocline.cli.output import Debug, Json, clear_errors, number_table, print_json, progress_console, say, stdout

Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Seeds, from 0.")]
Steps = Annotated[int, typer.Option("--steps", min=2, help="Of training, for each case and seed.")]
Only = Annotated[
    str | None, typer.Option("--only", help="Only cases whose name has this, such as 'level' or 'seed 0'.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder for one page a case.")]
COLUMNS = {  # errors, and their headings
    "u_mean": "mean u", "u_std": "std u", "k_std": "std K", "covariance_short": "short cov", "residual": "residual",
}  # fmt: skip


def pigan(
    seeds: Seeds = 1,
    steps: Steps = 1000,
    only: Only = None,
    out: Out = Path("runs/bench-pigan"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What do the equation and a second level of discriminators give a physics-informed GAN?

    Five games for each seed, trained one after another: with the equation and from data alone on a field with one
    correlation length; with one discriminator, and with that and four of tiles, on a field with two lengths, the
    shorter of which lies between the sensors of the whole domain; and with one discriminator for as long as those five
    take on one core.

    **Examples**

    - `halocline bench pigan`: some ten minutes of one core.

    - `halocline bench pigan --seeds 3 --only level`: one level and two, on three seeds.

    **Reading it**: errors are relative to Monte Carlo, in the 2-norm over the grid; *K* is log K, and *short cov* its
    covariance at lags up to a tenth of the domain; *residual* is the root mean square of div(K grad u), which is 0.
    At equal steps is at equal time where each discriminator has ranks of its own.
    """
    from ..pigan import measure_pigan

    progress = progress_console()
    with clear_errors("bench pigan", debug):
        result = measure_pigan(seeds, steps, out, lambda text: say(progress, text), only)
    if as_json:
        print_json(result)
    else:
        show_pigan(result)


def show_pigan(result: Mapping[str, Any]) -> None:
    rows = [
        (
            name, f"{errors['steps']:.0f}", f"{errors['seconds']:.0f}",
            *(f"{errors[column]:.3f}" for column in COLUMNS),
        )
        for name, errors in result["errors"].items()
    ]  # fmt: skip
    heads = ("case", "steps", "s", *COLUMNS.values())
    stdout().print(number_table("errors beside Monte Carlo; s of one core", heads, rows))
    for key, words in (
        ("covariance_ratio", "covariance at short lags, two levels over one at equal steps (aim: 0.5)"),
        ("covariance_ratio_as_long", "the same at equal time of one core"),
        ("residual_ratio", "residual, with the equation over data only"),
    ):
        ratios = [ratio for ratio in result[key] if ratio is not None]
        if ratios:
            say(stdout(), f"{words}: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


Nodes = Annotated[str, typer.Option("--nodes", help="Nodes of the emulated cluster, a rank each, such as 2,4,8.")]
Rate = Annotated[str, typer.Option("--rate", help="Links of the emulated cluster, such as 1gbit.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Turns of three steps; their median counts.")]
MachineName = Annotated[str, typer.Option("--machine", help="A described machine, to simulate.")]
Sizes = Annotated[str, typer.Option("--sizes", help="Numbers of ranks to simulate: multiples of --replicas.")]
Replicas = Annotated[int, typer.Option("--replicas", min=1, help="Ranks of a simulated discriminator.")]
Simulated = Annotated[bool, typer.Option("--simulated", help="Leave out the emulated cluster.")]


def pigan_scaling(
    nodes: Nodes = "2,4,8",
    rate: Rate = "1gbit",
    repeat: Repeat = 3,
    machine: MachineName = "summit",
    sizes: Sizes = "25,400,6400,27500",
    replicas: Replicas = 25,
    simulated: Simulated = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How does a physics-informed GAN scale, with more subdomains on more ranks and as much work for each?

    On an emulated cluster, which takes root and iproute2: two ranks a subdomain, with the true collectives. Where ranks
    outnumber cores nobody can compute at once, so the networks sleep as long as they would compute. Beside it the same
    step is simulated. Then a described machine: the step of one rank with wide networks, recorded without values and
    replayed with the machine's collectives and stragglers. It takes some minutes.

    **Examples**

    - `sudo halocline bench pigan-scaling`: both tables.

    - `halocline bench pigan-scaling --simulated --sizes 6400,27500`: the described machine alone.

    **Reading it**: *efficiency* is the step of one rank over that of so many. The widths of the published networks are
    not known, so their figure is no target.
    """
    from halocline.errors import HaloclineError

    from ..pigan_scaling import measure_scaling, simulate_scaling

    progress = progress_console()
    with clear_errors("bench pigan-scaling", debug):
        try:
            counts, many = ([int(each) for each in text.split(",")] for text in (nodes, sizes))
        except ValueError:
            raise HaloclineError(f"--nodes {nodes}, --sizes {sizes}: give numbers, such as 2,4") from None
        measured = None
        if not simulated:
            from .. import cluster

            cluster.check_possible()
            measured = measure_scaling(counts, rate, repeat, lambda text: say(progress, text))
        found = simulate_scaling(machine, many, replicas, lambda text: say(progress, text))
    if as_json:
        print_json({"emulated": measured, "simulated": found})
    else:
        show_scaling(measured, found)


def show_scaling(measured: Mapping[str, Any] | None, found: Mapping[str, Any]) -> None:
    def number(value: float | None, places: int = 3) -> str:
        return "" if value is None else f"{value:.{places}f}"

    if measured is not None:
        emulated = [
            (
                f"{row['nodes']}", f"{row['subdomains']}", number(row["step_s"] * 1e3, 0), f"{row['spread']:.0%}",
                number(row["efficiency"]), number(row["simulated_over_measured"]),
            )
            for row in measured["rows"]
        ]  # fmt: skip
        heads = ("nodes", "subdomains", "ms a step", "spread", "efficiency", "simulated / measured")
        stdout().print(number_table(f"emulated cluster, {measured['rate']}", heads, emulated))
    rows = [
        (f"{row['ranks']:,}", number(row["seconds"] * 1e3, 0), number(row["efficiency"]), _exposed(row["exposed"]))
        for row in found["rows"]
    ]
    title = f"{found['machine']}, {found['replicas']} ranks a subdomain"
    stdout().print(number_table(title, ("ranks", "ms a step", "efficiency", "exposed, ms"), rows))
    say(stdout(), f"published at 27,500: {found['published']} (networks of unknown width)")


def _exposed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in parts.items())
