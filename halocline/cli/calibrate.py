"""``halocline calibrate``: measure this machine, for ``halocline plan --machine here.json``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from .output import Debug, Json, clear_errors, print_json, say, stderr, stdout

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the description.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Ranks that a run on this machine would have.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where data lie; its disk is measured.")]


def calibrate(
    out: Out = Path("here.json"), ranks: Ranks = 2, folder: Folder = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Measure this machine, and describe it for `halocline plan`.

    Speeds of matrix products, memory and convolutions of growing size on the GPU if there is one, else on one thread of
    the CPU; messages between two processes; reading from disk. It takes about a minute; let nothing else run meanwhile.

    **Examples**

    - `halocline calibrate`: writes here.json; then `halocline plan unet3d --machine here.json --gpus 2`.

    - `halocline calibrate --ranks 4 --folder /scratch --out node.json`: four ranks a node, data on another disk.
    """
    with clear_errors("calibrate", debug):
        import torch

        from ..plan.calibrate import describe, measure_device, measure_link, measure_storage
        from ..testing.pool import RankPool

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)
        with stderr().status("starting") as status:
            measured = measure_device(device, status.update)
            status.update("messages between two processes")
            with RankPool(2) as pool:
                link = pool.run(measure_link, deadline=120)[0]
            status.update("disk")
            storage = measure_storage(folder or Path(tempfile.gettempdir()))
        described = describe(measured, link, storage, ranks)
        out.write_text(json.dumps(described, indent=2) + "\n")
    if as_json:
        print_json(described)
    else:
        say(stdout(), f"wrote {out}; now: halocline plan unet3d --machine {out} --gpus {ranks}")
