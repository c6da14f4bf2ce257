"""Cores, memory, GPUs and the limits that the system sets a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from .finding import Finding

TOPIC = "devices"
MIB, GIB = 1 << 20, 1 << 30
RANK_BYTES = 512 * MIB  # python, torch and a small network
FEW_FILES = 1024
FILES_A_PEER = 8  # every process group of a rank holds a connection to each of its peers
SMALL_SHARED = 512 * MIB  # containers often have 64 MiB, which workers of a DataLoader soon fill


@dataclass
class Devices:
    """What this process may use. None where the system does not say."""

    cores: int
    machine_cores: int
    threads: int
    memory_bytes: int | None
    memory_available_bytes: int | None
    open_files: int | None
    shared_memory_bytes: int | None
    cuda: str | None = None
    nccl: str | None = None
    gpus: list[dict[str, str | int]] = field(default_factory=list)
    gpu_files: int = 0  # device files of GPUs, whether torch can use them or not


def devices() -> Devices:
    return Devices(
        cores=cores(),
        machine_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=_memory(),
        memory_available_bytes=_available(),
        open_files=_open_files(),
        shared_memory_bytes=_shared_memory(),
        cuda=torch.version.cuda,
        nccl=_nccl(),
        gpus=_gpus(),
        gpu_files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
    )


def examine_devices(found: Devices, env: Mapping[str, str], ranks: int, world: int, launched: bool) -> list[Finding]:
    """For ``ranks`` on this machine of ``world`` in all; ``launched`` where they run now."""
    return [
        Finding(TOPIC, "cores", "ok", f"{found.cores} of {found.machine_cores} for this process"),
        _threads(found, env, ranks, launched),
        _enough_memory(found, ranks),
        _gpu(found),
        *_files(found, world),
        *_shared(found),
    ]


def gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


def cores() -> int:
    """As bound to this process, or as a container allows."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    allowed = int(quota) // int(period) if quota.isdigit() and period.isdigit() else bound
    return max(1, min(bound, allowed))


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _memory() -> int | None:
    limit = _text("/sys/fs/cgroup/memory.max")
    found = [int(limit)] if limit.isdigit() else []
    with suppress(ValueError, OSError, AttributeError):  # no such names on this system
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def _available() -> int | None:
    lines = [line.split() for line in _text("/proc/meminfo").splitlines()]
    kib = next((int(words[1]) for words in lines if words[0] == "MemAvailable:"), None)
    total = _memory()
    return None if kib is None else min(kib << 10, total or kib << 10)


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared_memory() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return stat.f_frsize * stat.f_blocks


def _gpus() -> list[dict[str, str | int]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [{"name": one.name, "memory_bytes": one.total_memory} for one in found]


def _nccl() -> str | None:
    there = torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()
    return ".".join(map(str, torch.cuda.nccl.version())) if there else None


def _threads(found: Devices, env: Mapping[str, str], ranks: int, launched: bool) -> Finding:
    """Of this process. What the ranks of a machine take together is seen when they meet."""
    setting, remedy = env.get("OMP_NUM_THREADS"), f"export OMP_NUM_THREADS={max(1, found.cores // ranks)}"
    if setting is not None and not setting.isdigit():
        return Finding(TOPIC, "threads", "warning", f"OMP_NUM_THREADS={setting} is no number", remedy)
    if not launched and setting is None:
        text = f"OMP_NUM_THREADS is not set: for {ranks} ranks on this machine, {remedy}"
        return Finding(TOPIC, "threads", "ok", text)
    text = f"{found.threads} a rank, on {found.cores} cores"
    if found.threads * (1 if launched else ranks) > found.cores:
        crowd = text if launched else f"{text} for {ranks} ranks"
        return Finding(TOPIC, "threads", "warning", f"{crowd}: they will wait for each other", remedy)
    return Finding(TOPIC, "threads", "ok", text)


def _enough_memory(found: Devices, ranks: int) -> Finding:
    text = f"{gib(found.memory_bytes)}, of which {gib(found.memory_available_bytes)} are free"
    if found.memory_available_bytes is not None and found.memory_available_bytes < ranks * RANK_BYTES:
        remedy = f"end other programs or start fewer ranks: each takes {RANK_BYTES // MIB} MiB before its first tensor"
        return Finding(TOPIC, "memory", "warning", f"{text}: little for {ranks} ranks", remedy)
    return Finding(TOPIC, "memory", "ok", text)


def _gpu(found: Devices) -> Finding:
    if found.gpus:
        each = ", ".join(f"{one['name']} with {gib(int(one['memory_bytes']))}" for one in found.gpus)
        return Finding(TOPIC, "GPUs", "ok", f"{each}; CUDA {found.cuda}, NCCL {found.nccl}")
    if not found.gpu_files:
        return Finding(TOPIC, "GPUs", "ok", "none: ranks run on the CPU")
    if found.cuda is None:
        remedy = "install a CUDA build of torch from pytorch.org to use them"
        return Finding(TOPIC, "GPUs", "warning", f"{found.gpu_files}, but this torch is built without CUDA", remedy)
    remedy = "see whether nvidia-smi works and what CUDA_VISIBLE_DEVICES says; the driver may be too old for torch"
    text = f"{found.gpu_files}, but torch (CUDA {found.cuda}) can use none"
    return Finding(TOPIC, "GPUs", "warning", text, remedy)


def _files(found: Devices, world: int) -> list[Finding]:
    needed = max(FEW_FILES, FILES_A_PEER * world)
    if found.open_files is None or found.open_files >= needed:
        return []
    remedy = f"ulimit -n {max(needed, 65536)}, in the shell or script that starts the ranks"
    return [Finding(TOPIC, "open files", "warning", f"at most {found.open_files}; {needed} are wanted", remedy)]


def _shared(found: Devices) -> list[Finding]:
    size = found.shared_memory_bytes
    if size is None or size >= SMALL_SHARED:
        return []
    remedy = "start the container with more, such as docker run --shm-size=8g, or with --ipc=host"
    text = f"/dev/shm has {size // MIB} MiB, too little for the workers of a DataLoader"
    return [Finding(TOPIC, "shared memory", "warning", text, remedy)]
