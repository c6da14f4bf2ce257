"""Versions of Python and packages, and the backends that torch was built with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist

import halocline

from .finding import Finding

TOPIC = "software"
TORCH = (2, 11)  # the oldest that the project supports, as pyproject.toml has it

Versions = dict[str, str | None]

#: Optional packages, and what needs them. The commands want all of the first.
COMMANDS = {"typer": "the commands", "rich": "the commands", "matplotlib": "the picture of halocline demo"}
OTHERS = {
    "h5py": "a loader of your own for HDF5 files",
    "zarr": "a loader of your own for Zarr stores",
    "mpi4py": "ranks over MPI",
    "networkx": "torch.compile",
    "pydantic": "no part of this version",
    "scipy": "no part of this version",
}
BACKENDS = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
}


def versions() -> Versions:
    """None for a package that is not installed."""
    own = {"python": platform.python_version(), "torch": torch.__version__, "halocline": halocline.__version__}
    return {**own, **{name: _installed(name) for name in ("numpy", *COMMANDS, *OTHERS)}}


def backends() -> dict[str, bool]:
    return {name: dist.is_available() and available() for name, available in BACKENDS.items()}


def examine_software(found: Mapping[str, str | None], available: Mapping[str, bool], gpus: int) -> list[Finding]:
    return [
        Finding(TOPIC, "python", "ok", found["python"] or ""),
        Finding(TOPIC, "halocline", "ok", found["halocline"] or ""),
        _torch(found["torch"] or ""),
        _numpy(found["numpy"]),
        *_optional(found),
        _backends(available, gpus),
        _mpi(found["mpi4py"]),
    ]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(version: str) -> Finding:
    oldest = ".".join(map(str, TORCH))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TORCH:
        remedy = f"install a newer one: pip install 'torch>={oldest}'"
        return Finding(TOPIC, "torch", "problem", f"{version}; {oldest} or newer is needed", remedy)
    return Finding(TOPIC, "torch", "ok", f"{version} ({oldest} or newer is needed)")


def _numpy(version: str | None) -> Finding:
    if version is None:
        return Finding(TOPIC, "numpy", "problem", "not installed", "pip install numpy")
    return Finding(TOPIC, "numpy", "ok", version)


def _optional(found: Mapping[str, str | None]) -> list[Finding]:
    present = [f"{name} {found[name]}" for name in (*COMMANDS, *OTHERS) if found[name]]
    absent = [f"{name} ({use})" for name, use in OTHERS.items() if not found[name]]
    text = f"installed: {', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    wanted = [f"{name}, which {use} needs" for name, use in COMMANDS.items() if not found[name]]
    missing = [
        Finding(TOPIC, "packages of the commands", "warning", f"not installed: {one}", "pip install 'halocline[cli]'")
        for one in wanted
    ]
    return [Finding(TOPIC, "optional packages", "ok", text), *missing]


def _backends(available: Mapping[str, bool], gpus: int) -> Finding:
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in available.items())
    if not available["gloo"]:
        remedy = "install a torch with torch.distributed and gloo: the wheels of pytorch.org for Linux have both"
        return Finding(TOPIC, "backends", "problem", text, remedy)
    if gpus and not available["nccl"]:
        remedy = "install a CUDA build of torch that has NCCL, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        return Finding(TOPIC, "backends", "problem", f"{text}; ranks with a GPU each talk over nccl", remedy)
    return Finding(TOPIC, "backends", "ok", text)


#: In a process of its own: an MPI that does not fit its machine may end the process that starts it.
_ASK_MPI = """
import mpi4py
mpi4py.rc.thread_level = "multiple"
from mpi4py import MPI
names = ("single", "funneled", "serialized", "multiple")
levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}
print(MPI.Get_library_version().replace(chr(0), "").splitlines()[0].expandtabs(1), levels[MPI.Query_thread()], sep="|")
"""
_MPI_WAIT = 30.0  # seconds


def _mpi(version: str | None) -> Finding:
    """Ranks over MPI need an MPI that several threads may call."""
    if version is None:
        return Finding(TOPIC, "MPI", "ok", "mpi4py is not installed; ranks talk over torch.distributed")
    library, level, error = _ask_mpi()
    if error:
        remedy = "pip install mpich, or load the machine's MPI; without it ranks talk over torch.distributed"
        return Finding(TOPIC, "MPI", "warning", f"mpi4py {version} finds no MPI that starts: {error}", remedy)
    text = f"{library} (mpi4py {version}), thread level {level}"
    if level != "multiple":
        remedy = "take an MPI that was built with the thread level 'multiple', or start the ranks with torchrun"
        return Finding(TOPIC, "MPI", "warning", f"{text}; ranks over MPI need 'multiple'", remedy)
    return Finding(TOPIC, "MPI", "ok", text)


@cache
def _ask_mpi() -> tuple[str, str, str]:
    """Name and version, thread level; or what went wrong. As a process of no launcher, whoever started this one."""
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "MPI_LOCAL", "PRTE_", "HYDI_"))}
    try:
        asked = [sys.executable, "-c", _ASK_MPI]
        done = subprocess.run(asked, env=alone, capture_output=True, text=True, timeout=_MPI_WAIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", "", str(error).replace(_ASK_MPI, "...")
    if done.returncode or "|" not in done.stdout:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with status {done.returncode}"]
        return "", "", said[-1][:200]
    library, _, level = done.stdout.strip().splitlines()[-1].partition("|")
    return re.sub(r"\s+", " ", library).strip(), level, ""
