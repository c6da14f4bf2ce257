"""The command ``halocline``: its help, and the list of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import add_benchmarks
from .calibrate import calibrate
from .check import check
from .checkpoint import checkpoint
from .data import data
from .demo import demo
from .doctor import doctor
from .export import export
from .launch import launch
from .output import add_command, new_app
from .pigan import pigan
from .plan import plan
from .predict import predict
from .report import report
from .run import run
from .simulate import simulate
from .sweep import sweep
from .taskbench import taskbench
from .train import train
from .tune import tune

app = new_app(completion=True)
for _command in (
    check,
    demo,
    train,
    run,
    sweep,
    pigan,
    report,
    export,
    plan,
    simulate,
    calibrate,
    predict,
    launch,
    doctor,
    tune,
    taskbench,
):  # as help lists them
    add_command(app, _command)
app.add_typer(data, name="data")
app.add_typer(checkpoint, name="checkpoint")
add_benchmarks(app)


def _version(asked: bool) -> None:
    """Print the version and end, before any command is looked for."""
    if asked:
        typer.echo(f"halocline {__version__}")
        raise typer.Exit


@app.callback()
def halocline(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train unchanged PyTorch networks on samples that are cut over ranks, with exactly the answer of one rank.

    A sample too large for one device (a cosmology cube, a CT volume, a climate field) is cut along depth, height and
    width. Each rank keeps one tile and fetches from its neighbours what a layer needs. Outputs and gradients are those
    of one rank, to rounding; the library refuses what it cannot do exactly.

    **Where to begin**

    - `halocline demo`: trains a 3D U-Net cut over two ranks and on one rank, and compares them, in two minutes.

    - `halocline check mypackage.models:make_net --shape 1,1,64,64,64`: checks that your network, cut over two ranks,
      gives the answer of one rank: any function that returns a torch.nn.Module, called from the folder it is in.

    - `halocline plan unet3d --shape 1,1,256,256,256 --machine perlmutter --gpus 64 --batch 8`: recommends a cut and
      predicts memory and time of a step, without computing it.

    - `halocline train run.toml --ranks 2`: trains your own network on your own data, with log, checkpoints and report;
      `halocline train cosmoflow` trains a built-in one.

    - `halocline report runs/run-1`: writes one page with curves, predictions, and where the time goes.

    - `halocline predict runs/run-1 scans/ organs/ --classes`: runs the trained network on other samples.

    - `halocline run script.py --ranks 4 -- --epochs 10`: runs your own single-device script on four ranks, unmodified.

    - `halocline doctor`: checks this machine and the links between its ranks, and says how to solve each problem.

    With `--json` every command prints one JSON object as the last line of its output.
    """
