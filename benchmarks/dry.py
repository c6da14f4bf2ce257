"""``bench dry``: how long it takes to write down a step of one rank of many."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from halocline.distribute import distribute
from halocline.program import Record, record
from halocline.program import dry as dry_ranks
from halocline.rules import shard
from halocline.workloads.unet3d import UNet3d
from halocline.world import Mesh


def measure_dry(size: int, mesh: dict[str, int], rank: int, repeat: int) -> dict[str, Any]:
    """The median of ``repeat`` records of a training step of the 3D U-Net."""
    seconds, record = [], None
    for _ in range(max(1, repeat)):
        start = time.perf_counter()
        record = record_step(size, mesh, rank)
        seconds.append(time.perf_counter() - start)
    assert record is not None
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "first_seconds": seconds[0],  # torch imports what meta tensors need on first use
        "rank": rank,
        "ranks": record.ranks,
        "mesh": mesh,
        "size": size,
        "operations": len(record.operations),
        "flops": record.flops,
        "messages": record.messages,
        "sent_bytes": record.sent_bytes,
    }


def record_step(size: int, sizes: dict[str, int], rank: int) -> Record:
    """A step as ``rank`` would run it, on meta tensors."""
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
