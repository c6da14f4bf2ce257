"""How large an operand may be before its work is done in chunks, and how large the chunks are.

From 2^31 elements on, indices no longer fit 32 bits: cuDNN's fast kernels end there, and some of torch's own crash.
A card may do better with smaller chunks; what ``halocline tune`` measured on it is kept in a small file.
"""

from __future__ import annotations

import json
import os
import sys
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
DEFAULTS = {
    "convolution": Sizes(LARGEST, LARGEST),
    "transposed": Sizes(LARGEST, LARGEST),
    "weight gradient": Sizes(LARGEST, LARGEST),
    "channels": Sizes(LARGEST, LARGEST),
    "norm": Sizes(1 << 22, 1 << 22),
    "norm backward": Sizes(LARGEST, LARGEST),
}
NEVER = Sizes(sys.maxsize, sys.maxsize)

_forced: Sizes | None = None


def sizes(device: torch.device, family: str) -> Sizes:
    """Those that hold now. Nothing but a GPU has the cliff."""
    if _forced is not None:
        return _forced
    return measured(device).get(family, DEFAULTS[family]) if device.type == "cuda" else NEVER


@contextmanager
def forced(given: Sizes) -> Iterator[None]:
    """Inside, these hold on every device; for all threads, since backward runs in threads of its own."""
    global _forced
    before, _forced = _forced, given
    try:
        yield
    finally:
        _forced = before


def table_path() -> Path:
    """``HALOCLINE_CHUNKS`` names another file."""
    named = os.environ.get("HALOCLINE_CHUNKS")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(caches) / "halocline" / "chunks.json"


def describe(device: torch.device) -> str:
    """What a measurement holds for: the card and the libraries that choose its kernels."""
    card = torch.cuda.get_device_name(device)
    return f"{card}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


@cache
def measured(device: torch.device) -> Mapping[str, Sizes]:
    """What was measured on this card; nothing where nobody did, or the file is unreadable."""
    return read_table(table_path()).get(describe(device), {})


def read_table(path: Path) -> dict[str, dict[str, Sizes]]:
    try:
        cards = json.loads(path.read_text())
        return {card: {family: _checked(pair) for family, pair in rows.items()} for card, rows in cards.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _checked(pair: Any) -> Sizes:
    found = Sizes(*pair)
    if not (all(isinstance(size, int) for size in found) and 0 < found.chunk <= found.whole <= LARGEST):
        raise ValueError(f"not two sizes: {pair!r}")
    return found


def write_table(path: Path, card: str, rows: Mapping[str, Sizes]) -> None:
    """Beside what is known of other cards; under its final name only when it is whole."""
    cards = {**read_table(path), card: dict(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(cards, indent=1) + "\n")
    draft.replace(path)
    measured.cache_clear()
