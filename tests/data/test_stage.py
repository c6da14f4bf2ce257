"""Staging: every node gets the same files, each read from the source once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from staging import WATCHED, check_same, destinations, opened, put, run_nodes, source, tree

from halocline.data.staging import stage
from halocline.data.staging.listing import PREFIX, matcher
from halocline.data.staging.plan import Streams, itinerary, make_plan, wanted_files
from halocline.world import LocalWorld

__all__ = ["source"]  # a fixture
stage_module = sys.modules["halocline.data.staging.stage"]  # its package may have the function under that name


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_node_has_the_same_tree_and_each_file_is_opened_once(source: Path, nodes: int) -> None:
    reports = run_nodes(nodes, source)
    assert opened(source) == sorted(tree(source))
    check_same(source, nodes)
    report = reports[0]
    assert [each.nodes for each in reports] == [report.nodes] * nodes
    assert report.opens == report.files == report.total("read_files") == 12
    assert report.total("read_bytes") == report.bytes
    assert report.total("received_bytes") == report.total("passed_bytes") == (nodes - 1) * report.bytes
    assert max(node.read_bytes for node in report.nodes) <= report.bytes / nodes + 11_000


def test_files_are_passed_on_in_small_blocks(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "block_bytes", lambda nodes: 777)
    largest = []
    post = LocalWorld.post

    def noting(world: Any, sends: Any, receives: Any, label: Any) -> object:
        largest.extend(message.numel() for _, message, _ in sends if label.place == "blocks")
        return post(world, sends, receives, label)

    monkeypatch.setattr(LocalWorld, "post", noting)
    run_nodes(3, source)
    check_same(source, 3)
    assert max(largest) == 777


def test_without_ranks_it_is_a_copy(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = stage(source, tmp_path / "node0", progress=lambda done, total: seen.append((done, total)))
    check_same(source, 1)
    assert seen[-1] == (report.bytes, report.bytes) and seen == sorted(seen)


def test_odd_names_empty_files_and_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = [
        ".zgroup",
        "a b",
        "ä/ø",
        "new\nline",
        "[x]*?",
        "-n",
        "{node}",
        os.fsdecode(b"\xff\xfe"),
        "n" * 255,
        "0/0/0/0",
    ]
    for name in names:
        put(source / name, name.encode("utf-8", "surrogateescape"))
    put(source / "empty", b"")
    (source / "nothing" / "inside").mkdir(parents=True)
    put(tmp_path / "elsewhere" / "file", b"linked")
    (source / "link").symlink_to(tmp_path / "elsewhere" / "file")
    (source / "linked folder").symlink_to(tmp_path / "elsewhere")
    WATCHED[str(source)] = []
    run_nodes(2, source)
    check_same(source, 2)
    assert not (tmp_path / "node1" / "link").is_symlink()


def test_count_gives_each_node_its_own_choice(source: Path) -> None:
    def held() -> list[set[str]]:
        return [set(tree(destination)) for destination in destinations(source, 3)]

    report = run_nodes(3, source, count=5, seed=7)[0]
    read, first, everything = opened(source), held(), tree(source)
    assert [len(files) for files in first] == [5, 5, 5]
    assert read == sorted(set.union(*first)) and report.opens == len(read)
    assert all(tree(d).items() <= everything.items() for d in destinations(source, 3))
    assert first[0] != first[1]
    for destination in destinations(source, 3):
        shutil.rmtree(destination)
    run_nodes(3, source, count=5, seed=7)
    assert held() == first


def test_a_single_file_and_a_pattern(source: Path, tmp_path: Path) -> None:
    stage(source / "part1" / "file01.bin", tmp_path / "one")
    assert list(tree(tmp_path / "one")) == ["file01.bin"]
    stage(source, tmp_path / "some", pattern="part[02]/*0?.bin")
    assert sorted(tree(tmp_path / "some")) == [f"part{n % 3}/file{n:02d}.bin" for n in (0, 3, 6, 9, 2, 5, 8)]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [("**/*", ["a", "a/.b/c\nd"], []), ("*.nc", ["a.nc"], ["b/a.nc", "a.ncx"]), ("a/**", ["a/b/c"], ["b/a/c"])],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    assert all(map(matcher(pattern), yes)) and not any(map(matcher(pattern), no))


# ---- the plan ----


def test_random_plans_bring_every_file_once_to_all_who_want_it() -> None:
    chance = np.random.default_rng(0)
    for _ in range(30):
        nodes, files = int(chance.integers(1, 7)), int(chance.integers(1, 30))
        sizes = chance.integers(0, 5000, files).tolist()
        wanted = wanted_files(files, nodes, int(chance.integers(1, files + 1)), seed=1)
        held = chance.random((nodes, files)) < chance.choice([0.0, 0.3])
        plan = make_plan(sizes, wanted, held)
        has = held.copy()
        for node, reads in enumerate(plan.reads):
            assert not has[:, reads].any()
            has[node, reads] = True
        streams = Streams(plan, 1000)
        while blocks := streams.take([len(jobs) for jobs in plan.jobs]):
            routes = [itinerary(blocks, node) for node in range(nodes)]
            assert len({route.steps for route in routes if route.sends or route.receives}) <= 1
            for node, route in enumerate(routes):
                for step, peers in route.sends.items():
                    for peer, segments in peers.items():
                        assert routes[peer].receives[step][node] == segments
                        has[peer, [segment.job.file for segment in segments if segment.start == 0]] = True
        assert (has == (wanted | held)).all()


def test_a_lone_giver_keeps_every_link_busy() -> None:
    held = np.zeros((4, 1), dtype=np.bool_)
    held[2] = True
    streams = Streams(make_plan([80_000], np.ones((4, 1), dtype=np.bool_), held), 1000)
    route = itinerary(streams.take([0, 0, 1, 0]), 2)
    assert len(route.sends) == 32 and route.steps == 36  # one block a step, and two hops until the last has it


# ---- again ----


def test_what_is_there_is_not_read_again(source: Path) -> None:
    run_nodes(3, source)
    opened(source)
    report = run_nodes(3, source, verify=True)[0]
    assert opened(source) == [] and report.total("present_files") == 36 and report.total("passed_files") == 0


def test_what_another_node_holds_is_passed_on_from_there(source: Path, tmp_path: Path) -> None:
    run_nodes(3, source)
    opened(source)
    shutil.rmtree(tmp_path / "node0")
    (tmp_path / "node1" / "part0" / "file03.bin").unlink()
    (tmp_path / "node2" / "part1" / "file04.bin").write_bytes(b"cut short")
    report = run_nodes(3, source)[0]
    assert opened(source) == [] and report.opens == 0
    assert [node.received_files for node in report.nodes] == [12, 1, 1]
    check_same(source, 3)


def test_verify_finds_damage_and_brings_the_file_from_elsewhere(source: Path, tmp_path: Path) -> None:
    run_nodes(2, source)
    damaged = tmp_path / "node0" / "part2" / "file11.bin"
    damaged.write_bytes(bytes(11_000))
    opened(source)
    run_nodes(2, source)
    assert damaged.read_bytes() == bytes(11_000)  # of the right size, and nobody looked closer
    run_nodes(2, source, verify=True)
    assert opened(source) == []
    check_same(source, 2)


def test_a_file_of_the_source_that_is_new_is_staged_anew(source: Path) -> None:
    run_nodes(2, source)
    opened(source)
    put(source / "part1" / "file10.bin", bytes(10_000))  # as long as it was
    run_nodes(2, source)
    assert opened(source).count("part1/file10.bin") == 2  # one of them is this test's own
    check_same(source, 2)


def test_leftovers_go_and_a_torn_journal_is_read(source: Path, tmp_path: Path) -> None:
    put(tmp_path / "node0" / PREFIX / "3.part", b"half a file")
    put(tmp_path / "node0" / f"{PREFIX}.jsonl", b'{"path": "part0/fi')
    run_nodes(2, source)
    check_same(source, 2)
    opened(source)
    run_nodes(2, source, verify=True)
    assert opened(source) == []
