"""``halocline bench stage``: the command, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from halocline.cli.output import (
    Debug,
    Json,
    clear_errors,
    fact_table,
    print_json,
    progress_console,
    say,
    size_text,
    stdout,
)

COMMAND = "bench stage"

Nodes = Annotated[int, typer.Option("--nodes", min=2, help="Nodes of the cluster, one process each.")]
Files = Annotated[int, typer.Option("--files", min=4, help="Files of the source.")]
Megabytes = Annotated[float, typer.Option("--megabytes", help="Size of a file, on average.")]
Rate = Annotated[str, typer.Option("--rate", help="Speed of every link, such as 500mbit or 1gbit.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where source and nodes' storage are put meanwhile.", file_okay=False)
]
Install = Annotated[bool, typer.Option("--install", help="Let apt-get install iproute2 if it is missing (as root).")]


def stage(
    nodes: Nodes = 4,
    files: Files = 64,
    megabytes: Megabytes = 4.0,
    rate: Rate = "1gbit",
    folder: Folder = None,
    install: Install = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Does staging read every file of the source once in all, and none again after a kill? On an emulated cluster.

    Nodes are network namespaces of this machine, joined by links of a given speed. Files are staged to a folder of
    each node; then once more to other folders, where the process of one node is killed in the middle, and all are
    started again. Opens of source files are counted by the interpreter itself, not by the code that stages. It takes
    root and iproute2, and half a minute.

    **Examples**

    - `sudo halocline bench stage`: a table.

    - `sudo halocline bench stage --nodes 8 --files 1000 --megabytes 0.1`: many small files.

    - `sudo halocline bench stage --json | tail -1`: everything.

    **Reading it**: *opens* should be the number of files, and *read again* 0. *links alone* is how long the links
    take to carry to each node what the others have read; staging takes about as long, or as long as the disk needs.

    **Exit status**: 0 measured and every byte right, 2 no root, no iproute2, or a copy that is not right.
    """
    from .. import cluster
    from ..stage import StagePlan, measure_stage

    progress = progress_console()
    with clear_errors(COMMAND, debug):
        plan = StagePlan(nodes=nodes, files=files, megabytes=megabytes, rate=rate.strip())
        plan.check()
        if install:
            cluster.install()
        result = measure_stage(plan, lambda text: say(progress, text), folder)
    if as_json:
        print_json(result)
    else:
        show_stage(result)


def show_stage(result: Mapping[str, Any]) -> None:
    stdout().print(
        fact_table(
            f"{result['files']} files ({size_text(result['source_bytes'])}) to {result['nodes']} nodes",
            {
                "opens of source files": f"{result['opens']}",
                "seconds": f"{result['seconds']:.2f}",
                "seconds, links alone": f"{result['link_seconds']:.2f}",
                "sent over the links": size_text(result["sent_bytes"]),
                f"node {result['killed_node']} killed: opens until then": f"{result['opens_before_kill']}",
                "finished on some node by then": f"{result['finished_at_kill']}",
                "opens when started again": f"{result['opens_after_kill']}",
                "finished files read again": f"{result['duplicate_reads_of_finished']}",
                "every byte right": "yes" if result["identical"] else "no",
            },
        )
    )
