"""The facts that the checks look at: this machine, its software and its network.

Every function returns plain data, and None or an empty value where the system does not say. None of them waits without
a limit.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import halocline

from ..sizes import file_text, free_memory, usable_cores
from ..world.rendezvous import is_loopback, within
from ..world.tcp import card_address

#: Packages that only some runs need, and what for.
OPTIONAL = {
    "h5py": "HDF5 files",
    "zarr": "Zarr stores",
    "nibabel": "NIfTI files",
    "pydantic": "training settings",
    "mpi4py": "ranks over MPI",
    "networkx": "torch.compile",
}
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_RESOLVE = 5.0  # seconds for a name server
_MPI_WAIT = 30.0  # seconds for the process that starts MPI


@dataclass(frozen=True)
class Interface:
    """A network interface; ``up`` is None where the system does not say."""

    name: str
    address: str | None
    up: bool | None

    @property
    def usable(self) -> bool:
        """Can ranks communicate over it?"""
        return self.up is None or (self.up and self.address is not None)

    @property
    def loopback(self) -> bool:
        """Does it stay on this machine?"""
        return is_loopback(self.address) if self.address else self.name in ("lo", "lo0")

    def __str__(self) -> str:
        return f"{self.name} ({self.address or 'no address'}{ {None: '', True: ', up', False: ', down'}[self.up] })"


def devices() -> dict[str, Any]:
    """What this process may use: cores, memory, GPUs and limits. Sizes in bytes; None where the system does not say.

    Limits of a container (cgroup) count where they are lower than the machine's.
    """
    has_gpus = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count() if has_gpus else 0)]
    limit, has = file_text("/sys/fs/cgroup/memory.max"), dict.fromkeys(("memory", "files", "shared"))
    # Where the system lacks a function the value stays None.
    with suppress(ValueError, OSError, AttributeError):
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        has["memory"] = min(pages, int(limit)) if limit.isdigit() else pages
    with suppress(OSError, AttributeError):
        shared = os.statvfs("/dev/shm")
        has["shared"] = shared.f_frsize * shared.f_blocks
    with suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        has["files"] = None if soft == resource.RLIM_INFINITY else soft
    return {
        "cores": usable_cores(),
        "machine_cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": has["memory"],
        "memory_available_bytes": free_memory(),
        "open_files": has["files"],
        "shared_memory_bytes": has["shared"],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpus and dist.is_nccl_available() else None,
        "gpus": [{"name": one.name, "memory_bytes": one.total_memory} for one in gpus],
        "gpu_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),  # whether torch can use them or not
    }


def backends() -> dict[str, bool]:
    """The backends of torch.distributed, and whether this build of torch has them."""
    return {name: dist.is_available() and getattr(dist, f"is_{name}_available")() for name in BACKENDS}


def versions() -> dict[str, str | None]:
    """The versions of Python, of this library and of packages; None for a package that is not installed."""
    installed: dict[str, str | None] = dict.fromkeys(("numpy", "typer", "rich", *OPTIONAL))
    for name in installed:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    own = {"python": platform.python_version(), "torch": torch.__version__, "halocline": halocline.__version__}
    return {**own, **installed}


#: Runs in a process of its own: an MPI library that does not fit the machine may end the process.
_ASK_MPI = """
import mpi4py
mpi4py.rc.thread_level = "multiple"
from mpi4py import MPI
names = ("single", "funneled", "serialized", "multiple")
levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}
print(MPI.Get_library_version().replace(chr(0), "").splitlines()[0].expandtabs(1), levels[MPI.Query_thread()], sep="|")
"""


@cache
def ask_mpi() -> tuple[str, str, str]:
    """Name and thread level of the MPI library, or else an error text. Asked in a process of its own, outside any
    launcher."""
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "MPI_LOCAL", "PRTE_", "HYDI_"))}
    try:
        command = [sys.executable, "-c", _ASK_MPI]
        done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=_MPI_WAIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", "", str(error).replace(_ASK_MPI, "...")
    if done.returncode or "|" not in done.stdout:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with status {done.returncode}"]
        return "", "", said[-1][:200]
    library, _, level = done.stdout.strip().splitlines()[-1].partition("|")
    return re.sub(r"\s+", " ", library).strip(), level, ""


# ---- network ----


def interfaces() -> list[Interface]:
    """The network interfaces of this machine; none where the system does not list them."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []
    flags = {name: file_text(f"/sys/class/net/{name}/flags") for name in names}
    return [Interface(name, _address(name), bool(int(flags[name], 16) & 1) if flags[name] else None) for name in names]


def _address(interface: str) -> str | None:
    """The IPv4 address of an interface, else its IPv6 address."""
    if sys.platform == "linux":
        with suppress(OSError):
            return card_address(interface)
    rows = [line.split() for line in file_text("/proc/net/if_inet6").splitlines()]
    return next((str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == interface), None)


def resolve(host: str) -> str | None:
    """The first address of a host; None if it has none, or the name server does not answer within 5 s."""
    try:
        answers = within(_RESOLVE, lambda: socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP))
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return None
    return str(answers[0][4][0])


def gloo_loopback(interfaces: Sequence[Interface], env: Mapping[str, str]) -> bool:
    """Would gloo use loopback, over which ranks on other machines cannot reach this one?"""
    if names := env.get("GLOO_SOCKET_IFNAME"):
        return any(one.loopback for one in interfaces if one.name in names.split(","))
    address = resolve(socket.gethostname())
    return address is None or is_loopback(address)
