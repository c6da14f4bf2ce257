"""``halocline calibrate``: measure this machine, for ``halocline plan --machine here.json``."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import did_you_mean
from .output import Debug, Json, clear_errors, print_json, progress_bar, say, stdout
from .stopping import exit_on_sigterm

if TYPE_CHECKING:
    from ..plan.calibrate import Tell

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the description.")]
Ranks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Ranks that a run on this machine would have; one for each core.")
]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where data lie; its disk is measured.")]
Dtypes = Annotated[str, typer.Option("--dtypes", help="Dtypes whose operations are timed, such as float32,bfloat16.")]
Seconds = Annotated[float, typer.Option("--seconds", min=1, help="At most so long for the operations.")]


def calibrate(
    out: Out = Path("here.json"),
    ranks: Ranks = None,
    folder: Folder = None,
    dtypes: Dtypes = "float32",
    seconds: Seconds = 200.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, and describe it for `halocline plan`.

    Times some five thousand operations of random small networks on the GPU if there is one, else on one thread of the
    CPU: convolutions, norms, pools and optimizer steps at local shapes, with the memory that each takes while it runs.
    Then messages and sums between processes, alone and while they compute, and reading from disk. It takes about six
    minutes; let nothing else run meanwhile. Shapes in between are interpolated.

    **Examples**

    - `halocline calibrate`: writes here.json; then `halocline plan unet3d --machine here.json --gpus 2`.

    - `halocline calibrate --ranks 4 --folder /scratch --out node.json`: four ranks a node, data on another disk.

    - `halocline calibrate --dtypes float32,bfloat16 --seconds 300`: two dtypes, and more operations of each.
    """
    with clear_errors("calibrate", debug), exit_on_sigterm():
        import torch

        from ..plan.calibrate import describe, measure_device, measure_storage
        from ..testing.task import BadUsage

        ranks = ranks or torch.cuda.device_count() or max(2, os.cpu_count() or 2)
        names = [name.strip() for name in dtypes.split(",")]
        known = ("float64", "float32", "bfloat16", "float16")
        if unknown := [name for name in names if name not in known]:
            near = did_you_mean(unknown[0], known)
            raise BadUsage(f"--dtypes: no dtype {unknown[0]!r}{near}; it is float64, float32, bfloat16 or float16")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)
        with progress_bar(counted=False) as bar:
            task = bar.add_task("starting", total=1.0)

            def tell(what: str, share: float) -> None:
                bar.update(task, description=what, completed=share)

            measured = measure_device(device, tell, names, seconds=seconds)
            link, loads = measure_ranks(ranks, measured, tell)
            tell("disk", 0.0)
            storage = measure_storage(folder or Path(tempfile.gettempdir()))
        described = describe(measured, link, loads, storage, ranks=ranks)
        out.write_text(json.dumps(described) + "\n")
    if as_json:
        print_json(described)
    else:
        say(stdout(), f"wrote {out}; now: halocline plan unet3d --machine {out} --gpus {ranks}")


def measure_ranks(ranks: int, device: dict[str, Any], tell: Tell) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Links, and what 1, 2, ... ranks at work on this machine take from each other."""
    from ..plan.calibrate_ranks import link_on_ranks, measure_load
    from ..testing.pool import RankPool

    with RankPool(2) as pool:
        link = pool.run(link_on_ranks, deadline=120)[0]
    loads = []
    counts = sorted({*(2**n for n in range(ranks.bit_length())), ranks})
    if "gpu" in device["kind"]:
        return link, []  # the program and the messages run beside the device
    for number, count in enumerate(counts):
        tell(f"{count} processes at work", number / len(counts))
        with RankPool(count) as pool:
            loads.append(measure_load(pool, count, device, link))
    return link, loads
