"""Where ranks meet: torch's store and its process groups, with a deadline of ours on every call.

torch's own timeouts do not hold if the process that serves the store is stopped: it accepts connections and never
answers, and a client blocks in ``recv``. So every call runs in a thread that can be left behind.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._torch_private import default_store
from ..background import in_background
from .launcher import Rendezvous, is_local, rank_info_of, rendezvous_of

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
    listener = listening_socket(address)  # a port that the store opens itself would listen on every interface
    port = int(listener.getsockname()[1])
    store = dist.TCPStore  # type: ignore[attr-defined]  # public, though its stub does not say so
    return store(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def listen_at(address: str, port: int) -> dict[str, Any]:
    """Options for a store that this process serves: it listens on the interface of that address, not on all.

    Empty, so that the store opens its port itself, if the address is not of this machine, as behind a translation of
    addresses, or if the port is in use: the store may share it with an earlier one, and knows how to say so.
    """
    with suppress(OSError, UnicodeError):
        return {"master_listen_fd": listening_socket(address, port).detach()}
    return {}


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on the interface of an address, by which the other ranks find this one.

    On all interfaces where this machine takes its own name for loopback, as some do, and other machines do not.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = str(place[0])
    if is_loopback(host) and not (is_local(os.environ) or address == "localhost" or address == host):
        host = ""
    return socket.create_server((host, port), family=family, backlog=1024)


def is_loopback(address: str) -> bool:
    """Does an address stay on this machine? It may name an interface behind a "%"."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def meet(where: Rendezvous, rank: int, size: int, deadline: float) -> Any:
    """The store of a run that no launcher serves: rank 0 does, on the interface at which the others look for it."""
    options = listen_at(where.address, where.port) if rank == 0 else {}
    store, wait = dist.TCPStore, timedelta(seconds=deadline)  # type: ignore[attr-defined]  # public all the same
    return store(where.address, where.port, size, rank == 0, wait, multi_tenant=True, **options)


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


def world_number(rank: int, deadline: float, members: tuple[int, ...] | None = None) -> str:
    """How many worlds this rank has made with all ranks, or with ``members``: the same on each of them."""
    store = joined_store(deadline)
    assert store is not None, "ranks make worlds when they have met"
    among = "" if members is None else f" of {'-'.join(map(str, members))}"
    return f"{store.add(f'halocline/worlds/{rank}{among}', 1)}{among}"


def init_process_group(deadline: float, backend: str, **meeting: Any) -> None:
    """``dist.init_process_group`` with ``deadline`` for all its waits and for itself."""
    wait, where, own = timedelta(seconds=deadline), rendezvous_of(os.environ), rank_info_of(os.environ)

    def start() -> None:
        if not meeting and not where.served and where.port and own is not None and own.size:
            meeting.update(store=meet(where, own.rank, own.size, deadline), rank=own.rank, world_size=own.size)
        dist.init_process_group(backend, timeout=wait, **meeting)

    _on_this_device(deadline, start)


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
