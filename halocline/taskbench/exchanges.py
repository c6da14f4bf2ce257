"""The messages of a row over each runtime that has messages: a World, bare torch.distributed, bare mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..world import Label, PendingExchange, Receive, Send, World, memory_of
from .execute import MakeExchange, TaskExchange

Messages = Sequence[tuple[int, Tensor]]
Sizes = Sequence[tuple[int, int]]


class WorldExchange(TaskExchange):
    """Through a world, as the library itself exchanges: counted, tagged and checked."""

    def __init__(self, world: World, number: int, sends: Messages, receives: Sizes) -> None:
        self._world, self._ranks = world, (*range(world.size),)
        self._sends = [Send(peer, message) for peer, message in sends]
        self._receives = [Receive(peer, elements) for peer, elements in receives]
        self._like, self._label = torch.empty(0, dtype=torch.float64), Label("taskbench", f"graph {number}")
        self._pending: PendingExchange | None = None

    def begin(self) -> None:
        self._pending = self._world.begin(self._sends, self._receives, self._like, self._ranks, self._label)

    def wait(self) -> list[memoryview]:
        assert self._pending is not None
        return [memory_of(buffer) for buffer in self._pending.wait()]


def over_world(world: World) -> MakeExchange:
    """Exchanges through a world."""
    return lambda number, sends, receives: WorldExchange(world, number, sends, receives)


class _Reused(TaskExchange):
    """An exchange into buffers that are made once, as a program without a library would."""

    def __init__(self, number: int, sends: Messages, receives: Sizes) -> None:
        self._number, self._sends = number, sends
        self._buffers = [(peer, torch.empty(elements, dtype=torch.float64)) for peer, elements in receives]
        self._memory = [memory_of(buffer) for _, buffer in self._buffers]
        self._works: Any = []


class TorchExchange(_Reused):
    """``isend`` and ``irecv``."""

    def begin(self) -> None:
        tag = self._number
        self._works = [dist.irecv(buffer, peer, tag=tag) for peer, buffer in self._buffers]
        self._works += [dist.isend(message, peer, tag=tag) for peer, message in self._sends]

    def wait(self) -> list[memoryview]:
        for work in self._works:
            work.wait()
        return self._memory


class BatchExchange(TorchExchange):
    """``batch_isend_irecv``."""

    def begin(self) -> None:
        tag = self._number
        operations = [dist.P2POp(dist.irecv, buffer, peer, tag=tag) for peer, buffer in self._buffers]
        operations += [dist.P2POp(dist.isend, message, peer, tag=tag) for peer, message in self._sends]
        self._works = dist.batch_isend_irecv(operations) if operations else []


class MpiExchange(_Reused):
    """``Isend`` and ``Irecv`` of mpi4py."""

    def __init__(self, number: int, sends: Messages, receives: Sizes) -> None:
        super().__init__(number, sends, receives)
        from mpi4py import MPI

        self._comm, self._wait_all = MPI.COMM_WORLD, MPI.Request.Waitall
        self._outgoing = [(message.numpy(), peer) for peer, message in sends]
        self._incoming = [(buffer.numpy(), peer) for peer, buffer in self._buffers]

    def begin(self) -> None:
        comm, tag = self._comm, self._number
        self._works = [comm.Irecv(buffer, peer, tag) for buffer, peer in self._incoming]
        self._works += [comm.Isend(message, peer, tag) for message, peer in self._outgoing]

    def wait(self) -> list[memoryview]:
        self._wait_all(self._works)
        return self._memory
