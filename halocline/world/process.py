"""Ranks as processes over torch.distributed: gloo on CPUs, NCCL on GPUs (never run here on several GPUs)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_private import set_group_timeout
from ..errors import RankFailure
from .base import Incoming, Outgoing, PendingExchange
from .capabilities import Capabilities
from .events import Label
from .joined import DEFAULT_DEADLINE, JoinedWorld
from .launcher import adopt_environment
from .nccl import NcclGroups, nccl_groups
from .rendezvous import gloo_group, init_process_group, meeting_point, own_store, world_number
from .tags import folded
from .tcp import LARGEST, PendingReceive, TcpTransport
from .tcp_priority import POSSIBLE, PriorityTransport, TransportError
from .tensor_bytes import in_host_memory, memory_of, sendable

_TAG_BITS = 31  # of gloo, and of connections that put shared memory's places above them
_MESSAGES = "messages"
_NOTHING = torch.empty(0)
Job = tuple[int, Any, Tensor, Tensor]  # a peer, what is under way, and a tensor with its place in host memory


class _Large(NamedTuple):
    """A message that gloo carries. Its tag alone comes on our own socket, where one from a rank elsewhere in
    the program is noticed at once: gloo would wait for the deadline."""

    announced: PendingReceive
    carried: dist.Work


class ProcessWorld(JoinedWorld):
    """Small messages on sockets of its own, large ones by gloo, and sums of each channel and set of ranks in a gloo
    group of their own; with one GPU a rank, tensors on GPUs by NCCL. A wide world sends all messages on its sockets.
    """

    def __init__(self, deadline: float = DEFAULT_DEADLINE, wide: bool = False) -> None:
        self._gloo: dict[tuple[str, tuple[int, ...]], Any] = {}  # groups
        self._nccl: NcclGroups | None = None
        self._tcp: TcpTransport | None = None
        self._priority: PriorityTransport | None = None
        super().__init__(dist.get_rank(), dist.get_world_size(), deadline)
        own_sockets = self.size > 1 and os.environ.get("HALOCLINE_WIRE") != "0"
        on_devices = "nccl" in str(dist.get_backend_config())
        self.capabilities = Capabilities(
            "torch",
            matches_tags=not on_devices,
            detects_divergence=own_sockets,
            waits_for_any=own_sockets and wide and POSSIBLE,
            priorities=own_sockets and POSSIBLE,
            device_memory=on_devices,
        )
        self._wide, self._everyone = wide, tuple(range(self.size))
        self._name = f"halocline/world {world_number(self.rank, deadline)}"
        self._store = own_store(deadline)
        by_priority = wide and self.capabilities.priorities
        if not by_priority:  # each group of gloo's has threads, which wake up a hundred times a second
            self._group(_MESSAGES, self._everyone)
        addresses = self.rank, deadline, self._store, f"{self._name}/sockets"
        self._priority = PriorityTransport(*addresses) if by_priority else None
        self._tcp = TcpTransport(*addresses) if own_sockets and not by_priority else None
        if on_devices:  # flags and shapes travel as CPU tensors, so that NCCL alone would not do
            self._nccl = nccl_groups(self.size, deadline)

    def set_deadline(self, seconds: float) -> None:
        super().set_deadline(seconds)
        for group in self._gloo.values():
            set_group_timeout(group, self._wait)
        for transport in (self._nccl, self._tcp, self._priority):
            if transport is not None:
                transport.set_deadline(seconds)

    def _group(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        """Of these ranks, made when first needed by its members alone."""
        key = (purpose, ranks)
        if key not in self._gloo:
            name = f"{self._name}/{purpose}/{'-'.join(map(str, ranks))}"
            self._gloo[key] = gloo_group(self._store, name, ranks.index(self.rank), len(ranks), self.deadline)
        return self._gloo[key]

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        self._refuse_after_failure()
        if self._nccl is not None and any(tensor.is_cuda for _, tensor, _ in (*sends, *receives)):
            return [(-1, work, _NOTHING, _NOTHING) for work in self._nccl.post(sends, receives, label.channel)]
        if self._priority is not None:
            return self._post_by_priority(self._priority, sends, receives, label)
        group = self._gloo[_MESSAGES, self._everyone]
        jobs: list[Job] = []
        for (peer, tensor, tag), start in [*((r, self._receive) for r in receives), *((m, self._send) for m in sends)]:
            try:
                jobs.append(start(peer, tensor, tag, group))
            except (RuntimeError, OSError) as error:  # a connection known to be closed refuses at once
                raise self._failure(peer, error, label) from error
        return jobs

    def _post_by_priority(
        self, transport: PriorityTransport, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label
    ) -> list[Job]:
        jobs: list[Job] = []
        peer = -1
        try:
            for peer, buffer, long_tag in receives:
                host, tag = in_host_memory(buffer), folded(long_tag, _TAG_BITS)
                lane = transport.lane(peer, tag, host.nbytes)
                jobs.append((peer, lane.receive(tag, memory_of(host)), buffer, host))
            for peer, message, long_tag in sends:
                host, tag = in_host_memory(message, fill=True), folded(long_tag, _TAG_BITS)
                lane = transport.lane(peer, tag, host.nbytes)
                jobs.append((peer, lane.send(tag, memory_of(host), label.urgency), host, host))
        except (RuntimeError, OSError) as error:
            raise self._failure(peer, error, label) from error
        return jobs

    def _receive(self, peer: int, buffer: Tensor, tag: int, group: Any) -> Job:
        host = in_host_memory(buffer)
        if self._tcp is None:
            return peer, group.recv([sendable(host)], peer, folded(tag, _TAG_BITS)), buffer, host
        if host.nbytes <= LARGEST:
            return peer, self._tcp.connection(peer).receive(tag, memory_of(host)), buffer, host
        announced = self._tcp.connection(peer).receive(tag, memoryview(bytearray()))
        return peer, _Large(announced, group.recv([sendable(host)], peer, folded(tag, _TAG_BITS))), buffer, host

    def _send(self, peer: int, message: Tensor, tag: int, group: Any) -> Job:
        host = in_host_memory(message, fill=True)
        if self._tcp is not None and host.nbytes <= LARGEST:
            self._tcp.connection(peer).send(tag, memory_of(host))
            return peer, None, host, host
        if self._tcp is not None:
            self._tcp.connection(peer).send(tag, memoryview(b""))
        return peer, group.send([sendable(host)], peer, folded(tag, _TAG_BITS)), host, host

    def complete(self, posted: object, label: Label) -> None:
        end = time.monotonic() + self.deadline
        for peer, work, buffer, host in posted:  # type: ignore[attr-defined]
            try:
                if isinstance(work, _Large):
                    self._tcp.wait(peer, work.announced, end)  # type: ignore[union-attr]
                    work = work.carried
                if isinstance(work, dist.Work):
                    work.wait(self._wait)
                elif self._priority is None:
                    self._tcp.wait(peer, work, end)  # type: ignore[union-attr]
                elif not work.done:
                    self._priority.wait([(peer, work)], end)
            except (RuntimeError, OSError) as error:
                raise self._failure(peer, error, label) from error
            if host is not buffer:
                buffer.copy_(host)

    def wait_any(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        if self._priority is None:
            return super().wait_any(under_way, end)
        try:
            return self._priority.first([exchange.posted for exchange in under_way], end)
        except TransportError as error:
            raise self._failure(error.peer, error, under_way[0].label) from error

    def wake(self) -> None:
        if self._priority is not None:
            self._priority.ring()

    def connect(self, peers: Sequence[int]) -> None:
        if self._priority is not None:
            try:
                self._priority.connect(peers)
            except (RuntimeError, OSError) as error:
                raise self._failure(None, error, Label("connecting", "the rings")) from error

    def limit_unsent(self, size: int) -> None:
        if self._priority is not None:
            self._priority.limit_unsent(size)

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
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
        work, tensor, host = posted
        try:
            work.wait(self._wait)
        except RuntimeError as error:
            raise self._failure(None, error, label) from error
        if host is not tensor:
            tensor.copy_(host)

    def _duplicate(self, wide: bool) -> ProcessWorld:
        try:
            return self._alike(ProcessWorld(self.deadline, wide))
        except (RuntimeError, OSError) as error:  # a rank is gone, or the store with it
            raise self._failure(None, error, Label("another world", "the same ranks")) from error

    def _hear_others(self, called: str, ranks: Sequence[int]) -> dict[int, str | None]:
        if self._wide:  # all are to stop at once, so that all are heard
            self.leave()
        return super()._hear_others(called, ranks)

    def leave(self) -> None:
        self._failed = self._failed or "this rank has left"
        self._close_sockets()
        for (_, ranks), group in self._gloo.items():
            other = next((place for place, rank in enumerate(ranks) if rank != self.rank), None)
            with suppress(RuntimeError):  # gloo closes all connections of a group when a wait in it has timed out
                if other is not None:
                    group.recv([torch.empty(1)], other, 0).wait(timedelta(milliseconds=1))

    def _close_sockets(self) -> None:
        for transport in (self._tcp, self._priority):
            if transport is not None:
                transport.close()

    def _release(self) -> None:
        self._close_sockets()
        self._gloo.clear()  # a group ends with its last reference
        if self._nccl is not None and not self._failed:
            self._nccl.release()
        self._nccl = None


def connect(deadline: float = DEFAULT_DEADLINE) -> ProcessWorld | None:
    """Join the ranks that torchrun or Slurm started; None where this process stands alone."""
    if not dist.is_initialized() and not adopt_environment():
        return None
    try:
        if not dist.is_initialized():
            start_torch(deadline)
        return ProcessWorld(deadline)
    except TimeoutError as error:
        raise RankFailure(
            f"rank {os.environ.get('RANK', '?')}, joining: {error}. Do all ranks run, and is none stopped? Look at "
            "their own output first"
        ) from error
    except dist.DistError as error:
        raise RankFailure(f"rank {os.environ.get('RANK', '?')}, joining: {_unmet(error)}") from error


def _unmet(error: Exception) -> str:
    """Why ranks did not meet, and what to do."""
    if "EADDRINUSE" in str(error):
        return (
            f"the ranks cannot meet at {meeting_point()}: the port is in use by another program, perhaps a run that "
            "has not ended; set MASTER_PORT to another (torchrun: --master-port)"
        )
    why = next(iter(str(error).strip().splitlines()), "no answer")
    return f"the ranks cannot meet at {meeting_point()}: {why}; do all run, with the same MASTER_ADDR and MASTER_PORT?"


def start_torch(deadline: float, **meeting: Any) -> None:
    """torch.distributed as the environment says, or with the store, rank and size of ``meeting``."""
    with_gpus = torch.cuda.is_available() and _one_gpu_each()
    if with_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if with_gpus else "gloo"
    init_process_group(deadline, backend, **meeting)


def _one_gpu_each() -> bool:
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
