"""``halocline data stage``: copies files of a shared file system to every node's own storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .data_options import byte_progress
from .output import USAGE, Debug, Json, clear_errors, fact_table, number_table, print_json, size_text, stdout

if TYPE_CHECKING:
    from ..data.staging import StageReport

COMMAND = "data stage"

Source = Annotated[Path, typer.Argument(metavar="SRC", help="A folder (or one file) that every node can read.")]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="A folder on each node; {node} in it becomes the node's number.")
]
Pattern = Annotated[
    str, typer.Option("--pattern", help="Which files, by their paths under SRC: * within a folder, **.")
]
Count = Annotated[
    int | None, typer.Option("--count", min=1, help="Number of files for each node, chosen at random. Default: all.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the choice that --count makes.")]
Readers = Annotated[int, typer.Option("--readers", min=1, help="Reading threads on each node.")]
Retries = Annotated[int, typer.Option("--retries", min=0, help="Further attempts for a file that fails.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read the files that are already there, and compare checksums.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds without a byte after which a read has failed.")]


def stage(
    source: Source,
    destination: Destination,
    pattern: Pattern = "**/*",
    count: Count = None,
    seed: Seed = 0,
    readers: Readers = 4,
    retries: Retries = 3,
    verify: Verify = False,
    timeout: Timeout = 120.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Copy files from a shared file system to every node's own storage; each file is read from the source only once.

    One node reads a file and passes it on to the others over the network, so that 100 nodes load the shared file system
    as much as one. Run one process on each node. A single process makes a checked copy.

    **Examples**

    - `srun --ntasks-per-node 1 halocline data stage /project/cubes.zarr /local/cubes.zarr`: under Slurm, on all nodes
    of the job.

    - `torchrun --no-python --nnodes 8 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 halocline data
    stage SRC DST`: without Slurm, the same command on each of 8 nodes, HOST being one of them.

    - `halocline data stage SRC DST --pattern '**/*.h5'`: on this machine alone, only some files.

    - `... --count 1500 --seed 3`: each node gets 1,500 files, chosen at random by seed and node.

    - `torchrun --no-python --nproc-per-node 2 env LOCAL_RANK=0 halocline data stage SRC '/tmp/copy{node}'`: tries it
    on one machine, with two processes that act as nodes.

    **When it fails**, nothing is lost. A file gets its name only when it is complete and has the checksum of the
    source. Run the same command again, on the same nodes or on others: it copies from the nodes that already hold a
    file. `--verify` also compares the checksums of the files that are already there.

    **Reading the result**: *opens* equals the number of files read, unless reads failed and were retried. *passed on*
    counts what a node sent, including files that it only forwarded.

    **Exit status**: 0 all files are in place; 2 otherwise, and the message names node, file and reason.
    """
    # Imported here, so that help and other commands start without them.
    from ..data.staging import StageError
    from ..data.staging import stage as stage_files
    from ..world import init, this_world

    with clear_errors(COMMAND, debug):
        init()
        first = this_world().rank == 0  # shows progress and prints the report for all
        with byte_progress(first) as progress:
            task = progress.add_task("staging, all nodes", total=None)
            try:
                report = stage_files(
                    source,
                    destination,
                    pattern=pattern,
                    count=count,
                    seed=seed,
                    readers=readers,
                    retries=retries,
                    verify=verify,
                    timeout=timeout,
                    progress=lambda done, total: progress.update(task, completed=done, total=total),
                )
            except StageError:
                if first or debug:
                    raise
                raise typer.Exit(USAGE) from None  # every rank has the same error: rank 0 prints it
    if first and as_json:
        print_json(report.as_dict())
    elif first:
        show(report)


def show(report: StageReport) -> None:
    """Print the totals, and a row for each node."""
    stdout().print(
        fact_table(
            f"{report.files:,} files, {size_text(report.bytes)}; nodes: {len(report.nodes)}",
            {
                "seconds": f"{report.seconds:.2f}",
                "GB/s to storage, all nodes": f"{report.gigabytes_per_second:.3f}",
                "opens of source files": f"{report.opens:,}",
                "retried": f"{report.total('retried'):,}",
            },
        )
    )
    rows = []
    for number, node in enumerate(report.nodes):
        pairs = (
            (node.read_files, node.read_bytes),
            (node.received_files, node.received_bytes),
            (node.passed_files, node.passed_bytes),
            (node.present_files, node.present_bytes),
        )
        rows.append([str(number), *(f"{files:,}: {size_text(size)}" for files, size in pairs)])
    headings = ("node", "read", "received", "passed on", "already there")
    stdout().print(number_table("Files and bytes of each node", headings, rows))
