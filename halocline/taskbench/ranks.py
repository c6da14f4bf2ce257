"""On the ranks: graphs prepared for a runtime, and the seconds that they take."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch.distributed as dist

from ..testing.place import environment
from ..world import World, this_world
from .exchanges import BatchExchange, MpiExchange, TorchExchange, over_world
from .execute import Fault, GraphRun, MakeExchange, MessageRun, run_graphs
from .graph import TaskGraph
from .kernels import make_kernel
from .sharded import ShardedRun

_BARE: dict[str, MakeExchange] = {"torch": TorchExchange, "torch-batch": BatchExchange, "mpi": MpiExchange}

_worlds: dict[str, World] = {}
_runs: dict[tuple[object, ...], list[GraphRun]] = {}


def seconds_of(
    runtime: str, graphs: Sequence[TaskGraph], sizes: Sequence[int], fault: Fault | None = None
) -> list[float]:
    """Of all rows of all graphs, for each number of iterations; by all ranks together.

    ``runtime`` is a name of :data:`~halocline.taskbench.runtimes.RUNTIMES` whose ranks these are.
    """
    key = (runtime, *graphs, fault)
    if key not in _runs:
        _runs.clear()
        _runs[key] = [_prepare(runtime, graph, fault) for graph in graphs]
        gc.collect()
        gc.freeze()
    found = []
    for iterations in sizes:
        dist.barrier()
        found.append(run_graphs(_runs[key], iterations))
    return found


def kernel_seconds(kernel: str, iterations: int, calls: int) -> float:
    """Of the kernel alone, on all ranks at once: no runtime reaches a better rate."""
    compute = make_kernel(kernel)
    compute(iterations)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        compute(iterations)
    return time.perf_counter() - began


def _prepare(runtime: str, graph: TaskGraph, fault: Fault | None) -> GraphRun:
    """This rank's part of a graph on a runtime. By all ranks together: worlds are made on first use."""
    prefix, _, transport = runtime.partition("-")
    if runtime in _BARE:
        return MessageRun(graph, dist.get_world_size(), dist.get_rank(), _BARE[runtime], fault)
    world = _world(transport)
    if prefix == "tensor":
        return ShardedRun(graph, world, fault)
    return MessageRun(graph, world.size, world.rank, over_world(world), fault)


def _world(transport: str) -> World:
    """A world of its own for each transport: sockets of its own and gloo, gloo alone, or MPI."""
    if transport not in _worlds:
        first = this_world()
        with environment({"HALOCLINE_WIRE": "0"}):  # worlds that are made inside leave all messages to gloo
            _worlds[transport] = first.duplicate() if transport == "gloo" else first
    return _worlds[transport]
