"""The content of a copy: a table of pieces of tensors, then their bytes. A piece is a box of a tensor by name."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import CheckpointError

_ALIGNED = 64  # bytes, so that every dtype can be read where it lies
_TABLES = 4096  # bytes, of which the table's place is a multiple: tables of the same tensors have the same size
_LENGTH = 8

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CopiedPiece:
    """A box of a tensor, and where its bytes lie in a copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    start: int = 0

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def size(self) -> int:
        """Its bytes."""
        return volume(self.box) * dtype_named(self.dtype).itemsize


def volume(box: Box) -> int:
    """The elements of a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def dtype_named(name: str) -> torch.dtype:
    """A dtype by its name. CheckpointError if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a copy of the state names the dtype {name!r}, which torch does not have")
    return found


def laid_out(pieces: Sequence[CopiedPiece], tree: Any) -> tuple[bytes, list[CopiedPiece], int]:
    """The beginning of a copy with its table, the pieces with their places, and the bytes of all."""
    starts, position = [], 0
    for piece in pieces:
        starts.append(position)
        position += -(-piece.size // _ALIGNED) * _ALIGNED
    told = [[p.name, p.dtype, p.shape, p.box, start] for p, start in zip(pieces, starts, strict=True)]
    table = json.dumps({"pieces": told, "tree": tree}).encode()
    room = -(-(_LENGTH + len(table) + 256) // _TABLES) * _TABLES
    placed = [CopiedPiece(p.name, p.dtype, p.shape, p.box, room + at) for p, at in zip(pieces, starts, strict=True)]
    return len(table).to_bytes(_LENGTH, "little") + table, placed, room + position


def read_table(memory: mmap.mmap) -> tuple[list[CopiedPiece], Any]:
    """The pieces of a copy, and the tree of the state if it holds it."""
    length = int.from_bytes(memory[:_LENGTH], "little")
    try:
        table = json.loads(memory[_LENGTH : _LENGTH + length])
        room = -(-(_LENGTH + length + 256) // _TABLES) * _TABLES
        pieces = [
            CopiedPiece(str(name), str(dtype), tuple(shape), tuple((a, b) for a, b in box), room + start)
            for name, dtype, shape, box, start in table["pieces"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"a copy of the state in memory is damaged: {error}") from error
    return pieces, table["tree"]


def view(memory: Any, piece: CopiedPiece) -> Tensor:
    """The piece as a tensor on the memory of the copy."""
    dtype = dtype_named(piece.dtype)
    if not piece.size:
        return torch.empty(piece.extent, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=piece.size, offset=piece.start)
    return flat.view(dtype).reshape(piece.extent)
