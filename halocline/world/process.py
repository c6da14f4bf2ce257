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

from .._torch_private import default_store, set_group_timeout
from ..errors import RankFailure
from .base import CHANNELS, Incoming, Outgoing, PendingExchange
from .events import Label
from .joined import DEFAULT_DEADLINE, JoinedWorld
from .launcher import adopt_environment
from .rendezvous import init_process_group, meeting_point, new_group
from .tags import folded
from .tcp import LARGEST, PendingReceive, TcpTransport, memory_of
from .tcp_priority import POSSIBLE, PriorityTransport, TransportError

_TAG_BITS = 31  # of gloo, and of lanes that put shared memory's places above them
_SENT_AS_IT_IS = (torch.float32, torch.float64)
_PLAIN = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)  # which numpy knows too


class _Large(NamedTuple):
    """A message that gloo carries. Its tag alone comes on our own socket, where one from a rank elsewhere in
    the program is noticed at once: gloo would wait for the deadline."""

    announced: PendingReceive
    carried: dist.Work


class ProcessWorld(JoinedWorld):
    """Point-to-point messages, reductions and gradients each in a process group of their own; those of a wide world on
    sockets of our own, if these can be had."""

    def __init__(self, deadline: float = DEFAULT_DEADLINE, wide: bool = False) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._rings: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        super().__init__(dist.get_rank(), dist.get_world_size(), deadline)
        # Flags and shapes travel as CPU tensors, so that NCCL alone would not do.
        self._nccl = "nccl" in str(dist.get_backend_config())
        self._backend = "cpu:gloo,cuda:nccl" if self._nccl else None
        own_sockets = _own_sockets(self.size)
        self.puts_urgent_first = own_sockets and POSSIBLE
        in_bulk = wide and self.puts_urgent_first
        # Each group of gloo's has threads, which wake up a hundred times a second.
        channels = CHANNELS if not in_bulk or self._nccl else ()
        self._groups = {channel: new_group(deadline, backend=self._backend) for channel in channels}
        self._priority = PriorityTransport(self.rank, deadline) if in_bulk else None
        self._tcp = TcpTransport(self.rank, deadline) if own_sockets and not in_bulk else None

    def set_deadline(self, seconds: float) -> None:
        super().set_deadline(seconds)
        for group in (*self._groups.values(), *self._rings.values()):
            set_group_timeout(group, self._wait)

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        self._refuse_after_failure()
        if self._nccl and any(tensor.is_cuda for _, tensor, _ in (*sends, *receives)):
            return _post_on_device(sends, receives, self._groups[label.channel])
        if self._priority is not None:
            return self._post_in_bulk(self._priority, sends, receives, label)
        group = self._groups[label.channel]
        jobs: list[tuple[int, Any, Tensor, Tensor]] = []
        for (peer, tensor, tag), start in [*((r, self._receive) for r in receives), *((m, self._send) for m in sends)]:
            try:
                jobs.append(start(peer, tensor, tag, group))
            except (RuntimeError, OSError) as error:  # a connection known to be closed refuses at once
                raise self._failure(peer, error, label) from error
        return jobs

    def _post_in_bulk(
        self, bulk: PriorityTransport, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label
    ) -> list[tuple[int, Any, Tensor, Tensor]]:
        jobs: list[tuple[int, Any, Tensor, Tensor]] = []
        peer = -1
        try:
            for peer, buffer, long_tag in receives:
                host, tag = self._host(buffer), folded(long_tag, _TAG_BITS)
                jobs.append((peer, bulk.lane(peer, tag, host.nbytes).receive(tag, _memory(host)), buffer, host))
            for peer, message, long_tag in sends:
                host, tag = self._host(message, fill=True), folded(long_tag, _TAG_BITS)
                lane = bulk.lane(peer, tag, host.nbytes)
                jobs.append((peer, lane.send(tag, _memory(host), label.urgency), host, host))
        except (RuntimeError, OSError) as error:
            raise self._failure(peer, error, label) from error
        return jobs

    def _receive(
        self, peer: int, buffer: Tensor, tag: int, group: dist.ProcessGroup
    ) -> tuple[int, Any, Tensor, Tensor]:
        host = self._host(buffer)
        if self._tcp is None:
            return peer, group.recv([_bytes(host)], peer, folded(tag, _TAG_BITS)), buffer, host
        if host.nbytes <= LARGEST:
            return peer, self._tcp.connection(peer).receive(tag, _memory(host)), buffer, host
        announced = self._tcp.connection(peer).receive(tag, memoryview(bytearray()))
        return peer, _Large(announced, group.recv([_bytes(host)], peer, folded(tag, _TAG_BITS))), buffer, host

    def _send(self, peer: int, message: Tensor, tag: int, group: dist.ProcessGroup) -> tuple[int, Any, Tensor, Tensor]:
        host = self._host(message, fill=True)
        if self._tcp is not None and host.nbytes <= LARGEST:
            self._tcp.connection(peer).send(tag, _memory(host))
            return peer, None, host, host
        if self._tcp is not None:
            self._tcp.connection(peer).send(tag, memoryview(b""))
        return peer, group.send([_bytes(host)], peer, folded(tag, _TAG_BITS)), host, host

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

    def first(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        if self._priority is None:
            return super().first(under_way, end)
        try:
            return self._priority.first([exchange.posted for exchange in under_way], end)
        except TransportError as error:
            raise self._failure(error.peer, error, under_way[0].label) from error

    def meet(self, peers: Sequence[int]) -> None:
        if self._priority is not None:
            try:
                self._priority.meet(peers)
            except (RuntimeError, OSError) as error:
                raise self._failure(None, error, Label("meeting", "the rings")) from error

    def keep_short(self, size: int) -> None:
        if self._priority is not None:
            self._priority.keep_short(size)

    def interrupt(self) -> None:
        if self._priority is not None:
            self._priority.ring()

    def ring_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> None:
        host = tensor if self._nccl and tensor.is_cuda else self._host(tensor, fill=True)
        real = torch.view_as_real(host) if host.is_complex() else host
        try:
            dist.all_reduce(real, group=self._ring(ranks, label.channel), async_op=True).wait(self._wait)
        except (RuntimeError, OSError) as error:
            raise self._failure(None, error, label) from error
        if host is not tensor:
            tensor.copy_(host)

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
        try:
            return dist.all_reduce(tensor, group=self._ring(ranks, label.channel), async_op=True)
        except (RuntimeError, OSError) as error:
            raise self._failure(None, error, label) from error

    def complete_sum(self, posted: Any, label: Label) -> None:
        try:
            posted.wait(self._wait)
        except RuntimeError as error:
            raise self._failure(None, error, label) from error

    def _another(self, wide: bool) -> ProcessWorld:
        try:
            return ProcessWorld(self.deadline, wide)
        except (RuntimeError, OSError) as error:  # a rank is gone, or the store with it
            raise self._failure(None, error, Label("another world", "the same ranks")) from error

    def _hear_others(self, called: str, ranks: Sequence[int]) -> dict[int, str | None]:
        if self._wide:  # all are to stop at once, so that all are heard
            self.leave()
        return super()._hear_others(called, ranks)

    def leave(self) -> None:
        self._failed = self._failed or "this rank has left"
        if self._tcp is not None:
            self._tcp.close()
        if self._priority is not None:
            self._priority.close()
        nobody = next(rank for rank in range(self.size) if rank != self.rank)
        for group in self._groups.values():
            with suppress(RuntimeError):  # gloo closes all connections of a group when a wait in it has timed out
                group.recv([torch.empty(1)], nobody, 0).wait(timedelta(milliseconds=1))

    def _ring(self, ranks: tuple[int, ...], channel: str) -> dist.ProcessGroup:
        """A group for these ranks, made when first needed by its members alone."""
        key = (channel, ranks)
        if key not in self._rings:
            self._rings[key] = new_group(
                self.deadline, list(ranks), backend=self._backend, use_local_synchronization=True
            )
        return self._rings[key]


def _post_on_device(sends: Sequence[Outgoing], receives: Sequence[Incoming], group: dist.ProcessGroup) -> object:
    """NCCL knows no tags: messages of a pair match by order, which all ranks share."""
    operations = [dist.P2POp(dist.irecv, _bytes(buffer), peer, group) for peer, buffer, _ in receives]
    operations += [dist.P2POp(dist.isend, _bytes(message.contiguous()), peer, group) for peer, message, _ in sends]
    works = dist.batch_isend_irecv(operations) if operations else []
    nothing = torch.empty(0)
    return [(-1, work, nothing, nothing) for work in works]


def _own_sockets(size: int) -> bool:
    """Unless switched off, or there is nowhere to say where they are."""
    return size > 1 and os.environ.get("HALOCLINE_WIRE") != "0" and default_store() is not None


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)  # lazy conjugates are not in memory
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _memory(tensor: Tensor) -> memoryview:
    """Its bytes; those of the most usual dtypes without a detour."""
    if tensor.dtype in _PLAIN and not tensor.is_neg() and not tensor.requires_grad:
        array: Any = tensor.numpy()
        return memoryview(array.reshape(-1)).cast("B") if array.size else memoryview(b"")
    return memory_of(_as_bytes(tensor))


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes: gloo sends those for every dtype."""
    if tensor.dtype in _SENT_AS_IT_IS:
        return tensor
    return _as_bytes(tensor)


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
