"""``halocline predict``: predictions of a trained network for samples of any size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..errors import ConfigError
from ..train.launch import LaunchError, LocalRanks, launched, this_rank
from .data_options import Dataset, Dims
from .output import Debug, Json, clear_errors, fact_table, is_quiet, print_json, stdout
from .predict_rank import REQUEST, answer
from .stopping import Stop
from .train_rank import RESULT

Run = Annotated[Path, typer.Argument(help="Folder of a trained run.", file_okay=False)]
In = Annotated[str, typer.Argument(metavar="IN", help="Samples: .h5, .zarr, .npy, .nii, a folder or a quoted pattern.")]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Predictions: .h5 (dataset p), .zarr, .nii, .nii.gz, or a folder.")
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Processes to start on this machine.")]
Classes = Annotated[bool, typer.Option("--classes", help="Write the number of the most likely class, in one byte.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Execute the code that RUN names, though another user made or changed it.")
]


def predict(
    run: Run,
    source: In,
    out: Out,
    dataset: Dataset = None,
    dims: Dims = None,
    ranks: Ranks = 1,
    classes: Classes = False,
    force: Force = False,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a trained network on samples of any size, cut over ranks; each rank reads and writes its own boxes.

    The weights are those of the run's newest good checkpoint. The command needs only RUN, neither the training data nor
    the folder where you trained. The number of ranks and the size of the samples may differ from those of the training.
    Dataset and dims default to those of the training. OUT appears only when it is complete; an error leaves nothing
    behind.

    RUN may name Python code, its network for one. It is executed if you made the run yourself, and otherwise only with
    `--trust`.

    If OUT is a folder, it gets a .nii.gz file for each sample, with the affine of the NIfTI input.

    **Examples**

    - `halocline predict runs/run-1 scans.h5 organs.zarr --classes --ranks 4`

    - `halocline predict runs/run-1 imagesTs/ segmentations/ --classes`: NIfTI in, NIfTI out.

    - `srun halocline predict runs/big "scans/*.h5" organs.h5 --dims CDHW`: ranks that a launcher started.

    **Exit status**: 0 written; 2 not written, with one line that says why.
    """
    request = {
        "run": str(run), "source": source, "out": str(out), "dataset": dataset, "dims": dims, "classes": classes,
        "force": force, "trust": trust,
    }  # fmt: skip
    with clear_errors("predict", debug):
        if debug:  # for ranks that are started here
            os.environ["HALOCLINE_DEBUG"] = "1"
        if ranks > 1 and launched():
            raise ConfigError("--ranks is for ranks that this command starts; here a launcher did")
        if ranks > 1:
            result = _on_this_machine(request, ranks)
        else:
            result = answer(request)
            if this_rank() != 0:  # rank 0 prints for all
                return
    if as_json:
        print_json(result)
    else:
        stdout().print(fact_table("answers", {name: escape(str(value)) for name, value in result.items()}))


def _on_this_machine(request: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Predict with processes that are started here; they get the request, and leave the result, in files."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request))
        command = [sys.executable, "-m", "halocline.cli.predict_rank", name, *(["--quiet"] if is_quiet() else [])]
        with Stop() as stop:
            ending = stop.follow(lambda: LocalRanks(command, ranks, folder))
        if ending is not None and stop.asked:  # the ranks have removed what they had written
            raise LaunchError("stopped on request before everything was written")
        if ending is not None:
            raise LaunchError(f"rank {ending.rank}: {ending.words.partition(' (traceback in ')[0]}")
        return {**json.loads((folder / RESULT).read_text()), "ranks": ranks}
