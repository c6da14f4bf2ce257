"""Where ranks meet: torch's store and its process groups, with a deadline of ours on every call.

torch's own timeouts do not hold if the process that serves the store is stopped: it accepts connections and never
answers, and a client blocks in ``recv``. So every call runs in a thread that can be left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._torch_private import default_store
from ..background import in_background
from .launcher import rendezvous_of

T = TypeVar("T")
_MARGIN = 1.0  # seconds by which our timeout is later than torch's own, whose text says more


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call, or TimeoutError after so many seconds.

    A late call is left behind in its thread, which does not keep the process alive.
    """
    future = in_background(call, "halocline call with a deadline")
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


class BoundedStore:
    """The store of torch.distributed, every method of which raises TimeoutError at a deadline."""

    def __init__(self, store: Any, deadline: float) -> None:
        self._store, self._deadline = store, deadline

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, and return the sum."""
        return int(self._call(lambda: self._store.add(key, amount)))

    def check(self, key: str) -> bool:
        """Is the key set? Does not wait for it."""
        return bool(self._call(lambda: self._store.check([key])))

    def get(self, key: str) -> str:
        """The value of a key; waits until it is set."""
        wait = timedelta(seconds=self._deadline)
        self._call(lambda: self._store.wait([key], wait))
        return str(self._call(lambda: self._store.get(key)).decode())

    def delete_key(self, key: str) -> None:
        """Remove a key."""
        self._call(lambda: self._store.delete_key(key))

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return within(self._deadline + _MARGIN, call)
        except TimeoutError:
            raise TimeoutError(f"the store at {meeting_point()} did not answer within {self._deadline:g} s") from None


def joined_store(deadline: float) -> BoundedStore | None:
    """The store at which this process met the other ranks, if there is one."""
    store = default_store()
    return None if store is None else BoundedStore(store, deadline)


def meeting_point() -> str:
    """Address and port of the store, for errors."""
    meeting = rendezvous_of(os.environ)
    return f"{meeting.address}:{meeting.port or '?'}"


def serve_store(address: str) -> tuple[Any, int]:
    """A store in this process, for ranks that it starts, and its port. It ends with the returned object."""
    import socket

    listener = socket.create_server((address, 0))  # a port that the store opens itself would listen on every interface
    port = int(listener.getsockname()[1])
    store = dist.TCPStore  # type: ignore[attr-defined]  # public, though its stub does not say so
    return store(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def new_group(deadline: float, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """``dist.new_group`` with ``deadline`` for all its waits and for itself."""
    wait = timedelta(seconds=deadline)
    return _on_this_device(deadline, lambda: dist.new_group(ranks, timeout=wait, **options))


def gloo_group(store: Any, name: str, rank: int, size: int, deadline: float) -> Any:
    """A gloo group under a name that was never used before. By its ranks together.

    Unlike groups of ``dist.new_group`` it ends, with its threads and sockets, with its last reference.
    """
    prefixed, wait = dist.PrefixStore, timedelta(seconds=deadline)  # type: ignore[attr-defined]  # public all the same
    return _on_this_device(deadline, lambda: dist.ProcessGroupGloo(prefixed(name, store), rank, size, wait))


def own_store(deadline: float) -> Any:
    """A separate connection to the store at which the ranks met.

    A wait blocks its connection: two worlds that make groups in two threads over one connection would deadlock.
    """
    store = default_store()
    assert store is not None, "ranks make worlds when they have met"
    return within(deadline, store.clone)


def world_number(rank: int, deadline: float) -> int:
    """How many worlds this rank has made at this store: the same on all ranks, which make worlds together."""
    store = joined_store(deadline)
    assert store is not None, "ranks make worlds when they have met"
    return store.add(f"halocline/worlds/{rank}", 1)


def init_process_group(deadline: float, backend: str, **meeting: Any) -> None:
    """``dist.init_process_group`` with ``deadline`` for all its waits and for itself."""
    wait = timedelta(seconds=deadline)
    _on_this_device(deadline, lambda: dist.init_process_group(backend, timeout=wait, **meeting))


def _on_this_device(deadline: float, call: Callable[[], T]) -> T:
    """Run a call in a thread, with a deadline, on this thread's GPU: a new thread would use the first one."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def work() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return call()

    try:
        return within(deadline + _MARGIN, work)
    except TimeoutError:
        text = f"the ranks did not meet at {meeting_point()} within {deadline:g} s: a rank or the store does not answer"
        raise TimeoutError(text) from None
