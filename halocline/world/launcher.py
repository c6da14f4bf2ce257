"""Which rank of a run this process is, from its launcher's environment: the only place where that is read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import MeshError

#: Rank and size, as the launchers of MPICH, Open MPI and PMIx name them.
_MPI = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network card that stays on this machine


@dataclass(frozen=True)
class RankInfo:
    """This process among the ranks of its run. ``size`` is 0 where the environment does not say."""

    by: str  # "torchrun" (or another launcher that sets its variables), "Slurm" or "MPI"
    rank: int
    size: int


def rank_info_of(environment: Mapping[str, str]) -> RankInfo | None:
    """This process's rank from environment variables; None if no launcher started it, or started it alone.

    Variables of torchrun come first, then Slurm's, since those of MPI may be inherited from a shell on a cluster.

    >>> rank_info_of({"PMI_RANK": "1", "PMI_SIZE": "4"}), rank_info_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    (RankInfo(by='MPI', rank=1, size=4), None)
    """
    if "RANK" in environment:
        return RankInfo("torchrun", _number(environment, "RANK"), _number(environment, "WORLD_SIZE", 1))
    tasks = _number(environment, "SLURM_NTASKS", 1)
    if "SLURM_PROCID" in environment and tasks > 1:
        return RankInfo("Slurm", _number(environment, "SLURM_PROCID"), tasks)
    for rank, size in _MPI:
        if rank in environment:
            count = _number(environment, size)
            return None if count == 1 else RankInfo("MPI", _number(environment, rank), count)
    return None


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    """A variable as a number from 0; MeshError if it is none."""
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise MeshError(f"the environment has {name}={text!r}, and a number from 0 is needed; unset it, or mend it")
    return int(text)


def this_rank_info() -> RankInfo | None:
    """The rank of this process. Asks MPI itself if ranks should join over MPI and no variable says more."""
    found = rank_info_of(os.environ)
    if found is not None or os.environ.get("HALOCLINE_TRANSPORT") != "mpi":
        return found
    from .mpi_library import library

    world = library().COMM_WORLD
    return RankInfo("MPI", world.Get_rank(), world.Get_size()) if world.Get_size() > 1 else None


def started_by_mpiexec(environment: Mapping[str, str]) -> bool:
    """Is this process one of several ranks that a launcher of MPI started?"""
    found = rank_info_of(environment)
    return found is not None and found.by == "MPI"


def adopt_environment() -> bool:
    """Set torchrun's variables from Slurm's, if need be; False if neither launcher started this process."""
    found = rank_info_of(os.environ)
    if found is None or found.by == "MPI" or (found.by == "torchrun" and "WORLD_SIZE" not in os.environ):
        return False
    if found.by == "torchrun":
        return True
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(found.rank), str(found.size)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    os.environ.setdefault("LOCAL_WORLD_SIZE", _tasks_per_node())
    os.environ.setdefault("MASTER_ADDR", first_host(os.environ.get("SLURM_JOB_NODELIST", "localhost")))
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 40000))
    return True


def _tasks_per_node() -> str:
    """The ranks of a node, which Slurm gives as "4", "4(x2)" or "4,3" in one of several variables; by default 1."""
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if os.environ.get(name):
            return re.split(r"[(,]", os.environ[name])[0]
    return "1"


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-010,12],login1"), first_host("a1,a2")
    ('gpu007', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodelist)
    if not match:
        raise MeshError(f"SLURM_JOB_NODELIST {nodelist!r} names no host; set MASTER_ADDR by hand")
    prefix, numbers = match.groups()
    return prefix + (re.split(r"[-,]", numbers)[0] if numbers else "")


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet. ``served``: torchrun itself serves the store there."""

    address: str
    port: int
    served: bool


def rendezvous_of(environment: Mapping[str, str]) -> Rendezvous:
    """The meeting point from torchrun's variables; port 0 if they do not name one."""
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rendezvous(environment.get("MASTER_ADDR", "127.0.0.1"), _number(environment, "MASTER_PORT"), served)


@dataclass(frozen=True)
class NodeInfo:
    """A rank among those of its node, and its node among those of the run."""

    local_rank: int
    local_size: int
    node: int


def ranks_on_this_node(otherwise: int) -> int:
    """The number of ranks on this machine; ``otherwise`` if the environment does not say."""
    return _number(os.environ, "LOCAL_WORLD_SIZE", otherwise)


def is_local(environment: Mapping[str, str]) -> bool:
    """Are all ranks of the run on this machine, as far as the environment says?"""
    size = _number(environment, "WORLD_SIZE")
    return size > 0 and _number(environment, "LOCAL_WORLD_SIZE") == size


def node_info_of(environment: Mapping[str, str]) -> NodeInfo:
    """This rank's place on its node; a single rank on node 0 if the environment says nothing."""
    node = environment.get("GROUP_RANK") or environment.get("SLURM_NODEID") or ""
    local = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE", 1)
    return NodeInfo(*local, int(node) if node.isdigit() else 0)
