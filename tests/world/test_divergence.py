"""Ranks that take different paths through the program never mix up their numbers, and hear of it at once."""

import socket
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import halocline as hc
from halocline.testing import RankPool, shared_pool
from halocline.world import forget, run_local
from halocline.world.caller import LauncherCalls, call_path, describe_path
from halocline.world.tags import called_elsewhere, counted_tag, diverged, folded, size_bits

F64 = torch.float64


def cut(mesh: hc.Mesh, rows: int = 8, columns: int = 4) -> torch.Tensor:
    return hc.shard(torch.arange(rows * columns, dtype=F64).reshape(1, 1, rows, columns), mesh, {2: "height"})


def mean_on_one_rank(mesh: hc.Mesh) -> None:
    x = cut(mesh)
    if mesh.rank == 0:
        x.mean()
    (x * 2).mean()


def forward_on_one_rank(mesh: hc.Mesh) -> None:
    model, x = hc.distribute(nn.Conv2d(1, 1, 3, padding=1).double(), mesh), cut(mesh)
    if mesh.rank == 0:
        model(x)
    model(x)


def large_halo_on_one_rank(mesh: hc.Mesh) -> None:
    model, x = hc.distribute(nn.Conv2d(1, 1, 3, padding=1).double(), mesh), cut(mesh, 16, 1 << 15)
    if mesh.rank == 0:
        model(x)
    model(x)


def helper_from_two_lines(mesh: hc.Mesh) -> None:
    x = cut(mesh)

    def log(value: torch.Tensor) -> torch.Tensor:
        return value.abs().mean()

    if mesh.rank == 0:
        log(x)
    log(x)


def two_calls_in_one_line(mesh: hc.Mesh) -> None:
    x = cut(mesh)
    x.mean() if mesh.rank == 0 else (x * 2).mean()


PATHS = [mean_on_one_rank, forward_on_one_rank, large_halo_on_one_rank, helper_from_two_lines, two_calls_in_one_line]


@pytest.mark.parametrize("program", PATHS)
def test_threads_that_diverge_raise(program: Callable[[hc.Mesh], None]) -> None:
    with pytest.raises(
        hc.RankFailure, match=r"rank \d is in .*test_divergence.py:\d+ .*while rank \d is in .*different"
    ):
        run_local(2, lambda: program(hc.Mesh(height=2)))


def seconds_until_noticed(name: str) -> tuple[str, float]:
    forget()
    hc.init(deadline=60.0)
    mesh = hc.Mesh(height=2)
    began = time.monotonic()
    try:
        {program.__name__: program for program in PATHS}[name](mesh)
    except hc.RankFailure as error:
        return str(error), time.monotonic() - began
    return "nothing noticed", 0.0


@pytest.mark.long
@pytest.mark.parametrize("program", PATHS)
def test_processes_that_diverge_raise_long_before_the_deadline(program: Callable[[hc.Mesh], None]) -> None:
    with RankPool(2) as pool:
        outcomes = pool.outcomes(seconds_until_noticed, program.__name__, deadline=90.0)
    name = program.__name__
    for outcome in outcomes:
        text, seconds = outcome.value
        assert "while rank" in text and text.count(", called at ") == 2 and text.count(f"({name})") == 2, text
        assert seconds < 30.0, text


def large_sums_by_some(some: list[int], ranks: int = 4) -> None:
    """The sums have one size, so that only the messages before them can tell that they are different ones."""
    x = cut(hc.Mesh(height=ranks), ranks, 1 << 15)
    if x.sharding.mesh.rank in some:
        x.sum(2)
    x.sum(2)


@pytest.mark.parametrize(("ranks", "some"), [(4, [1]), (4, [2, 3]), (4, [0, 2]), (9, [8]), (9, [3, 4])])
def test_large_sums_of_different_lines_end_on_no_rank(ranks: int, some: list[int]) -> None:
    with pytest.raises(hc.RankFailure, match="different paths"):
        run_local(ranks, lambda: large_sums_by_some(some, ranks))


def seconds_until_large_sums_fail(some: list[int]) -> tuple[str, float]:
    forget()
    hc.init(deadline=60.0)
    began = time.monotonic()
    try:
        large_sums_by_some(some)
    except hc.RankFailure as error:
        return str(error), time.monotonic() - began
    return "a sum has ended", 0.0


