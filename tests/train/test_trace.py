"""Traces: what a tracer writes of a rank, and ranks joined into one file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halocline import distribute, shard
from halocline.testing import shared_pool
from halocline.train.trace import TRACE, Tracer, as_rank, merge, rank_file
from halocline.world import Mesh, this_world


def work(weight: torch.Tensor) -> None:
    (weight @ weight).sum().backward()


def traced(folder: Path, rank: int, steps: range = range(1, 3), first: int = 0, made: int = 5) -> None:
    tracer, weight = Tracer(folder, rank, steps), torch.ones(8, 8, requires_grad=True)
    for number, _ in enumerate(tracer.waits(range(made)), first):
        with tracer.step(number), tracer.span("forward"):
            work(weight)
    tracer.close()


def read(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    assert all({"ph", "pid", "tid", "name"} <= event.keys() for event in found["traceEvents"])
    return found["traceEvents"]


def names(events: list[dict[str, Any]], kind: str = "X") -> list[str]:
    return [event["name"] for event in events if event["ph"] == kind]


def rows(events: list[dict[str, Any]], what: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == what:
            found.setdefault(event["pid"], set()).add(event["args"]["name"])
    return found


def test_the_steps_asked_for_are_traced_and_no_others(tmp_path: Path) -> None:
    traced(tmp_path, 3)
    events = read(rank_file(tmp_path, 3))
    assert [name for name in names(events) if name.startswith("step ")] == ["step 1", "step 2"]
    assert names(events).count("forward") == 2 and "data wait" in names(events) and "aten::mm" in names(events)
    assert {event["pid"] for event in events} == {3}
    assert rows(events, "process_name") == {3: {"rank 3"}}
    assert "main" in rows(events, "thread_name")[3]


FORKED = """
import os, sys
from pathlib import Path
import torch
from halocline.train.trace import Tracer
child = os.fork()
if not child:
    tracer = Tracer(Path(sys.argv[1]), 0, range(1))
    with tracer.step(0):
        torch.ones(4) + 1
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.long
def test_the_main_thread_of_a_forked_rank_has_its_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True, timeout=120)
    assert rows(read(rank_file(tmp_path, 0)), "thread_name")[0] == {"main"}


def test_steps_count_from_the_first_that_is_made(tmp_path: Path) -> None:
    traced(tmp_path, 0, first=50)
    assert {"step 51", "step 52"} <= set(names(read(rank_file(tmp_path, 0))))


def test_a_run_that_ends_early_leaves_what_was_traced(tmp_path: Path) -> None:
    traced(tmp_path, 0, made=2)
    assert "step 1" in names(read(rank_file(tmp_path, 0)))


def test_switched_off_nothing_is_written_and_a_step_costs_nothing(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, 0, range(0))
    began = time.perf_counter()
    for number in range(1000):
        with tracer.step(number), tracer.span("forward"):
            pass
    assert time.perf_counter() - began < 0.1
    tracer.close()
    assert not list(tmp_path.iterdir()) and merge(tmp_path) is None


def test_threads_that_read_ahead_have_a_row(tmp_path: Path) -> None:
    tracer, over = Tracer(tmp_path, 0, range(1)), threading.Event()

    def feed() -> None:
        while not over.wait(0.001):
            torch.ones(16) + 1

    prefetcher = threading.Thread(target=feed, name="halocline-prefetcher")
    prefetcher.start()
    with tracer.step(0):
        time.sleep(0.05)
    over.set()
    prefetcher.join()
    assert {"main", "prefetcher"} <= rows(read(rank_file(tmp_path, 0)), "thread_name")[0]


def test_streams_of_a_card_have_rows_of_their_own() -> None:
    """A card's events bear its number as process and the stream's as thread."""
    on_cpu = {"ph": "X", "name": "launch", "pid": 4711, "tid": 4711, "ts": 1.0, "dur": 1.0}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 2.0, "dur": 1.0}
    own = {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 0.0, "dur": 9.0}
    engine = {**on_cpu, "name": "autograd::engine::evaluate_function: MulBackward0", "tid": 4712}
    summing = {**on_cpu, "name": "gloo:all_reduce", "tid": 4713}
    told = as_rank({"traceEvents": [on_cpu, kernel, own, engine, summing]}, 5, 4711, {4711: "MainThread"})
    assert rows(told["traceEvents"], "thread_name") == {5: {"main", "autograd", "transport", "GPU 0 stream 7"}}
    assert names(told["traceEvents"]) == ["launch", "gemm", engine["name"], "gloo:all_reduce"]


def test_ranks_are_joined_on_one_clock(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        traced(tmp_path, rank)
    assert merge(tmp_path) == tmp_path / TRACE
    events = read(tmp_path / TRACE)
    assert rows(events, "process_name") == {0: {"rank 0"}, 1: {"rank 1"}, 10: {"rank 10"}}
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert merge(tmp_path, ranks=2) and set(rows(read(tmp_path / TRACE), "process_name")) == {0, 1}
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0  # numbers of two ranks never meet


@pytest.mark.parametrize(("off", "moved"), [(5e6, True), (3.0, False)])
def test_clocks_that_are_far_apart_are_set_by_the_end_of_a_step(tmp_path: Path, off: float, moved: bool) -> None:
    """Both ranks end step 1 together; the clock of one is off."""
    for rank, shift in ((0, 0.0), (1, off)):
        step = {"ph": "X", "cat": "user_annotation", "name": "step 1", "pid": rank, "tid": 7, "ts": 100 + shift}
        told = {"baseTimeNanoseconds": 10**18, "traceEvents": [{**step, "dur": 50.0}]}
        rank_file(tmp_path, rank).parent.mkdir(exist_ok=True)
        rank_file(tmp_path, rank).write_text(json.dumps(told))
    merge(tmp_path)
    begins = [event["ts"] for event in read(tmp_path / TRACE)]
    assert begins == ([0, 0] if moved else [0, off])


def test_clocks_that_count_from_other_times_are_brought_together(tmp_path: Path) -> None:
    for rank, base, begin in ((0, 10**18, 100.0), (1, 10**18 + 60_000, 45.0)):
        event = {"ph": "X", "name": "work", "pid": rank, "tid": 7, "ts": begin, "dur": 1.0}
        rank_file(tmp_path, rank).parent.mkdir(exist_ok=True)
        rank_file(tmp_path, rank).write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": [event]}))
    merge(tmp_path)
    assert [event["ts"] for event in read(tmp_path / TRACE)] == [0, 5]


def train_traced(folder: Path) -> list[object]:
    """A convolution cut over two ranks, so that there are halos and gradients to wait for."""
    mesh = Mesh(width=2)
    model = distribute(nn.Conv1d(1, 1, 3, padding=1), mesh)
    world = this_world()
    tracer = Tracer(folder, mesh.rank, range(1, 3), world)
    for number in range(4):
        with tracer.step(number):
            model(shard(torch.ones(1, 1, 32), mesh, {2: "width"})).square().sum().backward()
    tracer.close()
    return list(world.events.listeners)


def test_two_ranks_tell_what_they_waited_for(tmp_path: Path) -> None:
    left = shared_pool(2).run(train_traced, tmp_path)
    assert left == [[], []]  # the world is as it was
    merge(tmp_path)
    events = read(tmp_path / TRACE)
    for rank in (0, 1):
        told = names([event for event in events if event["pid"] == rank])
        assert {"step 1", "step 2"} <= set(told)
        assert any(name.startswith("halo wait: conv1d") for name in told)
        assert any(name.startswith("gradient wait") for name in told)
