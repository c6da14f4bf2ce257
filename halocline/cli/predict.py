"""``halocline predict``: predictions of a trained network for samples of any size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..train.launch import this_rank
from .data_options import Dataset, Dims
from .local_ranks import ask_ranks, started_by_launcher
from .output import Debug, Json, clear_errors, fact_table, print_json, stdout
from .predict_rank import answer

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

    If OUT is a folder, it gets a .nii.gz file for each sample, with the affine of the NIfTI input; if the samples are
    .npy files, a .npy file for each, with the dims of the network's output, such as CDHW (DHW with `--classes`).

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
        if started_by_launcher(ranks) or ranks == 1:
            result = answer(request)
            if this_rank() != 0:  # rank 0 prints for all
                return
        else:
            result = {**ask_ranks("predict_rank", request, ranks), "ranks": ranks}
    if as_json:
        print_json(result)
    else:
        stdout().print(fact_table("answers", {name: escape(str(value)) for name, value in result.items()}))
