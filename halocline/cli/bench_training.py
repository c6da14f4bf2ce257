"""``halocline bench quality`` and ``halocline bench whole-vs-crops``: what trained networks have learned."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import Debug, Json, clear_errors, fact_table, print_json, say, stderr, stdout

Names = Annotated[str, typer.Option("--workloads", help="Names with commas.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of both trainings.")]
Size = Annotated[int, typer.Option("--size", min=16, help="Side of a cube.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the cubes, the networks and the order.")]


def quality(workloads: Names = "unet3d,tiramisu,deeplab", as_json: Json = False, debug: Debug = False) -> None:
    """Do the segmentation workloads learn at their small defaults? Some minutes on two cores.

    Each is trained on one rank and judged on samples it never saw, against calling everything background.

    **Exit status**: 0 all are better than that by 0.1 of mean intersection over union, 1 not, 2 could not be run.
    """
    from ..bench.quality import measure_quality

    progress = stderr()
    with clear_errors("bench quality", debug):
        names = tuple(name.strip() for name in workloads.split(","))
        result = measure_quality(names, None, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        for name, found in result["workloads"].items():
            stdout().print(fact_table(name, {key: f"{value:.3f}" for key, value in found.items()}))
    raise typer.Exit(0 if result["learned"] else 1)


def whole_vs_crops(
    steps: Steps = 600, size: Size = 64, seed: Seed = 0, as_json: Json = False, debug: Debug = False
) -> None:
    """Does CosmoFlow learn more from whole cubes than from the same cubes chopped into eight?

    Two networks are trained on synthetic universes, with the same voxels in as many steps: one on whole cubes, one on
    their eighths. Both are asked for the parameters of universes they never saw; of the eighths also the average over
    a cube's eight answers. It takes some ten minutes on two cores.
    """
    from ..bench.whole_vs_crops import Trial, measure

    with clear_errors("bench whole-vs-crops", debug):
        result = measure(Trial(size=size, steps=steps, seed=seed))
    if as_json:
        print_json(result)
        return
    facts = {
        "mean squared error, whole cubes": f"{result['whole_mse']:.5f}",
        "single crops": f"{result['crop_mse']:.5f}",
        "crops, averaged over a cube": f"{result['averaged_crops_mse']:.5f}",
        "crops / whole": f"{result['ratio']:.2f}",
        "knowing nothing": f"{result['knowing_nothing_mse']:.5f}",
        "guessed from how much whole cubes fluctuate": f"{result['scatter_of_whole']:.5f}",
        "seconds": f"{result['seconds']:.0f}",
    }
    stdout().print(fact_table(f"Universes of {size} cubed, {steps} steps", facts))
