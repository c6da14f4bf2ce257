"""Task graphs on Dask and Ray, where one process hands out all tasks and outputs travel as objects."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from .execute import output_pair
from .graph import PAIR, TaskBenchError, TaskGraph
from .kernels import Kernel, make_kernel

Submit = Callable[..., Any]  # a graph, a step, a column, iterations, then the inputs' handles


@cache
def _kernel(name: str) -> Kernel:
    """In a worker of Dask or Ray: torch with one thread, as every rank of the other runtimes has."""
    import torch

    torch.set_num_threads(1)
    return make_kernel(name)


def task(graph: TaskGraph, step: int, column: int, iterations: int, *inputs: bytes) -> bytes:
    """Check the inputs, compute, and return the output."""
    pairs = graph.output_bytes // PAIR
    for each, found in zip(graph.dependencies(step, column), inputs, strict=True):
        if found != output_pair(step - 1, each) * pairs:
            raise TaskBenchError(f"{graph.pattern}: task (step {step}, column {column}) has a wrong input from {each}")
    _kernel(graph.kernel)(round(graph.share(step, column) * iterations))
    return output_pair(step, column) * pairs


def seconds_of(submit: Submit, wait: Callable[[list[Any]], object], graphs: Sequence[TaskGraph], size: int) -> float:
    """Of all tasks of all graphs; ``submit`` returns a handle, ``wait`` waits for those of the last rows."""
    began = time.perf_counter()
    rows: list[dict[int, Any]] = [{} for _ in graphs]
    for step in range(max(graph.steps for graph in graphs)):
        for graph, before in [(graph, rows[at]) for at, graph in enumerate(graphs) if step < graph.steps]:
            rows[graph.number] = {
                column: submit(graph, step, column, size, *[before[c] for c in graph.dependencies(step, column)])
                for column in graph.columns(step)
            }
    wait([handle for row in rows for handle in row.values()])
    return time.perf_counter() - began


@contextmanager
def dask_workers(ranks: int) -> Iterator[tuple[Submit, Callable[[list[Any]], object]]]:
    """``ranks`` worker processes of one thread each."""
    from distributed import Client, LocalCluster

    quiet = {"silence_logs": logging.ERROR, "dashboard_address": None}
    with (
        LocalCluster(n_workers=ranks, threads_per_worker=1, processes=True, **quiet) as cluster,
        Client(cluster) as client,
    ):
        yield lambda *arguments: client.submit(task, *arguments, pure=False), client.gather


@contextmanager
def ray_workers(ranks: int) -> Iterator[tuple[Submit, Callable[[list[Any]], object]]]:
    """A local Ray with ``ranks`` processors."""
    import ray

    ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray.remote(task).remote, ray.get
    finally:
        ray.shutdown()


WORKERS = {"dask": dask_workers, "ray": ray_workers}
