"""Ranks as processes over torch.distributed: gloo on CPUs, NCCL on GPUs (never run here on several GPUs)."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_private import set_group_timeout
from ..errors import RankFailure
from .base import Incoming, Outgoing
from .capabilities import Capabilities
from .connection import PendingReceive
from .events import Label
from .joined import DEFAULT_DEADLINE, JoinedWorld
from .launcher import LOOPBACK, adopt_environment, is_local, node_info_of, rank_info_of, ranks_on_this_node
from .nccl import NcclGroups, nccl_groups
from .pending import PendingExchange
from .rendezvous import BoundedStore, gloo_group, init_process_group, meeting_point, own_store, world_number
from .secret import Secret, agree_on_secret
from .tags import folded
from .tcp import LARGEST, WIDE_POSSIBLE, TcpTransport
from .tensor_bytes import in_host_memory, memory_of, sendable
from .transport_errors import TransportError

_log = logging.getLogger("halocline.world")
_TAG_BITS = 31  # that gloo has for a tag
_MESSAGES = "messages"
_NOTHING = torch.empty(0)
Job = tuple[int, Any, Tensor, Tensor]  # a peer, what is under way, and a tensor with its copy in host memory


class _Large(NamedTuple):
    """A message that gloo carries. Its tag also comes on our own socket, where a tag of a rank that is elsewhere in the
    program is noticed at once; gloo alone would wait for the deadline."""

    announced: PendingReceive
    carried: dist.Work


class ProcessWorld(JoinedWorld):
    """Ranks as processes: small messages on sockets of its own, large ones by gloo, sums in gloo groups.

    Each channel and set of ranks sums in a group of its own. With one GPU per rank, NCCL carries tensors on GPUs. A
    wide world sends all messages on its sockets.
    """

    def __init__(
        self,
        deadline: float = DEFAULT_DEADLINE,
        wide: bool = False,
        secret: Secret | None = None,
        first: bool = True,
        members: tuple[int, ...] | None = None,
    ) -> None:
        """The ``first`` world of a process finds the job's secret; others get it from the world that they duplicate.

        ``members``: the ranks that make and use it, if not all.
        """
        self._gloo: dict[tuple[str, tuple[int, ...]], Any] = {}  # groups by purpose and ranks
        self._new_group = threading.Lock()  # a thread may set the deadline of groups while another adds one
        self._nccl: NcclGroups | None = None
        self._sockets: TcpTransport | None = None
        super().__init__(dist.get_rank(), dist.get_world_size(), deadline)
        if members is not None:
            self._everyone = members
        self._name = f"halocline/world {world_number(self.rank, deadline, members)}"
        self._store = own_store(deadline)
        self._secret = self._find_secret(deadline) if first else secret
        own_sockets = self._secret is not None
        on_devices = members is None and "nccl" in str(dist.get_backend_config())
        all_on_sockets = wide and own_sockets and WIDE_POSSIBLE
        self.capabilities = Capabilities(
            "torch",
            matches_tags=not on_devices,
            detects_divergence=own_sockets,
            waits_for_any=all_on_sockets,
            priorities=own_sockets and WIDE_POSSIBLE,
            device_memory=on_devices,
        )
        self._wide = wide
        if not all_on_sockets:  # else saved: the threads of a gloo group wake up a hundred times a second
            self._group(_MESSAGES, self._everyone)
        if self._secret is not None:
            name = f"{self._name}/sockets"
            self._sockets = TcpTransport(self.rank, deadline, self._store, name, self._secret, all_on_sockets)
        self._largest_on_sockets = math.inf if all_on_sockets else LARGEST
        if on_devices:  # gloo is needed, too, since flags and shapes are CPU tensors
            self._nccl = nccl_groups(self.size, deadline)

    def _find_secret(self, deadline: float) -> Secret | None:
        """The secret that all ranks have; None if they have none, or need no sockets. By all ranks together."""
        if self.size == 1 or os.environ.get("HALOCLINE_WIRE") == "0":
            return None
        store = BoundedStore(self._store, deadline)
        return agree_on_secret(os.environ, self.rank, self.size, store, f"{self._name}/secret")

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline of all groups and sockets, those made later included."""
        super().set_deadline(seconds)
        with self._new_group:
            groups = list(self._gloo.values())
        for group in groups:
            set_group_timeout(group, self._wait)
        for transport in (self._nccl, self._sockets):
            if transport is not None:
                transport.set_deadline(seconds)

    def _group(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        """The gloo group of these ranks, made by its members alone when they first need it."""
        key = (purpose, ranks)
        if key not in self._gloo:
            name, deadline = f"{self._name}/{purpose}/{'-'.join(map(str, ranks))}", self.deadline
            made = gloo_group(self._store, name, ranks.index(self.rank), len(ranks), deadline)
            with self._new_group:
                self._gloo[key] = made
            if deadline != self.deadline:  # the deadline has changed while the group was made
                set_group_timeout(made, self._wait)
        return self._gloo[key]

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        """Start the messages, each over NCCL, our sockets or gloo, by device and size."""
        self._refuse_after_failure()
        if self._nccl is not None and any(tensor.is_cuda for _, tensor, _ in (*sends, *receives)):
            return [(-1, work, _NOTHING, _NOTHING) for work in self._nccl.post(sends, receives, label.channel)]
        jobs: list[Job] = []
        peer = -1
        try:
            for peer, buffer, tag in receives:
                jobs.append(self._receive(peer, buffer, tag))
            for peer, message, tag in sends:
                jobs.append(self._send(peer, message, tag, label.urgency))
        except (RuntimeError, OSError) as error:  # a connection known to be closed refuses at once
            raise self._failure(_peer_of(error, peer), error, label) from error
        return jobs

    def _receive(self, peer: int, buffer: Tensor, tag: int) -> Job:
        """Ask for one message, in host memory."""
        host = in_host_memory(buffer)
        size = host.nbytes
        if self._sockets is not None and size <= self._largest_on_sockets:
            return peer, self._sockets.connection(peer, tag, size).receive(tag, memory_of(host)), buffer, host
        announced = None
        if self._sockets is not None:
            announced = self._sockets.connection(peer, tag, 0).receive(tag, memoryview(b""))
        carried = self._gloo[_MESSAGES, self._everyone].recv(
            [sendable(host)], self._place(peer), folded(tag, _TAG_BITS)
        )
        return peer, carried if announced is None else _Large(announced, carried), buffer, host

    def _send(self, peer: int, message: Tensor, tag: int, urgency: float) -> Job:
        """Send one message, from host memory."""
        host = in_host_memory(message, fill=True)
        size = host.nbytes
        if self._sockets is not None and size <= self._largest_on_sockets:
            return peer, self._sockets.connection(peer, tag, size).send(tag, memory_of(host), urgency), host, host
        if self._sockets is not None:
            self._sockets.connection(peer, tag, 0).send(tag, memoryview(b""))
        carried = self._gloo[_MESSAGES, self._everyone].send(
            [sendable(host)], self._place(peer), folded(tag, _TAG_BITS)
        )
        return peer, carried, host, host

    def _place(self, peer: int) -> int:
        """A rank's number in the gloo group of all that use this world."""
        return peer if len(self._everyone) == self.size else self._everyone.index(peer)

    def complete(self, posted: object, label: Label) -> None:
        """Wait for the messages, and copy those for GPUs from host memory."""
        end = time.monotonic() + self.deadline
        for peer, work, buffer, host in posted:  # type: ignore[attr-defined]
            try:
                if isinstance(work, _Large):
                    self._sockets.wait(peer, work.announced, end)  # type: ignore[union-attr]
                    work = work.carried
                if isinstance(work, dist.Work):
                    work.wait(self._wait)
                else:
                    self._sockets.wait(peer, work, end)  # type: ignore[union-attr]
            except (RuntimeError, OSError) as error:
                raise self._failure(_peer_of(error, peer), error, label) from error
            if host is not buffer:
                buffer.copy_(host)

    def wait_any(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        """As in :class:`World`; only a wide world can tell which exchange is done first."""
        if self._sockets is None or not self.capabilities.waits_for_any:
            return super().wait_any(under_way, end)
        try:
            return self._sockets.wait_any([exchange.posted for exchange in under_way], end)
        except TransportError as error:
            raise self._failure(error.peer, error, under_way[0].label) from error

    def wake(self) -> None:
        if self._sockets is not None:
            self._sockets.wake()

    def connect(self, peers: Sequence[int]) -> None:
        if self._sockets is not None:
            try:
                self._sockets.connect(peers)
            except (RuntimeError, OSError) as error:
                raise self._failure(None, error, Label("connecting", "the rings")) from error

    def limit_unsent(self, size: int) -> None:
        if self._sockets is not None:
            self._sockets.limit_unsent(size)

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
        """Start an all-reduce in place, by NCCL or gloo."""
        self._refuse_after_failure()
        try:
            if self._nccl is not None and tensor.is_cuda:
                return self._nccl.post_sum(tensor, ranks, label.channel), tensor, tensor
            host = in_host_memory(tensor, fill=True)
            real = torch.view_as_real(host) if host.is_complex() else host
            return self._group(label.channel, ranks).allreduce([real]), tensor, host
        except (RuntimeError, OSError) as error:
            raise self._failure(None, error, label) from error

    def complete_sum(self, posted: Any, label: Label) -> None:
        """Wait for the all-reduce; RankFailure at the deadline."""
        work, tensor, host = posted
        try:
            work.wait(self._wait)
        except RuntimeError as error:
            raise self._failure(None, error, label) from error
        if host is not tensor:
            tensor.copy_(host)

    def _duplicate(self, wide: bool) -> ProcessWorld:
        return self._made_by(None, wide)

    def _duplicate_among(self, members: tuple[int, ...], wide: bool) -> ProcessWorld:
        return self._made_by(None if len(members) == self.size else members, wide)

    def _made_by(self, members: tuple[int, ...] | None, wide: bool) -> ProcessWorld:
        try:
            return self._alike(ProcessWorld(self.deadline, wide, self._secret, first=False, members=members))
        except (RuntimeError, OSError) as error:  # a rank is gone, or the store with it
            raise self._failure(None, error, Label("another world", "the same ranks")) from error

    def _hear_others(self, called: str, ranks: Sequence[int]) -> dict[int, str | None]:
        """As in :class:`JoinedWorld`; a wide world leaves first, so that all ranks stop and are heard."""
        if self._wide:  # all ranks then stop at once, and say where
            self.leave()
        return super()._hear_others(called, ranks)

    def leave(self) -> None:
        """Close all connections, so that ranks that wait for this one raise at once."""
        self._failed = self._failed or "this rank has left"
        if self._sockets is not None:
            self._sockets.close()
        for (_, ranks), group in list(self._gloo.items()):
            other = next((place for place, rank in enumerate(ranks) if rank != self.rank), None)
            with suppress(RuntimeError):  # gloo closes all connections of a group when a wait in it has timed out
                if other is not None:
                    group.recv([torch.empty(1)], other, 0).wait(timedelta(milliseconds=1))

    def _release(self) -> None:
        if self._sockets is not None:
            strangers = Counter({why: count for why, count in self._sockets.refused.items() if why != "left"})
            if strangers:  # those that left without a word may have been ranks that looked whether this one lives
                told = ", ".join(f"{count} {why}" for why, count in strangers.items())
                _log.warning("rank %d: callers at its ports that were no ranks of this job: %s", self.rank, told)
            self._sockets.close()
        self._gloo.clear()  # a group ends with its last reference
        if self._nccl is not None and not self._failed:
            self._nccl.release()
        self._nccl = None


def _peer_of(error: Exception, waited_for: int) -> int:
    """The rank that an error is about: a wait for one peer also serves the connections to others."""
    return error.peer if isinstance(error, TransportError) else waited_for


def connect(deadline: float = DEFAULT_DEADLINE) -> ProcessWorld | None:
    """Join the ranks that torchrun or Slurm started; None if this process is alone. By all ranks together."""
    if not dist.is_initialized() and not adopt_environment():
        return None
    try:
        if not dist.is_initialized():
            start_torch(deadline)
        return ProcessWorld(deadline)
    except TimeoutError as error:
        text = f"{error}. Do all ranks run, and is none stopped? Look at their own output first"
        raise RankFailure(f"{_this_rank()}, joining: {text}") from error
    except dist.DistError as error:
        raise RankFailure(f"{_this_rank()}, joining: {_unmet(error)}") from error


def _this_rank() -> str:
    started = rank_info_of(os.environ)
    return f"rank {'?' if started is None else started.rank}"


def _unmet(error: Exception) -> str:
    """Why the ranks did not meet, and what to do."""
    if "EADDRINUSE" in str(error):
        return (
            f"the ranks cannot meet at {meeting_point()}: the port is in use by another program, perhaps a run that "
            "has not ended; set MASTER_PORT to another (torchrun: --master-port)"
        )
    why = next(iter(str(error).strip().splitlines()), "no answer")
    return f"the ranks cannot meet at {meeting_point()}: {why}; do all run, with the same MASTER_ADDR and MASTER_PORT?"


def start_torch(deadline: float, **meeting: Any) -> None:
    """Start torch.distributed as the environment says, or with store, rank and size of ``meeting``.

    With a GPU for each rank of the node, NCCL is used for tensors on GPUs. If all ranks are on this machine, gloo
    listens on loopback only.
    """
    if is_local(os.environ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    one_gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_on_this_node(1)
    if one_gpu_each:
        torch.cuda.set_device(node_info_of(os.environ).local_rank)
    backend = "cpu:gloo,cuda:nccl" if one_gpu_each else "gloo"
    init_process_group(deadline, backend, **meeting)
