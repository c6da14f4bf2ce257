"""``halocline bench``: what things cost. Timings live here, never in tests."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from .output import Debug, Json, clear_errors, fact_table, print_json, size_text, stderr, stdout

bench = typer.Typer(no_args_is_help=True, help="Measure what things cost on this machine.", rich_markup_mode="markdown")

Size = Annotated[int, typer.Option("--size", help="Side of the cube.")]
Data = Annotated[int, typer.Option("--data", help="Samples side by side, one along each rank of the data axis.")]
Depth = Annotated[int, typer.Option("--depth", help="Ranks along depth.")]
Height = Annotated[int, typer.Option("--height", help="Ranks along height.")]
Rank = Annotated[int, typer.Option("--rank", help="Which rank to write down.")]
Repeat = Annotated[int, typer.Option("--repeat", help="How often; the median counts.")]


@bench.callback()
def group() -> None:
    """Measure what things cost on this machine."""


@bench.command()
def dry(
    size: Size = 256,
    data: Data = 1725,
    depth: Depth = 4,
    height: Height = 4,
    rank: Rank = 13_800,
    repeat: Repeat = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write down a training step of the 3D U-Net as one rank of many would run it, and say how long that takes.

    Nothing is computed and nothing moves: the program runs on meta tensors, through the code that runs between
    processes. By default rank 13,800 of 27,600, a sample of 256 cubed cut over 4 x 4 ranks.
    """
    with clear_errors("bench dry", debug), stderr().status("writing down a step"):
        result = _measure(size, {"data": data, "depth": depth, "height": height}, rank, repeat)
    if as_json:
        print_json(result)
        return
    stdout().print(
        fact_table(
            f"rank {rank} of {result['ranks']}, 3D U-Net at {size} cubed",
            {
                "seconds to record": f"{result['seconds']:.2f}",
                "local operations": str(result["operations"]),
                "floating-point operations": f"{result['flops'] / 1e12:.2f} T",
                "messages": str(result["messages"]),
                "handed to the transport": size_text(result["sent_bytes"]),
            },
        )
    )


def _measure(size: int, mesh: dict[str, int], rank: int, repeat: int) -> dict[str, Any]:
    seconds, found = [], None
    for _ in range(max(1, repeat)):
        start = time.perf_counter()
        found = _record(size, mesh, rank)
        seconds.append(time.perf_counter() - start)
    assert found is not None
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "first_seconds": seconds[0],  # torch imports what meta tensors need on first use
        "rank": rank,
        "ranks": found.ranks,
        "mesh": mesh,
        "size": size,
        "operations": len(found.operations),
        "flops": found.flops,
        "messages": found.messages,
        "sent_bytes": found.sent_bytes,
    }


def _record(size: int, sizes: dict[str, int], rank: int) -> Any:
    import torch
    import torch.nn.functional as F

    from .. import Mesh, distribute, shard
    from ..program import dry as dry_ranks
    from ..program import record
    from ..workloads.unet3d import UNet3d

    ranks = sizes["data"] * sizes["depth"] * sizes["height"]
    with dry_ranks(rank, ranks):
        mesh = Mesh(**sizes)
        with torch.device("meta"):
            model = distribute(UNet3d(), mesh)
            volume = torch.empty(sizes["data"], 1, size, size, size)
            target = torch.empty(sizes["data"], size, size, size, dtype=torch.long)
        x = shard(volume, mesh, {0: "data", 2: "depth", 3: "height"})
        y = shard(target, mesh, {0: "data", 1: "depth", 2: "height"})
        return record(lambda: F.cross_entropy(model(x), y).backward(), mesh)
