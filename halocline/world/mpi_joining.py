"""Joining ranks that mpiexec started, with torch.distributed beside MPI."""

from __future__ import annotations

import hashlib
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MeshError
from .events import Label
from .mpi import MpiWorld
from .process import start_torch
from .rendezvous import listening_socket, within
from .text import broadcast_text


def join_by_mpi(deadline: float) -> MpiWorld:
    """A world over MPI, with torch.distributed started beside it for other users. By all ranks together."""
    world = MpiWorld(deadline)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
            raise MeshError(
                f"torch.distributed has this process as rank {dist.get_rank()} of {dist.get_world_size()}, MPI as rank "
                f"{world.rank} of {world.size}; start it once, with mpiexec or with torchrun"
            )
    elif world.size > 1:
        store = _meet(world)
        start_torch(deadline, store=store, rank=world.rank, world_size=world.size)
    return world


def _meet(world: MpiWorld) -> Any:
    """Open torch's store at rank 0, and set the variables that torchrun would have set."""
    everyone, label = tuple(range(world.size)), Label("joining", "the world", "control")
    hosts = torch.zeros(world.size, dtype=torch.int64)
    hosts[world.rank] = int.from_bytes(hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest())
    hosts = world.sum(hosts, everyone, label)
    mine = [rank for rank in everyone if hosts[rank] == hosts[world.rank]]
    one_machine = len(mine) == world.size
    address = "127.0.0.1" if one_machine else socket.gethostname()
    listener = listening_socket(address) if world.rank == 0 else None
    port = listener.getsockname()[1] if listener else 0
    address, port = broadcast_text(world, 0, f"{address} {port}", label).split()
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(mine.index(world.rank)),
        LOCAL_WORLD_SIZE=str(len(mine)), MASTER_ADDR=address, MASTER_PORT=port,
    )  # fmt: skip
    options: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener else {}
    wait = timedelta(seconds=world.deadline)
    store = dist.TCPStore  # type: ignore[attr-defined]  # public, though its stub does not say so
    return within(
        world.deadline, lambda: store(address, int(port), world.size, listener is not None, wait, False, **options)
    )
