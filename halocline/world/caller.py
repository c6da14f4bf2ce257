"""Where in the user's program a communication is called: part of its tag, and named in errors.

All ranks run the same program, so the same exchange is reached through the same calls on each. A message of a rank that
took another path has another tag, and is never taken for the one that is awaited. Frames of torch, of this library and
of launchers do not count, since they may differ between ranks.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import threading
import zlib
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
#: Folders of installed packages. Their generators do not count in a path: progress bars pass items on, and are often
#: shown on rank 0 alone, where the path would then differ.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_PACKAGE = Path(__file__).parents[1]
#: Parts of the library that run on behalf of the program, by paths that depend on caches and on other ranks.
_ROOMS = (
    "world",
    "kernels",
    "reduction",
    "tensor",
    "random",
    "rules",
    "data",
    "scripts",
    "distribute.py",
    "_torch_private.py",
)
_INTERNAL = tuple(str(_PACKAGE / name) for name in _ROOMS)
_COMPILED = str(Path("_dynamo") / "eval_frame.py")
_MASK = (1 << 61) - 1
_MOST = 1 << 14  # call paths, and code objects, that are remembered
_NAMED = 3  # innermost calls of a path that errors name

_SKIPPED: dict[int, int] = {}
_ENTERS_COMPILED: dict[int, int] = {}
#: By ``id`` of a code object: the object itself, which keeps the id from being reused, and a hash of each instruction.
_codes: dict[int, tuple[CodeType, dict[int, int]]] = {}
_texts: dict[int, str] = {}


class LauncherCalls(NamedTuple):
    """How many of the outermost calls belong to the launcher, in the thread in which the ranks met: they differ between
    ranks."""

    thread: int
    calls: int


def call_path(launch: LauncherCalls | None) -> int:
    """A hash of the user's calls that led here, without those of the launcher."""
    calls, frames = _calls()
    if launch is not None and launch.thread == threading.get_ident():
        calls = calls[: max(0, len(calls) - launch.calls)]
    value = 0
    for call in calls:
        value = (value * 1000003 + call) & _MASK
    if value not in _texts:
        if len(_texts) >= _MOST:
            _texts.clear()
        places = [f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" for frame in frames]
        _texts[value] = ", from ".join(places)
    return value


def describe_path(path: int) -> str:
    """The innermost calls of a path that this process has hashed, for errors; empty if it is not known."""
    return _texts.get(path, "")


def meeting_calls(most: int) -> list[int]:
    """Hashes of the calls that led here, innermost first, for ranks to compare when they join."""
    return _calls()[0][:most]


def _calls() -> tuple[list[int], list[FrameType]]:
    """A hash of each of the user's frames from the innermost to the module level, and the innermost frames
    themselves."""
    frame: FrameType | None = sys._getframe(2)
    calls: list[int] = []
    innermost: list[FrameType] = []
    while frame is not None:
        code = frame.f_code
        known = _codes.get(id(code))
        hashes = known[1] if known is not None else _learn(code)
        if hashes is _ENTERS_COMPILED:  # frames of compiled code depend on what each rank has compiled
            calls, innermost = [], []
        elif hashes is not _SKIPPED:
            at = frame.f_lasti
            calls.append(hashes.get(at) or _hash_of(code, at, hashes))
            if len(innermost) < _NAMED:
                innermost.append(frame)
            if code.co_name == "<module>":
                break
        frame = frame.f_back
    return calls, innermost


def _learn(code: CodeType) -> dict[int, int]:
    """Decide how frames of a code object count: skipped, the entry of compiled code, or hashed by position."""
    name = code.co_filename
    hashes: dict[int, int] = {}
    if name.endswith(_COMPILED):
        hashes = _ENTERS_COMPILED
    elif name.startswith((_TORCH, *_INTERNAL, "<frozen ")) or (
        code.co_flags & inspect.CO_GENERATOR and name.startswith(_INSTALLED)
    ):
        hashes = _SKIPPED
    if len(_codes) >= _MOST:  # a program that generates code at every step
        _codes.clear()
    _codes[id(code)] = code, hashes
    return hashes


def _hash_of(code: CodeType, at: int, hashes: dict[int, int]) -> int:
    """A hash of a frame's position in the source: unlike bytecode, debuggers do not change it."""
    line, _, column, _ = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    # Folders differ between nodes, and generated code is numbered.
    file = "" if code.co_filename.startswith("<") else Path(code.co_filename).name
    found = zlib.crc32(f"{file} {code.co_name} {line} {column}".encode()) + 1
    hashes[at] = found
    return found
