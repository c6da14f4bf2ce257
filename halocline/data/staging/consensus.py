"""How ranks agree while they stage: each contributes a row of numbers, and an error on one rank is raised on all."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...world import Label, World, broadcast_text
from ...world.agreement import gather_rows
from ...world.launcher import node_info_of
from .listing import StageError, Tick
from .watch import Watched

T = TypeVar("T")
Table = NDArray[np.int64]

LABEL = Label("stage", "agreement")
HEARTBEAT = 0.25  # seconds between agreements while any rank still works: far below any deadline
_TEXT = 4096  # bytes of an error that all ranks get to see


class Consensus:
    """Agreement among all ranks. Those with a *seat* contribute a row to each table; the others only receive it."""

    def __init__(self, world: World, patience: float) -> None:
        self.world, self.patience = world, patience
        self.ranks = tuple(range(world.size))
        self.seats: tuple[int, ...] = self.ranks

    def exchange_rows(self, row: Sequence[int], error: str | None = None) -> Table:
        """Everybody's row, by seat. Where some rank has an error, all raise that of the first."""
        # The last column says who has failed; the text follows from the first of them.
        mine = [*row, int(error is not None)]
        table = self.gathered(torch.tensor(mine, dtype=torch.int64)).numpy()
        failed = np.flatnonzero(table[:, -1])
        if failed.size:
            first = self.seats[int(failed[0])]
            raise StageError(broadcast_text(self.world, first, error or "", LABEL, _TEXT))
        return table[:, :-1]

    def gathered(self, row: Tensor) -> Tensor:
        """Rows of whole numbers from 0, one a seat; the same shape on all ranks."""
        return gather_rows(self.world, row, LABEL, self.seats)

    def broadcast(self, message: bytes | None) -> bytes:
        """The message of rank 0, on all ranks."""
        length = int(self.gathered(torch.tensor([len(message or b"")])).max())
        sent = torch.frombuffer(bytearray(message if message is not None else bytes(length)), dtype=torch.uint8)
        return self.world.broadcast(sent, self.ranks, LABEL).numpy().tobytes()

    def run(self, work: Callable[[Tick], T] | None, who: str) -> T | None:
        """Each rank's own work, or none. All go on when the last has done it, and raise if one has failed.

        They keep hearing of each other meanwhile, so that work may last longer than the world's deadline.
        """
        watched = None if work is None else Watched(work, self.patience)
        while True:
            busy = watched is not None and not watched.wait(HEARTBEAT)
            error = None if watched is None or busy else watched.error
            table = self.exchange_rows([int(busy)], None if error is None else f"{who}: {reason(error)}")
            if not table.any():
                return None if watched is None else watched.result()


def reason(error: BaseException) -> str:
    """An error as the end of a sentence; one of our own says it all."""
    if isinstance(error, StageError):
        return str(error)
    if isinstance(error, OSError):
        named = f" ({error.filename!a})" if error.filename is not None else ""
        return f"{error.strerror or error}{named}"
    return f"{type(error).__name__}: {error}"


# ---- nodes ----


def find_nodes(consensus: Consensus) -> tuple[tuple[int, ...], int]:
    """The ranks that work, one a node, and the number of this rank's node among them."""
    here = node_info_of(os.environ)
    host = zlib.crc32(socket.gethostname().encode())
    # Hosts by a hash of their names, since tables hold numbers.
    table = consensus.exchange_rows([1 + here.local_rank, host, here.node])
    workers = tuple(int(rank) for rank in np.flatnonzero(table[:, 0] == 1))
    if not workers:
        return consensus.ranks, consensus.world.rank
    return workers, _own(workers, consensus.world.rank, table)


def _own(workers: tuple[int, ...], rank: int, table: Any) -> int:
    """The node of a rank that does not work: that of the worker on the same host."""
    if rank in workers:
        return workers.index(rank)
    alike = [node for node, worker in enumerate(workers) if (table[worker, 1:] == table[rank, 1:]).all()]
    if len(alike) == 1:
        return alike[0]
    return max(0, sum(worker <= rank for worker in workers) - 1)  # ranks of a node follow each other
