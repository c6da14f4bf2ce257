"""``halocline pigan``: trains physics-informed GANs over subdomains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..train.launch import launched, this_rank
from .local_ranks import ask_ranks
from .output import Debug, Json, clear_errors, fact_table, print_json, stdout
from .parsing import parse_numbers
from .pigan_rank import play

Subdomains = Annotated[int, typer.Option("--subdomains", min=1, help="Tiles of the domain, each with a discriminator.")]
TwoLevels = Annotated[bool, typer.Option("--two-levels", help="One more discriminator, for the whole domain.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Processes: a multiple of the number of discriminators.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps of the generators.")]
Dims = Annotated[int, typer.Option("--dims", min=1, max=2, help="1: flow on an interval; 2: on a square.")]
Lengths = Annotated[str, typer.Option("--lengths", metavar="L,...", help="Correlation lengths of log K.")]
Noise = Annotated[int, typer.Option("--noise", min=1, help="Random numbers of a realisation; short lengths take more.")]
DataOnly = Annotated[bool, typer.Option("--data-only", help="A GAN that does not know the equation, to compare with.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights, noise and truth.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for weights, figures and the report.")]


def pigan(
    subdomains: Subdomains = 1,
    two_levels: TwoLevels = False,
    ranks: Ranks = 1,
    steps: Steps = 2000,
    dims: Dims = 1,
    lengths: Lengths = "0.3",
    noise: Noise = 8,
    data_only: DataOnly = False,
    seed: Seed = 0,
    out: Out = Path("runs/pigan"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Learn random Darcy flow from sensors and its equation, with one discriminator for each subdomain.

    Generators give log K and u as functions of place and noise; automatic differentiation gives div(K grad u), which
    is 0. Each discriminator sees the sensors of its own subdomain. Ranks form one group for each discriminator; its
    gradients are averaged in the group, those of the generators over all ranks, and the result is that of one process
    with all discriminators. Mean, deviation and covariance are compared with Monte Carlo.

    **Examples** (extra `pigan`)

    - `halocline pigan --steps 2000`: the whole domain, one rank; minutes on a CPU.

    - `halocline pigan --subdomains 2 --two-levels --ranks 3 --lengths 0.4,0.1 --noise 20`: three groups of one rank.

    - `halocline pigan --data-only`: the same without the equation.
    """
    with clear_errors("pigan", debug):
        request = {
            "game": {"subdomains": subdomains, "two_levels": two_levels, "seed": seed, "steps": steps, "noise": noise},
            "flow": _flow(dims, lengths),
            "data_only": data_only,
            "out": str(out),
        }
        players = subdomains + two_levels
        if ranks > 1 and ranks % players:
            raise ConfigError(f"--ranks {ranks}: there are {players} discriminators; give a multiple of that, or 1")
        out.mkdir(parents=True, exist_ok=True)
        if launched() or ranks == 1:
            result = play(request)
            if this_rank() != 0:
                return
        else:
            result = ask_ranks("pigan_rank", request, ranks, out)
    if as_json:
        print_json(result)
    else:
        facts = {name: f"{value:.4g}" for name, value in result["errors"].items()}
        stdout().print(fact_table("beside Monte Carlo (relative errors; residual: root mean square)", facts))


def _flow(dims: int, lengths: str) -> dict[str, Any]:
    """The settings of the flow: every length has the same share of the variance of log K."""
    parts = parse_numbers("--lengths", lengths, float, "give numbers, such as 0.4,0.08")
    deviation = 0.5 / len(parts) ** 0.5
    return {"dims": dims, "points": 65 if dims == 1 else 33, "lengths": parts, "deviations": (deviation,) * len(parts)}
