"""What ``halocline`` says of itself, and its list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import add_benchmarks
from .calibrate import calibrate
from .check import check
from .data import data
from .demo import demo
from .doctor import doctor
from .launch import launch
from .output import add_command, new_app
from .plan import plan
from .predict import predict
from .report import report
from .train import train
from .tune import tune

app = new_app()
add_command(app, check)
add_command(app, demo)
add_command(app, train)
add_command(app, report)
add_command(app, plan)
add_command(app, calibrate)
add_command(app, predict)
add_command(app, launch)
add_command(app, doctor)
add_command(app, tune)
app.add_typer(data, name="data")
add_benchmarks(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"halocline {__version__}")
        raise typer.Exit


@app.callback()
def halocline(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Train unchanged PyTorch networks on samples that are cut over ranks, with exactly the answer of one rank.

    A sample too large for one device (a cosmology cube, a CT volume, a climate field) is cut along depth, height and
    width. Each rank keeps one tile; what a layer needs from the neighbours is fetched as it is needed. Outputs and
    gradients are those of one rank, to rounding; what cannot be done exactly is refused.

    **Where to begin**

    - `halocline demo`: see it work. CosmoFlow on universes cut over two ranks, next to one rank, in two minutes.

    - `halocline train cosmoflow --ranks 2`: a run, with a log, checkpoints and a report; `halocline train run.toml` for
      a network and data of your own.

    - `halocline check unet3d --cut depth=2,height=2`: is the answer the same? A built-in network, cut over 2 x 2 ranks
      on this machine.

    - `halocline check mypackage.models:make_net --shape 1,1,64,64,64`: does *your* network run cut? Any function that
      returns a torch.nn.Module, called from the folder it is in.

    - `halocline plan unet3d --shape 1,1,256,256,256 --machine perlmutter --gpus 64`: which cut, will it fit, and how
      long does a step take? Nothing is computed.

    - `halocline doctor`: is this machine fit, and can its ranks talk? For each thing amiss, what to do.

    - `halocline data info volumes.h5 --cut D=2,H=2`: what is in a file, what would each rank read of it, and how
      should it be chunked?

    - `halocline tune`: on a new kind of GPU, once, for volumes past 2^31 elements. Everything works without it.

    With `--json` every command ends with one JSON object, as the last line of its output.
    """
