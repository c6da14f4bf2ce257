"""Sizes of memory, as people write them, and what the machine has: free memory and cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import SizeError

_CGROUP = "/sys/fs/cgroup"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def bytes_from(key: str, size: str | int) -> int:
    """Bytes of a size such as ``"32GiB"``; a number is taken as bytes. ``key`` names it in the error.

    >>> bytes_from("data.memory", "1.5 GiB"), bytes_from("data.memory", "200MB"), bytes_from("data.memory", "0")
    (1610612736, 200000000, 0)
    """
    if isinstance(size, int) and size >= 0:
        return size
    written = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", str(size))
    if written is None or written.group(2).upper() not in _UNITS:
        raise SizeError(f"{key} = {size!r}: give a size, such as 8GiB or 500MB")
    return int(float(written.group(1)) * _UNITS[written.group(2).upper()])


def size_text(count: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


def free_memory() -> int:
    """Free bytes of the machine or of its container; a huge number where the system does not tell."""
    limits = [1 << 62]
    if told := re.search(r"MemAvailable:\s+(\d+)", file_text("/proc/meminfo")):
        limits.append(1024 * int(told.group(1)))
    limit, used = file_text(f"{_CGROUP}/memory.max"), file_text(f"{_CGROUP}/memory.current")
    if limit.isdigit() and used.isdigit():
        cache = re.search(r"^inactive_file (\d+)$", file_text(f"{_CGROUP}/memory.stat"), re.MULTILINE)
        limits.append(int(limit) - int(used) + (int(cache.group(1)) if cache else 0))  # files are let go of first
    return max(0, min(limits))


def file_text(path: str) -> str:
    """The content of a small file of the system, without white space around it; "" where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def usable_cores() -> int:
    """The cores that this process is bound to, or fewer if its container allows fewer."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = file_text("/sys/fs/cgroup/cpu.max").partition(" ")
    allowed = int(quota) // int(period) if quota.isdigit() and period.isdigit() else bound
    return max(1, min(bound, allowed))
