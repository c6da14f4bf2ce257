"""``halocline bench quality`` and ``halocline bench whole-vs-crops``: what trained networks have learned."""

from __future__ import annotations

from typing import Annotated

import typer

from halocline.cli.output import Debug, Json, clear_errors, fact_table, print_json, progress_console, say, stdout

Names = Annotated[str, typer.Option("--workloads", help="Names with commas.")]
AllNames = Annotated[str, typer.Option("--workloads", help="Names with commas; all of them if not given.")]
Ranks = Annotated[int, typer.Option("--ranks", min=2, help="Of the cut runs.")]
Double = Annotated[bool, typer.Option("--only-float64", help="Leave out the runs in float32.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of both trainings.")]
Few = Annotated[int | None, typer.Option("--steps", min=2, help="Fewer or more than the workload's own.")]
Size = Annotated[int, typer.Option("--size", min=16, help="Side of a cube.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the cubes, the networks and the order.")]


def quality(workloads: Names = "unet3d,tiramisu,deeplab", as_json: Json = False, debug: Debug = False) -> None:
    """Do the segmentation workloads learn at their small defaults? Some minutes on two cores.

    Each is trained on one rank and judged on samples it never saw, against calling everything background.

    **Exit status**: 0 all are better than that by 0.1 of mean intersection over union, 1 not, 2 could not be run.
    """
    from ..quality import measure_quality

    progress = progress_console()
    with clear_errors("bench quality", debug):
        names = tuple(name.strip() for name in workloads.split(","))
        result = measure_quality(names, None, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        for name, figures in result["workloads"].items():
            stdout().print(fact_table(name, {key: f"{value:.3f}" for key, value in figures.items()}))
    raise typer.Exit(0 if result["learned"] else 1)


def curves(
    workloads: AllNames = "",
    ranks: Ranks = 2,
    steps: Steps = 50,
    only_float64: Double = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Does every workload at its small default, cut over ranks, follow its run on one rank?

    `halocline train NAME` is run on one rank and on several, in float64, and the losses of all steps are compared. In
    float32 the difference is held against that of two runs on one rank with one and with two threads. It takes some
    minutes a workload.

    **Exit status**: 0 all follow (1e-8 of the loss; in float32 three times what threads do), 1 not, 2 could not be run.
    """
    from halocline.workloads import WORKLOADS

    from ..curves import CurvesPlan, measure_curves

    progress = progress_console()
    names = tuple(name.strip() for name in workloads.split(",")) if workloads else tuple(WORKLOADS)
    with clear_errors("bench curves", debug):
        plan = CurvesPlan(names, ranks, steps, not only_float64)
        result = measure_curves(plan, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        for name, figures in result["workloads"].items():
            stdout().print(fact_table(name, {key: f"{value:.3g}" for key, value in figures.items()}))
    raise typer.Exit(0 if result["follows"] else 1)


def lag(
    workloads: Names = "unet3d,tiramisu,stemdl", steps: Few = None, as_json: Json = False, debug: Debug = False
) -> None:
    """What do gradients that are applied one step late do to the loss? Some minutes a workload on two cores.

    Each workload is trained twice from the same start, with `gradients.lag` 0 and 1, and judged by its loss over the
    last tenth of the steps and on samples it never saw.
    """
    from ..lag import measure_lag

    progress = progress_console()
    with clear_errors("bench lag", debug):
        names = tuple(name.strip() for name in workloads.split(","))
        result = measure_lag(names, steps, lambda text: say(progress, text))
    if as_json:
        print_json(result)
        return
    for name, figures in result["workloads"].items():
        facts = {f"{key}, lag {n}": f"{value:.4g}" for n in (0, 1) for key, value in figures[f"lag {n}"].items()}
        stdout().print(fact_table(name, facts))


def whole_vs_crops(
    steps: Steps = 600, size: Size = 64, seed: Seed = 0, as_json: Json = False, debug: Debug = False
) -> None:
    """Does CosmoFlow learn more from whole cubes than from the same cubes chopped into eight?

    Two networks are trained on synthetic universes, with the same voxels in as many steps: one on whole cubes, one on
    their eighths. Both are asked for the parameters of universes they never saw; of the eighths also the average over
    a cube's eight answers. It takes some ten minutes on two cores.
    """
    from ..whole_vs_crops import CropsTrial, measure

    with clear_errors("bench whole-vs-crops", debug):
        result = measure(CropsTrial(size=size, steps=steps, seed=seed))
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
