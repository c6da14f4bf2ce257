"""A function in a process of its own: whatever ends it (memory, a crash, its deadline) ends it alone.

Processes are forked from a server that has imported the library and has never touched a device, so that each begins
within milliseconds, and can begin CUDA for itself.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

GRACE = 10.0  # seconds for a process that has answered to end
TEXT = 120  # characters of an error that are shown


@dataclass(frozen=True)
class ChildOutcome:
    """Of a call: its value (as JSON has it), or what went wrong."""

    value: Any
    error: str | None
    seconds: float


class Children:
    """Each call has a process of its own. The server imports ``modules`` first, if it is not running yet."""

    def __init__(self, modules: Sequence[str]) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__, *modules])
        self._context: Any = context  # contexts of two kinds share no useful type

    def start_afresh(self) -> None:
        """Fork no more: every process imports for itself. For a server that proves unfit to be forked."""
        self._context = mp.get_context("spawn")

    def call(self, function: Callable[..., Any], *arguments: Any, deadline: float) -> ChildOutcome:
        """``function(*arguments)``, found by its import name, within ``deadline`` seconds."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(theirs, function, arguments))
        process.start()
        theirs.close()  # or the death of the process would not read as end of file
        began = time.monotonic()
        try:
            reply = _reply(ours, process, deadline)
        finally:
            _end(process)
            ours.close()
        return ChildOutcome(reply.get("value"), reply.get("error"), time.monotonic() - began)


def _reply(ours: Connection, process: BaseProcess, deadline: float) -> dict[str, Any]:
    if not ours.poll(deadline):
        process.kill()
        return {"error": "deadline"}
    try:
        return dict(json.loads(ours.recv_bytes()))
    except EOFError:
        process.join(GRACE)
        return {"error": f"crashed: {_manner(process.exitcode)}"}


def _manner(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exit status {status}"
    return signal.Signals(-status).name


def _end(process: BaseProcess) -> None:
    process.join(GRACE)
    process.kill()
    process.join()


def _answer(theirs: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    try:
        reply = {"value": function(*arguments)}
    except Exception as error:  # noqa: BLE001 - whatever a network does, it is that case's result
        reply = {"error": describe(error)}
    theirs.send_bytes(json.dumps(reply).encode())


def describe(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text:
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    name = "" if text.startswith("CUDA error") else f"{type(error).__name__}: "
    return f"crashed: {name}{text}"[:TEXT]
