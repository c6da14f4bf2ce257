"""On the ranks of ``bench halo``: one training step in several ways, and what a link really gives."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.distribute import distribute, no_sync
from halocline.rules import shard
from halocline.tensor import unwrap
from halocline.workloads.unet3d import UNet3d
from halocline.world import DryWorld, Label, Mesh, World, as_world
from halocline.world.base import Incoming, Outgoing

CLASSES = 3
BLOCK = 1 << 20  # bytes of a stream are handed over in such pieces
PING = 200  # round trips of a byte


class StillWorld(DryWorld):
    """Real tensors and nothing that moves: what arrives is zero. The step's numbers are wrong, its work is the same."""

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        for _, buffer, _ in receives:
            buffer.zero_()  # whatever memory holds may be denormal, and slow
        return super().post(sends, receives, label)


# ---- the step ----


@dataclass
class Stage:
    """A network with its sample, on a world or on plain tensors."""

    model: nn.Module
    volume: Tensor
    labels: Tensor
    world: World | None = None

    def step(self) -> float:
        """Seconds of forward and backward. Gradients stay where they are: averaging them is measured elsewhere."""
        self.model.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        if self.world is None:
            F.cross_entropy(self.model(self.volume), self.labels).backward()
        else:
            with no_sync(self.model):
                F.cross_entropy(self.model(self.volume), self.labels).backward()
        return time.perf_counter() - started


_stages: dict[str, Stage] = {}


def prepare(size: int, width: int) -> list[str]:
    """The same network three times: untouched on the plain tile, cut without exchanges, and cut. Returns the ways."""
    torch.manual_seed(0)
    volume, labels = torch.randn(1, 1, size, size, size), torch.randint(CLASSES, (1, size, size, size))
    real = _cut(volume, labels, width)
    with as_world(StillWorld(dist.get_rank(), dist.get_world_size())):
        still = _cut(volume, labels, width)
    plain = Stage(UNet3d(width, 1, CLASSES), unwrap(real.volume).clone(), unwrap(real.labels).clone())
    _stages.update({"plain": plain, "compute": still, "step": real})
    ways = [*_stages, *(["without overlap"] if hasattr(real.world, "overlap") else [])]
    for way in ways:  # plans are made, and memory is had, in the first
        step(way)
    return ways


def _cut(volume: Tensor, labels: Tensor, width: int) -> Stage:
    mesh = Mesh(depth=dist.get_world_size())
    model = distribute(UNet3d(width, 1, CLASSES), mesh)
    cut = shard(volume, mesh, {2: "depth"}, multiple=8), shard(labels, mesh, {1: "depth"}, multiple=8)
    return Stage(model, *cut, mesh.world)


@dataclass
class HaloStepTimes:
    seconds: float
    messages: int


def step(way: str) -> HaloStepTimes:
    stage = _stages["step" if way == "without overlap" else way]
    before = _messages(stage)
    with _waiting_at_once(stage.world, way == "without overlap"):
        seconds = stage.step()
    return HaloStepTimes(seconds, _messages(stage) - before)


def _messages(stage: Stage) -> int:
    return stage.world.traffic.messages if stage.world else 0


@contextmanager
def _waiting_at_once(world: World | None, wanted: bool) -> Iterator[None]:
    """Inside, every exchange is waited for as soon as it has begun."""
    if world is None or not wanted:
        yield
        return
    setattr(world, "overlap", False)  # noqa: B010 - a switch that not every world has
    try:
        yield
    finally:
        setattr(world, "overlap", True)  # noqa: B010


# ---- the link between the first two ranks ----


@dataclass
class LinkFigures:
    seconds: float  # that the stream took
    latency: float  # half a round trip of one byte


def measure_link(address: str, size: int) -> LinkFigures | None:
    """A stream of ``size`` bytes from rank 1 to rank 0 and small round trips, on a plain connection; on rank 0."""
    return _on_connection(address, lambda line: _receive(line, size), lambda line: _send(line, size))


def _on_connection(address: str, first: Callable[[socket.socket], Any], second: Callable[[socket.socket], Any]) -> Any:
    """``first`` on rank 0, which listens at ``address``, and ``second`` on rank 1; nothing on the others."""
    listener = socket.create_server((address, 0)) if dist.get_rank() == 0 else None
    told = [listener.getsockname()[1] if listener else 0]
    dist.broadcast_object_list(told)
    figures = None
    if listener:
        with listener, listener.accept()[0] as line:
            figures = first(line)
    elif dist.get_rank() == 1:
        with socket.create_connection((address, told[0]), 10) as line:
            second(line)
    dist.barrier()
    return figures


def _receive(line: socket.socket, size: int) -> LinkFigures:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(PING):
        started = time.perf_counter()
        line.sendall(b"?")
        line.recv(1)
        trips.append(time.perf_counter() - started)
    _take(line, size)  # a token bucket lets its burst through at once
    started = time.perf_counter()
    _take(line, size)
    return LinkFigures(time.perf_counter() - started, median(trips) / 2)


def _send(line: socket.socket, size: int) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PING):
        line.recv(1)
        line.sendall(b"!")
    block = bytes(BLOCK)
    for _ in range(2 * size // BLOCK):
        line.sendall(block)


def _take(line: socket.socket, size: int) -> None:
    left, buffer = size, bytearray(BLOCK)
    while left > 0:
        count = line.recv_into(buffer, min(BLOCK, left))
        if not count:
            raise ConnectionError("the stream ended early")
        left -= count
