"""Where the ranks of a pool run: on this machine over loopback, or wherever a subclass starts them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch.distributed as dist

from ..world.launcher import LOOPBACK
from ..world.secret import SECRET, new_secret

T = TypeVar("T")

START_DEADLINE = 120.0  # importing torch on a loaded machine takes tens of seconds
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PRELOADED = ("halocline.testing.pool", "torch._dynamo")  # an optimizer's first step imports the second


class RankPlace:
    """Where the ranks of a pool run: here, processes on this machine that talk over loopback.

    A rank process gets a pickled copy of this object. The parent keeps the store at which the ranks meet. Subclasses
    start ranks elsewhere, or over another transport.
    """

    address = "127.0.0.1"
    #: Start ranks by a fork of a process that has imported torch. Not where they need variables that are read at that
    #: import; and if the one that started them is killed, a folder of multiprocessing's is left in the temporary one.
    forked = False

    def environment(self, rank: int, size: int, port: int) -> Mapping[str, str]:
        """Variables that a rank process starts with."""
        return {**ONE_THREAD, SECRET: self.secret, "GLOO_SOCKET_IFNAME": LOOPBACK}

    @cached_property
    def secret(self) -> str:
        """The secret of the ranks, made in the parent."""
        return new_secret()

    def start(
        self, main: Callable[..., None], stacks: Sequence[str], port: int
    ) -> tuple[list[Any], list[Connection[Any, Any]]]:
        """A process a rank that runs ``main(rank, pipe, stack)``, and our ends of the pipes."""
        context = self._context()
        pipes = [context.Pipe() for _ in stacks]
        variables = [dict(self.environment(rank, len(stacks), port)) for rank in range(len(stacks))]
        processes = [
            context.Process(target=_with, args=(own, main, rank, theirs, stack), daemon=True, name=f"rank {rank}")
            for rank, (own, (_, theirs), stack) in enumerate(zip(variables, pipes, stacks, strict=True))
        ]
        for own, process in zip(variables, processes, strict=True):
            with environment(own):
                process.start()
        for _, theirs in pipes:
            theirs.close()  # or its end would stay open here, and the rank's death would not read as end of file
        return processes, [ours for ours, _ in pipes]

    def _context(self) -> Any:
        """Ranks are forked off a process that has imported all they need, and has run nothing: 3 s less for each."""
        if not self.forked or sys.platform != "linux":
            return mp.get_context("spawn")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        with environment(ONE_THREAD):
            forkserver.ensure_running()
        return context

    def wait_for_parent(self) -> None:
        """In a rank process: until the one that started it has ended."""
        if (parent := mp.parent_process()) is not None:
            parent.join()

    def manner_of_death(self, process: Any) -> str:
        """How a rank process ended, in words."""
        code: int | None = process.exitcode
        if code is None:
            return "closed its pipe and did not exit"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def enter(self, rank: int) -> None:
        """In the rank process, before it opens its first connection."""

    def inside(self, make: Callable[[], T]) -> T:
        """In the parent: ``make()`` where connections made reach the ranks."""
        return make()

    def serve_store(self) -> Any:
        """The store where ranks meet, kept by the parent."""
        return self.inside(self._serve_store)

    def _serve_store(self) -> Any:
        listener = socket.create_server((self.address, 0))  # one that the store opens itself listens everywhere
        return self.store(listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())

    def store(self, port: int, **options: Any) -> Any:
        """A client of that store."""
        store = dist.TCPStore  # type: ignore[attr-defined]  # public, though its stub does not say so
        return store(self.address, port, wait_for_workers=False, timeout=timedelta(seconds=START_DEADLINE), **options)


def _with(variables: Mapping[str, str], main: Callable[..., None], *arguments: Any) -> None:
    """In the rank process, which may have been forked off one with other variables."""
    os.environ.update(variables)
    main(*arguments)


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables for processes started inside: OpenMP reads them at import, before any code of ours runs there."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