@pytest.mark.long
@pytest.mark.parametrize("some", [[1], [2, 3], [0, 2]])
def test_large_sums_of_different_lines_fail_on_every_rank(some: list[int]) -> None:
    with RankPool(4) as pool:
        outcomes = [outcome.value for outcome in pool.outcomes(seconds_until_large_sums_fail, some, deadline=90.0)]
    assert all("rank" in text and seconds < 30.0 for text, seconds in outcomes), outcomes
    assert sum("while rank" in text and text.count("(large_sums_by_some)") == 2 for text, _ in outcomes) >= 2, outcomes


def replicas_on_their_own(steps: int) -> list[float]:
    """Nothing crosses ``data``, so that each replica may do as it likes."""
    mesh = hc.Mesh(data=2, height=2)
    x = hc.shard(torch.ones(1, 1, 8, 4, dtype=F64), mesh, {2: "height"})
    found = []
    for step in range(steps):
        if mesh.coordinates["data"] == 0 and step % 2:
            x.abs().mean()
        found.append((x * step).mean().item())
    return found


def test_replicas_may_branch() -> None:
    assert run_local(4, lambda: replicas_on_their_own(4)) == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert shared_pool(4).run(replicas_on_their_own, 4) == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_a_path_is_a_place_in_the_source() -> None:
    def here() -> int:
        return call_path(None)

    first = [here() for _ in range(3)]
    assert len(set(first)) == 1
    assert here() != here()
    assert "test_divergence.py" in describe_path(first[0])


def progress_bar(items: object, disable: bool) -> object:
    """As those of tqdm and rich are written: a generator of an installed package."""
    source = """
def bar(items, disable):
    if disable:
        yield from items
        return
    for item in items:
        yield item
"""
    found: dict[str, Callable[..., object]] = {}
    exec(compile(source, str(Path(sysconfig.get_path("purelib"), "bars", "std.py")), "exec"), found)
    return found["bar"](items, disable)


def test_one_rank_may_show_a_progress_bar() -> None:
    def means(mesh: hc.Mesh) -> list[float]:
        batches = (cut(mesh) * step for step in range(3))
        return [x.mean().item() for x in progress_bar(batches, mesh.rank != 0)]  # type: ignore[attr-defined]

    assert run_local(2, lambda: means(hc.Mesh(height=2))) == [[0.0, 15.5, 31.0]] * 2


def test_ranks_that_differ_in_an_outer_call_are_told_so() -> None:
    with pytest.raises(hc.RankFailure) as raised:
        run_local(2, lambda: helper_from_two_lines(hc.Mesh(height=2)))
    assert str(raised.value).count("(log), from ") == 2 and str(raised.value).count("(helper_from_two_lines)") == 2


def test_calls_of_the_launcher_do_not_count() -> None:
    def inner() -> int:
        return call_path(LauncherCalls(threading.get_ident(), outer_calls))

    def wrapped() -> int:
        return inner()

    outer_calls = 10**6
    assert inner() == wrapped() == inner()


def test_tags_tell_exchanges_apart() -> None:
    group = (0, 1)
    tag = counted_tag(5, group, "conv2d", 77) | size_bits(10, F64)
    other = counted_tag(5, group, "conv2d", 78) | size_bits(10, F64)
    assert diverged(tag, other) and not diverged(tag, tag)
    assert not diverged(tag, counted_tag(6, group, "conv2d", 78) | size_bits(10, F64))
    assert not diverged(tag, counted_tag(5, (0, 2), "conv2d", 78) | size_bits(10, F64))
    assert diverged(tag, counted_tag(5, group, "conv2d", 77) | size_bits(12, F64))
    assert called_elsewhere(tag, other)
    assert not called_elsewhere(tag, counted_tag(5, group, "conv2d", 77) | size_bits(12, F64))
    assert tag < 1 << 63 and 0 <= folded(tag, 31) < 1 << 31


FORKED = """
    import multiprocessing, os, sys
    import torch, halocline as hc

    def work(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
        hc.init(deadline=20.0)
        x = hc.shard(torch.ones(1, 1, 8, 4), hc.Mesh(height=2), {2: "height"})
        assert torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3), padding=1).mean().item() > 0

    def profiled(function, *args):
        return function(*args)

    if __name__ == "__main__":
        other = multiprocessing.get_context("fork").Process(target=work, args=(1,))
        other.start()
        profiled(work, 0)
        other.join(30)
        assert other.exitcode == 0
        print("both are right")
"""


@pytest.mark.long
def test_launchers_may_differ(tmp_path: Path) -> None:
    """Rank 0 runs in the parent, under a wrapper; rank 1 in its fork."""
    (tmp_path / "forked.py").write_text(textwrap.dedent(FORKED))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(tmp_path / "forked.py"), str(port)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert "both are right" in ran.stdout, ran.stderr
