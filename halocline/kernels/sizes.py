"""How large an operand may be before its work is done in chunks, and how large the chunks are.

From 2^31 elements on, indices no longer fit 32 bits: cuDNN's fast kernels end there, and some of torch's own crash.
A card may do better with smaller chunks; what ``halocline tune`` measured on it is kept in a small file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Sizes(NamedTuple):
    """Operands of up to ``whole`` elements are left alone; larger work goes in chunks of at most ``chunk``."""

    whole: int
    chunk: int


LARGEST = (1 << 31) - 1
#: Chunks as large as they are fast, and as what is made beside them (workspace, a result to be copied) stays small.
DEFAULTS = {
    "convolution": Sizes(LARGEST, 1 << 30),
    "transposed": Sizes(LARGEST, 1 << 29),
    "weight gradient": Sizes(LARGEST, 1 << 30),
    "channels": Sizes(LARGEST, 1 << 27),
    "norm": Sizes(1 << 22, 1 << 22),
    "norm backward": Sizes(LARGEST, 1 << 28),
}
NEVER = Sizes(sys.maxsize, sys.maxsize)

_lock = threading.Lock()
_forced: list[Sizes] = []  # a stack; the last entry holds


def sizes(device: torch.device, family: str) -> Sizes:
    """Those that hold now. Nothing but a GPU has the cliff."""
    asked = _forced[-1:]
    if asked:
        return asked[0]
    return measured(device).get(family, DEFAULTS[family]) if device.type == "cuda" else NEVER


@contextmanager
def forced(given: Sizes) -> Iterator[None]:
    """Inside, these hold on every device; for all threads, since backward runs in threads of its own."""
    # A new object: the same sizes may be forced twice, and each must remove its own.
    mine = Sizes(*given)
    with _lock:
        _forced.append(mine)
    try:
        yield
    finally:
        with _lock:
            del _forced[next(place for place, other in enumerate(_forced) if other is mine)]


def table_path() -> Path:
    """The file of measured sizes, in the user's folder for caches."""
    if named := os.environ.get("HALOCLINE_CHUNKS"):
        warnings.warn("HALOCLINE_CHUNKS goes away; set XDG_CACHE_HOME instead", DeprecationWarning, stacklevel=2)
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(caches) / "halocline" / "chunks.json"


def describe(device: torch.device) -> str:
    """What a measurement holds for: the card and the libraries that choose its kernels."""
    card = torch.cuda.get_device_name(device)  # without an index, the current one
    return f"{card}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


@cache
def measured(device: torch.device) -> Mapping[str, Sizes]:
    """What was measured on this card; empty if nothing was measured or the file is unreadable."""
    try:
        return read_table(table_path()).get(describe(device), {})
    except RuntimeError:  # no home directory
        return {}


def read_table(path: Path) -> dict[str, dict[str, Sizes]]:
    """By card and family; what makes no sense is left out."""
    try:
        cards = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    rows = {card: row for card, row in cards.items() if isinstance(row, dict)} if isinstance(cards, dict) else {}
    return {
        card: {family: Sizes(*pair) for family, pair in row.items() if _makes_sense(pair)} for card, row in rows.items()
    }


def _makes_sense(pair: Any) -> bool:
    """Two whole numbers in order: a file may have been edited by hand."""
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(size, int) for size in pair)):
        return False
    whole, chunk = pair
    return 0 < chunk <= whole <= LARGEST


def write_table(path: Path, card: str, rows: Mapping[str, Sizes]) -> None:
    """Beside what is known of other cards; under its final name only when it is whole."""
    cards = {**read_table(path), card: dict(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks on one machine may write at the same time.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(cards, indent=1) + "\n")
    draft.replace(path)
    measured.cache_clear()
