"""Which ranks this process joins, and over which transport: the only place where that is decided."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import MeshError, did_you_mean
from . import process
from .joined import DEFAULT_DEADLINE, JoinedWorld
from .launcher import adopt_environment, started_by_mpiexec
from .mpi_joining import join_by_mpi

TRANSPORTS = ("torch", "mpi")

#: Not empty once ranks have joined over MPI: torch.distributed then runs, too, and its variables no longer tell.
_joined_by_mpi: list[bool] = []


def connect(deadline: float = DEFAULT_DEADLINE, transport: str | None = None) -> JoinedWorld | None:
    """Join the ranks that a launcher started; None if this process is alone. By all ranks together."""
    chosen = transport or os.environ.get("HALOCLINE_TRANSPORT") or _found()
    _check_name(chosen)
    if chosen == "torch":
        return process.connect(deadline)
    world = join_by_mpi(deadline)
    _joined_by_mpi.append(True)
    return world


def _found() -> str:
    """The transport by the environment. Variables of torchrun and Slurm come first, since MPI's may be inherited."""
    if _joined_by_mpi:
        return "mpi"
    if dist.is_initialized() or adopt_environment():
        return "torch"
    return "mpi" if started_by_mpiexec(os.environ) else "torch"


def check_transport(joined: JoinedWorld, transport: str | None) -> None:
    """Raise MeshError if the ranks have joined over another transport already."""
    if transport is None:
        return
    _check_name(transport)
    by = joined.capabilities.transport
    if by != transport:
        raise MeshError(f"the ranks have joined over {by!r} already; say hc.init(transport={transport!r}) before that")


def _check_name(transport: str) -> None:
    """Raise MeshError for an unknown transport."""
    if transport not in TRANSPORTS:
        raise MeshError(
            f"no transport {transport!r}{did_you_mean(transport, TRANSPORTS)}; it is {' or '.join(TRANSPORTS)}"
        )
