"""Where the ranks of a pool run: this machine over loopback, or wherever a subclass takes them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

START_DEADLINE = 120.0  # importing torch on a loaded machine takes tens of seconds
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Place:
    """Loopback. A rank process gets a pickled copy; the parent keeps the store that the ranks meet at."""

    address = "127.0.0.1"

    def environment(self, rank: int, size: int, port: int) -> Mapping[str, str]:
        """Variables that a rank process starts with."""
        return {**ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

    def start(
        self, main: Callable[..., None], stacks: Sequence[str], port: int
    ) -> tuple[list[Any], list[Connection[Any, Any]]]:
        """A process a rank that runs ``main(rank, pipe, stack)``, and our ends of the pipes."""
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in stacks]
        processes = [
            context.Process(target=main, args=(rank, theirs, stack), daemon=True, name=f"rank {rank}")
            for rank, ((_, theirs), stack) in enumerate(zip(pipes, stacks, strict=True))
        ]
        for rank, process in enumerate(processes):
            with environment(self.environment(rank, len(stacks), port)):
                process.start()
        for _, theirs in pipes:
            theirs.close()  # or its end would stay open here, and the rank's death would not read as end of file
        return processes, [ours for ours, _ in pipes]

    def wait_for_parent(self) -> None:
        """In a rank process: until the one that started it has ended."""
        if (parent := mp.parent_process()) is not None:
            parent.join()

    def manner_of_death(self, process: Any) -> str:
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
        return self.inside(self._serve_store)

    def _serve_store(self) -> Any:
        listener = socket.create_server((self.address, 0))  # one that the store opens itself listens everywhere
        return self.store(listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())

    def store(self, port: int, **options: Any) -> Any:
        store = dist.TCPStore  # type: ignore[attr-defined]  # public, though its stub does not say so
        return store(self.address, port, wait_for_workers=False, timeout=timedelta(seconds=START_DEADLINE), **options)


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
