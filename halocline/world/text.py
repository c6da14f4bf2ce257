"""Text sent between ranks."""

from __future__ import annotations

import torch

from .base import World
from .events import Label

_LONGEST = 512  # bytes


def broadcast_text(world: World, source: int, text: str, label: Label, longest: int = _LONGEST) -> str:
    """The text of rank ``source`` on every rank, cut after ``longest`` bytes.

    All ranks of the world call it, with the same ``longest``.
    """
    data = text.encode("utf-8", "backslashreplace")[:longest]
    line = torch.zeros(longest, dtype=torch.uint8)
    if world.rank == source and data:
        line[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    ranks = (source, *(rank for rank in range(world.size) if rank != source))
    return bytes(world.broadcast(line, ranks, label).tolist()).rstrip(b"\0").decode(errors="ignore")
