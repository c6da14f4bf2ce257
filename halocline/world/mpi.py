"""Ranks over MPI, through mpi4py: messages of every size, and sums that go on while a rank computes.

torch.distributed is started beside it: checkpoints and the doctor use gloo, and failing ranks write where they stopped
into its store. docs/mpi.md says what mpiexec does when a rank dies.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from ..errors import RankFailure, Refused
from .base import CHANNELS, Incoming, Outgoing
from .capabilities import Capabilities
from .events import Label
from .joined import DEFAULT_DEADLINE, JoinedWorld
from .mpi_library import at_the_end, ending_process, library, not_at_the_end, poll, progress, started_library
from .pending import PendingExchange
from .tags import folded
from .tensor_bytes import in_host_memory
from .transport_errors import Diverged, TransportError

_PARTING = "parting"  # the communicator on which a rank tells that it leaves
_LAST = 0.1  # seconds in which messages that a rank sent before it left may still arrive
_COMPARE = 1.0  # seconds of waiting between comparisons of where ranks are in the program
_MAKING = 10.0  # seconds, beyond the deadline, to make a communicator of ranks that have all come
_SOON = 3.0  # seconds to wait for the end of other ranks after a failure
_LONG = 1 << 14  # bytes from which MPI may send a message only when the receiver asks for it
_TAG_BITS = 31
#: MPI's datatypes for dtypes that it adds as torch does; booleans are or-ed, as torch adds them.
_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.bool: "UINT8_T",
}
_HALVES = (torch.float16, torch.bfloat16)  # MPI lacks these: torch adds them


@dataclass(eq=False)
class _Posted:
    """Requests of MPI with their memory. The world keeps them until they are done, since MPI writes into that
    memory."""

    requests: list[Any] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)  # bytes of the receives, which are the first of the requests
    #: Tensors that MPI cannot write, with the host memory to copy from when it is done.
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)
    statuses: list[Any] = field(default_factory=list)
    is_sum: bool = False
    long: bool = False  # the progress thread looks after it
    done: bool = False


class MpiWorld(JoinedWorld):
    """Ranks over MPI: a communicator for each channel, and one on which ranks tell that they leave."""

    capabilities = Capabilities("mpi", waits_for_any=True)

    def __init__(self, deadline: float = DEFAULT_DEADLINE, comm: Any = None) -> None:
        self._mpi = started_library(deadline)
        self._home = self._mpi.COMM_WORLD if comm is None else comm
        super().__init__(self._home.Get_rank(), self._home.Get_size(), deadline)
        highest = self._home.Get_attr(self._mpi.TAG_UB) or 32767  # the least that MPI promises
        self._bits = min(_TAG_BITS, (highest + 1).bit_length() - 1)
        self._comms = {name: self._communicator(name) for name in (*CHANNELS, _PARTING)}
        self._rings: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._under_way: set[_Posted] = set()
        self._left: dict[int, float] = {}  # ranks that have told that they leave, and when this rank learned it
        self._told: list[Any] = []
        self._woken = Event()
        self._progress = progress()
        at_the_end(self)
        # MPI may still write into the memory of what is under way: it is kept for good.
        weakref.finalize(self, _abandoned.extend, self._under_way).atexit = False

    def _communicator(self, name: str) -> Any:
        """A duplicate of the home communicator. By all ranks together; RankFailure at the deadline."""
        made, request = self._home.Idup()
        if not poll(request.Test, time.monotonic() + self.deadline):
            raise RankFailure(
                f"rank {self.rank}, joining over MPI: not all {self.size} ranks came to make channel {name!r} within "
                f"{self.deadline:g} s. Look at the other ranks' own output first"
            )
        return made

    def compare_launches(self) -> None:
        """As in :class:`JoinedWorld`; from then on, ranks compare in the store where they wait."""
        super().compare_launches()
        # In the world that all joined, ranks compare in the store where they wait.
        self.capabilities = replace(self.capabilities, detects_divergence=True)

    # ---- messages ----

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        """Start requests of MPI for all messages; a thread drives large ones while this rank computes."""
        self._refuse_after_failure()
        comm, posted = self._comms[label.channel], _Posted()
        self._under_way.add(posted)
        for peer, buffer, tag in receives:
            host = in_host_memory(buffer)
            posted.awaited.append(host.nbytes)
            posted.copies += [] if host is buffer else [(buffer, host)]
            self._start(posted, comm.Irecv, host, peer, tag)
        for peer, message, tag in sends:
            host = in_host_memory(message, fill=True)
            self._start(posted, comm.Isend, host, peer, tag)
        if any(host.nbytes >= _LONG for host in posted.memory):
            self._carry_on(posted)
        return posted

    def _start(self, posted: _Posted, start: Callable[..., Any], host: Tensor, peer: int, tag: int) -> None:
        """Start one send or receive, and note its peer, tag and memory."""
        posted.memory.append(host)
        posted.peers.append(peer)
        posted.requests.append(start([self._memory(host), self._mpi.BYTE], peer, folded(tag, self._bits)))
        posted.tags.append(tag)

    def _memory(self, host: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(host.data_ptr(), host.nbytes)

    def _carry_on(self, posted: _Posted) -> None:
        """Let the progress thread call MPI until this is done: large messages do not move without calls."""
        posted.long = True
        self._progress.begun()

    def complete(self, posted: Any, label: Label) -> None:
        self._await([posted], time.monotonic() + self.deadline, label)

    def _await(self, several: Sequence[_Posted], end: float, label: Label, woken: Event | None = None) -> bool:
        """Wait until one of these is done (True) or ``woken`` is set (False). Raises RankFailure."""

        def one_done() -> bool:
            return any(map(self._is_done, several)) or (woken is not None and woken.is_set())

        first, compared = several[0], _Compared(self, label)
        try:
            if not poll(one_done, end, lambda: compared.look(first)):
                raise TimeoutError(f"nothing within {self.deadline:g} s")
            compared.forget()
        except Diverged as error:
            raise self._failure(self._late(first), error, label) from error
        except TransportError as error:
            raise self._failure(None if first.is_sum else error.peer, error, label) from error
        except (self._mpi.Exception, TimeoutError) as error:
            raise self._failure(None if first.is_sum else self._late(first), error, label) from error
        return any(posted.done for posted in several)

    def _is_done(self, posted: _Posted) -> bool:
        """Test all requests; when they are done, check sizes and copy to tensors that MPI could not write."""
        if posted.done:
            return True
        if not posted.statuses:
            posted.statuses = [self._mpi.Status() for _ in posted.requests]
        if not self._mpi.Request.Testall(posted.requests, posted.statuses):
            return False
        for peer, size, status in zip(posted.peers, posted.awaited, posted.statuses, strict=False):
            if (found := status.Get_count(self._mpi.BYTE)) != size:
                raise TransportError(peer, f"{found} bytes came where {size} were awaited")
        for tensor, host in posted.copies:
            tensor.copy_(host)
        self._under_way.discard(posted)
        self._rest(posted)
        posted.done = True
        return True

    def _rest(self, posted: _Posted) -> None:
        """The progress thread need not look after this any more."""
        if posted.long:
            posted.long = False
            self._progress.ended()

    def _late(self, posted: _Posted) -> int:
        """The first peer that has not sent what is awaited, or not taken what was sent."""
        for peer, request in zip(posted.peers, posted.requests, strict=False):
            with suppress(self._mpi.Exception):
                # Not Test: it would end the request, and with it the count of what came.
                if request != self._mpi.REQUEST_NULL and not request.Get_status():
                    return peer
        return posted.peers[0]

    def wait_any(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        """As in :class:`World`."""
        several = [exchange.posted for exchange in under_way]
        if not self._await(several, end, under_way[0].label, self._woken):
            self._woken.clear()
            return None
        return next(number for number, posted in enumerate(several) if posted.done)

    def wake(self) -> None:
        self._woken.set()

    # ---- sums ----

    def complete_sum(self, posted: Any, label: Label) -> None:
        self._await([posted], time.monotonic() + self.deadline, label)

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> _Posted:
        """Start a non-blocking all-reduce in place. Refuses dtypes that MPI cannot add as torch does."""
        self._refuse_after_failure()
        host = in_host_memory(tensor, fill=True)
        real = torch.view_as_real(host) if host.is_complex() else host
        arithmetic = _arithmetic(real.dtype)
        if arithmetic is None:
            why = f"{real.dtype} cannot be summed over MPI"
            raise Refused(label.operation, label.place, why, "convert it to another first")
        datatype, operation = arithmetic
        comm = self._ring(ranks, label)
        posted = _Posted(peers=[rank for rank in ranks if rank != self.rank], memory=[host], is_sum=True)
        posted.copies += [] if host is tensor else [(tensor, host)]
        self._under_way.add(posted)
        message = [self._memory(real), real.numel(), datatype]
        try:
            posted.requests.append(comm.Iallreduce(self._mpi.IN_PLACE, message, operation))
        except self._mpi.Exception as error:
            raise self._failure(None, error, label) from error
        self._carry_on(posted)
        return posted

    def _ring(self, ranks: tuple[int, ...], label: Label) -> Any:
        """A communicator of these ranks, made by its members alone when they first need it."""
        if label.channel in self._comms and ranks == tuple(range(self.size)):
            return self._comms[label.channel]
        key = (label.channel, ranks)
        if key not in self._rings:
            self._meet(key, label)
            comm = self._comms["control"]
            with ending_process(self.deadline + _MAKING):
                self._rings[key] = comm.Create_group(comm.Get_group().Incl(ranks))
        return self._rings[key]

    def _meet(self, key: tuple[str, tuple[int, ...]], label: Label) -> None:
        """Wait with a deadline until all members of a new communicator are there: making it has no deadline.

        The program has no part in this exchange, so it emits no events.
        """
        comm, tag, nothing = self._comms[_PARTING], 1 + zlib.crc32(repr(key).encode()) % 32767, torch.empty(0)
        posted = _Posted()
        self._under_way.add(posted)
        others = [rank for rank in key[1] if rank != self.rank]
        for peer in others:
            posted.awaited.append(0)
            self._start(posted, comm.Irecv, nothing, peer, tag)
        for peer in others:
            self._start(posted, comm.Isend, nothing, peer, tag)
        self._await([posted], time.monotonic() + self.deadline, label)

    # ---- other worlds, and the end ----

    def _duplicate(self, wide: bool) -> MpiWorld:
        return self._alike(MpiWorld(self.deadline, self._home))

    def _release(self) -> None:
        """Free the communicators, unless a rank has failed: freeing may wait for it."""
        not_at_the_end(self)
        if self._failed:  # freeing a communicator may wait for ranks that have gone
            return
        with ending_process(self.deadline + _MAKING):
            for comm in (*self._comms.values(), *self._rings.values()):
                comm.Free()

    def leave(self) -> None:
        """Tell the other ranks that this one has failed."""
        self._failed = self._failed or "this rank has left"
        self.farewell()

    def farewell(self) -> None:
        """Send an empty message to each rank, once: it needs no receiver to be sent."""
        if self._told:
            return
        nothing, comm = [None, 0, self._mpi.BYTE], self._comms[_PARTING]
        self._told = [comm.Isend(nothing, peer, 0) for peer in range(self.size) if peer != self.rank]
        for posted in list(self._under_way):
            self._rest(posted)

    def patience(self) -> float:
        """Seconds to wait for the other ranks at the end of the program."""
        return min(self.deadline, _SOON) if self._failed else self.deadline

    def _look_for(self, peers: Sequence[int]) -> None:
        """Raise TransportError if one of these peers has left. What it sent before gets a moment to arrive."""
        comm, status, now = self._comms[_PARTING], self._mpi.Status(), time.monotonic()
        if self._told:  # another thread of this rank has failed: waiting is of no use
            raise TransportError(peers[0], "connection closed: this rank has left")
        while comm.Iprobe(self._mpi.ANY_SOURCE, 0, status):
            comm.Recv([None, 0, self._mpi.BYTE], status.Get_source(), 0)  # does not block: Iprobe has seen it
            self._left[status.Get_source()] = now
        for peer in peers:
            if now - self._left.get(peer, now) > _LAST:
                raise TransportError(peer, f"connection closed: rank {peer} has left")

    def _failure(self, peer: int | None, error: BaseException, label: Label) -> RankFailure:
        """As in :class:`JoinedWorld`, after telling the other ranks."""
        if not isinstance(error, Diverged):  # the other rank of a divergence finds it, too
            self.farewell()  # the others need not wait for their deadlines
        return super()._failure(peer, error, label)

    def _seen(self, peer: int | None, text: str) -> str:
        if peer is not None and "awaited" in text:
            return f"what came from rank {peer} was not what was asked for"
        return super()._seen(peer, text)


class _Compared:
    """During a long wait, tells the peer through the store where this rank waits, and looks where the peer does."""

    def __init__(self, world: MpiWorld, label: Label) -> None:
        self._world, self._label, self._next = world, label, time.monotonic() + _COMPARE
        self._peers: set[int] = set()

    def look(self, posted: _Posted) -> None:
        """Between polls: raise if the peer has left, or waits at another place of the program."""
        self._world._look_for(posted.peers)
        if time.monotonic() < self._next or posted.is_sum or not posted.awaited:
            return
        self._next += _COMPARE
        peer = self._world._late(posted)
        self._peers.add(peer)
        self._world.compare_places(peer, posted.tags[posted.peers.index(peer)], self._label)

    def forget(self) -> None:
        """The wait has ended: remove the entries from the store."""
        for peer in self._peers:
            self._world.forget_place(peer)


_abandoned: list[_Posted] = []


@cache
def _arithmetic(dtype: torch.dtype) -> tuple[Any, Any] | None:
    """The MPI datatype and operation that add as torch does; None for a dtype that cannot be summed."""
    mpi = library()
    if dtype in _HALVES:
        return mpi.UINT16_T, mpi.Op.Create(partial(_add_halves, dtype), commute=True)
    if dtype not in _TYPES:
        return None
    return getattr(mpi, _TYPES[dtype]), mpi.BOR if dtype == torch.bool else mpi.SUM


def _add_halves(dtype: torch.dtype, theirs: Any, ours: Any, datatype: Any) -> None:
    """``ours += theirs``, called by MPI with memory of both."""
    if len(ours):
        total = torch.frombuffer(ours, dtype=dtype)
        total.add_(torch.frombuffer(theirs, dtype=dtype))
