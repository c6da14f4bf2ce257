"""Staging when it goes wrong: the same error on every rank, no half file, and the next run goes on from there."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from staging import check_same, destinations, errors_of, opened, put, run_nodes, source, tree
from typer.testing import CliRunner

from benchmarks.stage import StagePlan
from halocline.cli.data_stage import stage as stage_command
from halocline.data.staging import StageError, StageReport, node_store, reading, stage
from halocline.data.staging.listing import PREFIX
from halocline.errors import HaloclineError, RankFailure
from halocline.testing import run_local, shared_pool
from halocline.world import LocalWorld

__all__ = ["source"]  # a fixture
stage_module = sys.modules["halocline.data.staging.stage"]  # its package may have the function under that name


def after_listing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    real = stage_module.list_source

    def listing(*arguments: Any) -> Any:
        found = real(*arguments)
        change()
        return found

    monkeypatch.setattr(stage_module, "list_source", listing)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, 5), "7,000 bytes when listed, 5 now"),
    "grown": (lambda path: path.write_bytes(bytes(7_001)), "7,000 bytes when listed"),
    "touched": (lambda path: os.utime(path, (1, 1)), "written to after it was listed"),
    "gone": (lambda path: path.unlink(), "No such file or directory"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_source_that_changes_is_the_same_error_on_every_rank(
    source: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    change, message = CHANGES[how]
    monkeypatch.setattr(reading, "BACKOFF", 0.01)
    after_listing(monkeypatch, lambda: change(source / "part1" / "file07.bin"))
    told = errors_of(3, source, retries=1)
    assert len(set(told)) == 1
    assert message in told[0] and "part1/file07.bin" in told[0] and "in 2 attempts" in told[0]
    assert told[0].startswith("node ")
    for destination in destinations(source, 3):
        assert not (destination / PREFIX).exists() and not (destination / "part1" / "file07.bin").exists()


def test_a_read_that_fails_once_is_tried_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, read = [OSError(errno.EIO, "Input/output error")], reading.SourceReaders._read

    def flaky(readers: Any, *arguments: Any) -> None:
        read(readers, *arguments)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(reading.SourceReaders, "_read", flaky)
    report = run_nodes(2, source)[0]
    assert report.total("retried") == 1 and report.opens == len(opened(source)) == 13
    check_same(source, 2)


def test_a_read_that_hangs_is_given_up(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(reading.SourceReaders, "_read", lambda *arguments: end.wait(5))
    told = errors_of(2, source, retries=0, timeout=0.2)
    end.set()
    assert len(set(told)) == 1 and "nothing moved for 0.2 s" in told[0]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_disk_that_fills_up_is_told_on_every_rank_and_leaves_no_half_file(
    source: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    left, write = [20_000 * nodes], node_store.write_all

    def filling(target: int, data: memoryview) -> None:
        left[0] -= data.nbytes
        if left[0] < 0:
            write(target, data[: data.nbytes // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, data)

    monkeypatch.setattr(node_store, "write_all", filling)
    told = errors_of(nodes, source)
    assert len(set(told)) == 1 and "is full: No space left on device while writing" in told[0]
    expected = tree(source)
    for destination in destinations(source, nodes):
        assert tree(destination).items() <= expected.items() and not (destination / PREFIX).exists()
    monkeypatch.setattr(node_store, "write_all", write)
    run_nodes(nodes, source)
    check_same(source, nodes)


def test_too_little_room_is_known_before_anything_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "free_bytes", lambda folder: 100 if folder.name == "node1" else 10**9)
    told = errors_of(2, source)
    assert len(set(told)) == 1 and opened(source) == []
    assert "node 1: " in told[0] and "/node1 needs 66,000 bytes and has 100" in told[0]


def corrupting(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left, complete = [times], LocalWorld.complete

    def flipping(world: Any, posted: Any, label: Any) -> None:
        complete(world, posted, label)
        for _, buffer, _ in posted if label.place == "blocks" and left[0] else []:
            left[0] -= 1
            buffer[5] ^= 1

    monkeypatch.setattr(LocalWorld, "complete", flipping)


def test_damage_on_the_way_is_found_and_sent_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupting(monkeypatch, times=1)
    report = run_nodes(2, source)[0]
    assert report.total("retried") == 1 and report.opens == 12
    check_same(source, 2)


def test_damage_that_stays_is_an_error_on_every_rank(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupting(monkeypatch, times=10**6)
    told = errors_of(3, source, retries=1)
    assert len(set(told)) == 1 and "attempts: its checksum is" in told[0] and "did not arrive from node" in told[0]


REFUSALS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "nothing": (lambda source: {"source": source / "nowhere"}, "there is nothing at"),
    "no match": (lambda source: {"source": source, "pattern": "*.nc"}, "matches '\\*.nc'"),
    "too many": (lambda source: {"source": source, "count": 13}, "there are 12 files"),
    "inside": (lambda source: {"source": source, "destination": source / "x"}, "lies inside the source"),
    "itself": (lambda source: {"source": source, "destination": source}, "lies inside the source"),
    "no readers": (lambda source: {"source": source, "readers": 0}, "readers=0"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_makes_no_sense_is_refused(source: Path, tmp_path: Path, what: str) -> None:
    options, message = REFUSALS[what]
    with pytest.raises(StageError, match=message):
        stage(**{"destination": tmp_path / "node0", **options(source)})


def test_links_to_nowhere_and_in_circles_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "circle").symlink_to(source)
    with pytest.raises(StageError, match="is a link to a folder above it"):
        stage(source, tmp_path / "node0")
    (source / "circle").unlink()
    (source / "lost").symlink_to(source / "nowhere")
    with pytest.raises(StageError, match="a link to nowhere"):
        stage(source, tmp_path / "node0")
    stage(source, tmp_path / "node0", pattern="part*/**")


def test_nodes_that_share_a_folder_are_refused(source: Path, tmp_path: Path) -> None:
    def failing() -> str:
        with pytest.raises(StageError) as caught:
            stage(source, tmp_path / "same")
        return str(caught.value)

    told = run_local(2, failing)
    assert told[0] == told[1] and "put {node} into the destination" in told[0]


def test_a_place_in_use_is_left_alone(source: Path, tmp_path: Path) -> None:
    other = node_store.NodeStore(tmp_path / "node0", 0)
    other.open()
    put(other.parts / "1.part", b"of another run")
    with pytest.raises(StageError, match="is staging to"):
        stage(source, tmp_path / "node0")
    assert (other.parts / "1.part").exists()
    other.close()
    stage(source, tmp_path / "node0")
    check_same(source, 1)


# ---- the command ----


def test_the_command_ends_with_json_and_says_what_is_wrong(source: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(stage_command)
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "node{node}"), "--json"])
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["files"], told["opens"], told["destination"]) == (12, 12, str(tmp_path / "node0"))
    check_same(source, 1)
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "node{node}")])
    assert result.exit_code == 0 and "already there" in result.stdout
    result = CliRunner().invoke(app, [str(source), str(tmp_path / "node{node}"), "--pattern", "*.nc"])
    assert result.exit_code == 2 and "no file under" in result.stderr


def test_a_bench_that_would_show_nothing_is_refused() -> None:
    for plan, message in ((StagePlan(nodes=1), "two or more"), (StagePlan(files=5), "too few to kill a node")):
        with pytest.raises(HaloclineError, match=message):
            plan.check()


# ---- real processes ----


def stage_as(source: Path, destination: Path, local_rank: int) -> StageReport | str:
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        return stage(source, destination)
    except StageError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_RANK"]


def test_one_process_a_node_works_and_the_others_hear_of_it(source: Path, tmp_path: Path) -> None:
    pool, ranks = shared_pool(2), [(0,), (1,)]
    first, second = pool.run(stage_as, source, tmp_path / "node{node}", per_rank=ranks)
    assert first == second and first.destination == tmp_path / "node0" and len(first.nodes) == 1
    check_same(source, 1)
    told = pool.run(stage_as, source / "nowhere", tmp_path / "node{node}", per_rank=ranks)
    assert told[0] == told[1] and "there is nothing at" in told[0]


def stage_and_die(source: Path, destination: Path, log: Path, dying: int | None) -> StageReport:
    """Opens of the source are written down in a way that survives a kill."""
    from halocline.world import process, this_world

    process._GRACE = 0.2  # seconds for what other ranks have to say
    node = this_world().rank

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(f"{source}{os.sep}"):
            with (log / f"{node}.txt").open("a") as lines:
                lines.write(os.path.relpath(arguments[0], source) + "\n")

    def die() -> None:
        own = Path(str(destination).replace("{node}", str(node)))
        while len(list(own.glob("part*/*"))) < 4:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    read = reading.SourceReaders._read

    def slowly(*arguments: Any) -> None:
        time.sleep(0.03)
        read(*arguments)

    sys.addaudithook(note)
    if dying is not None:  # otherwise the process is a new one
        reading.SourceReaders._read = slowly
    if node == dying:
        threading.Thread(target=die, daemon=True).start()
    return stage(source, destination, readers=1)


@pytest.mark.long
def test_a_killed_node_ends_the_others_and_the_next_run_reads_only_what_was_not_finished(
    source: Path, tmp_path: Path
) -> None:
    logs = [tmp_path / "before", tmp_path / "after"]
    for log in logs:
        log.mkdir()
    pool = shared_pool(2)
    outcomes = pool.outcomes(stage_and_die, source, tmp_path / "node{node}", logs[0], 1, grace=20.0)
    assert outcomes[1].kind == "died" and isinstance(outcomes[0].error, RankFailure)
    finished = set().union(*(tree(destination) for destination in destinations(source, 2)))
    assert 4 <= len([name for name in finished if name.endswith(".bin")]) < 12
    report = pool.run(stage_and_die, source, tmp_path / "node{node}", logs[1], None)[0]
    again = [line for file in logs[1].iterdir() for line in file.read_text().splitlines()]
    assert not finished & set(again) and len(again) == len(set(again)) == report.opens
    check_same(source, 2)
