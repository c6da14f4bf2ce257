"""Text sent between ranks."""

from __future__ import annotations

import torch

from .base import World
from .events import Label

_LONGEST = 512  # bytes


def broadcast_text(world: World, source: int, text: str, label: Label) -> str:
    """What rank ``source`` gives as ``text``, on every rank of the world; cut after 512 bytes. Called by all ranks."""
    line, data = torch.zeros(_LONGEST, dtype=torch.uint8), text.encode()[:_LONGEST]
    if world.rank == source and data:
        line[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    ranks = (source, *(rank for rank in range(world.size) if rank != source))
    return bytes(world.broadcast(line, ranks, label).tolist()).rstrip(b"\0").decode(errors="ignore")
