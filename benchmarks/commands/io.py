"""``halocline bench io``: the command, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from halocline.cli.output import Debug, Json, clear_errors, print_json, progress_console, say, size_text, stdout

Gigabytes = Annotated[float, typer.Option("--gigabytes", min=0.3, help="Of data to write, for each format.")]
Rounds = Annotated[int, typer.Option("--repeat", min=1, help="Rounds; in each the bare library and ours have a turn.")]
Formats = Annotated[str, typer.Option("--formats", help="hdf5, zarr, or both.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where the data are put meanwhile; else the system's temporary folder.")
]


def io(
    gigabytes: Gigabytes = 1.1,
    repeat: Rounds = 5,
    formats: Formats = "hdf5,zarr",
    folder: Folder = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What does each rank read, how fast beside bare h5py or zarr, and does a step wait for it?

    Samples of 256 MiB are written in chunks that fit the cuts, and read by 1, 2 and 4 ranks cut in depth, and by 2 x 2.
    It takes some minutes, and half as much memory as data is written, for the in-memory store.

    **Reading it**: *bytes* are those of system calls as the kernel counts them, over what the rank's boxes hold.
    *speed* is over that of the bare library reading the same boxes in as many processes, in turn with it, from a warm
    cache. *epoch 1* is what is read from disk in the second epoch when the first is kept in memory. *waiting* is the
    share of time that steps wait for data when they compute as long as they read; more ranks than one only sleep.

    **Examples**

    - `halocline bench io`: a table.

    - `halocline bench io --gigabytes 4 --folder /scratch --json | tail -1`: everything, on another disk.
    """
    from ..io import measure_io

    progress = progress_console()
    with clear_errors("bench io", debug):
        chosen = tuple(name.strip() for name in formats.split(",") if name.strip())
        result = measure_io(gigabytes, folder, repeat, chosen, lambda text: say(progress, text))
    if as_json:
        print_json(result)
    else:
        show_io(result)


def show_io(result: Mapping[str, Any]) -> None:
    table = Table(title=f"{result['samples']} samples of {list(result['sample_shape'])}, float32", title_justify="left")
    for name in ("format", "cut", "bytes a rank", "/ ideal", "bare", "ours", "speed", "epoch 1", "waiting"):
        table.add_column(name, justify="left" if name in ("format", "cut") else "right")
    for case in result["cases"]:
        cut = " ".join(f"{letter}={parts}" for letter, parts in case["cut"].items()) or "one rank"
        table.add_row(
            case["format"],
            cut,
            size_text(case["bytes_read_per_rank"]),
            f"{case['bytes_ratio']:.3f}",
            f"{case['bare_gb_per_s']:.2f} GB/s",
            f"{case['gb_per_s']:.2f} GB/s",
            f"{case['throughput_ratio']:.2f}",
            f"{case['epoch1_disk_bytes']} B",
            f"{case['wait_share']:.3f}",
        )
    stdout().print(table)
    for kind, speed in result["readers"].items():
        say(stdout(), f"compressed HDF5, {kind.replace('_', ' ')}: {speed:.2f} GB/s")
