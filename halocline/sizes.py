"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from .errors import SizeError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def bytes_from(key: str, size: str | int) -> int:
    """Bytes of a size such as ``"32GiB"``; a number is taken as bytes. ``key`` names it in the error.

    >>> bytes_from("data.memory", "1.5 GiB"), bytes_from("data.memory", "200MB"), bytes_from("data.memory", "0")
    (1610612736, 200000000, 0)
    """
    if isinstance(size, int) and size >= 0:
        return size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found.group(2).upper() not in _UNITS:
        raise SizeError(f"{key} = {size!r}: give a size, such as 8GiB or 500MB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def size_text(count: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
