"""One line for an error in the user's own code: where it was raised, what it was, and a hint.

Commands print it in place of a traceback, which would show mostly torch's and this library's own lines.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from ..errors import HaloclineError, ShardingError, first_line
from .imports import is_installed

_PACKAGE = Path(__file__).resolve().parents[1]

#: Patterns of common messages, and what to do about them; {0} is the first group of the pattern.
_HINTS = (
    (
        r"to have (\d+) channels, but got (\d+) channels",
        "the data have {1} channels and this layer takes {0}: give the network {1} input channels (network = ...), or "
        "read other data (data.x.dims, data.x.channel)",
    ),
    (
        r"(?i)\b(?:long|int64)\b.*\b(?:float|double|float32|float64)\b|class probabilities"
        r"|not implemented for '(?:Float|Double)'|for class numbers give integers",
        "the labels are floating-point numbers; if they are class numbers, set data.y.classes = true",
    ),
    (
        r"ground truth has different shape|channel with length equal to one|single channel|shape B1H",
        "this loss wants labels with a channel dim: set data.y.channel = true",
    ),
    (r"(?i)out of memory", "cut over more ranks, take a smaller batch, or precision = 'bf16'"),
)


def explain(error: BaseException) -> str:
    """``network.py:12: ValueError: what was said``, with a hint for common mistakes.

    The library's own errors name the place themselves. For others it is the innermost line of the user's own code or,
    if there is none, of a package other than torch.
    """
    words = first_line(error)
    matches = ((text, re.search(pattern, str(error))) for pattern, text in _HINTS)
    hint = next((text.format(*match.groups()) for text, match in matches if match), "")
    if isinstance(error, (HaloclineError, OSError)):
        return f"{words}; {hint}" if hint and isinstance(error, ShardingError) else words
    place = _place(error)
    kind = type(error).__name__
    said = kind if words == kind else f"{kind}: {words}"
    return (f"{place}: {said}" if place else said) + (f"; {hint}" if hint else "")


def _place(error: BaseException) -> str:
    """``file:line`` of the code to look at; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(Path(error.filename))}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    places = [(Path(name).resolve(), line) for name, line in frames if not name.startswith("<")]
    own = [(path, line) for path, line in places if not is_installed(path) and not path.is_relative_to(_PACKAGE)]
    others = [(path, line) for path, line in places if not _is_plumbing(path)]
    for path, line in own or others:
        return f"{_shown(path)}:{line}"
    return ""


def _is_plumbing(path: Path) -> bool:
    """Is it this library, torch, Python itself, or the package that runs commands?"""
    return (
        path.is_relative_to(_PACKAGE)
        or "site-packages" not in path.parts
        or {"torch", "typer"} & {*path.parts} != set()
    )


def _shown(path: Path) -> str:
    """Relative to the working directory if it is below."""
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
