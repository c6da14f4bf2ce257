"""Patterns by brute force, schedules that mirror each other, METG of known curves."""

import math

import pytest

from halocline.taskbench.graph import PATTERNS, TaskBenchError, TaskGraph
from halocline.taskbench.metg import GranularityPoint, curve, metg
from halocline.taskbench.schedule import HERE, own_columns, plan_rows
from halocline.taskbench.sharded import EXPRESSED, unfit_for_rule

WIDTHS = (1, 2, 3, 5, 8, 16)


def wanted(graph: TaskGraph, t: int, i: int) -> set[int]:
    """Task Bench's own formulas, written again."""
    w, r, log = graph.width, graph.radix, max(1, math.ceil(math.log2(graph.width)))
    match graph.pattern:
        case "trivial":
            found = set()
        case "no_comm":
            found = {i}
        case "stencil_1d":
            found = {i - 1, i, i + 1}
        case "stencil_1d_periodic":
            found = {(i - 1) % w, i, (i + 1) % w}
        case "dom":
            found = {i - 1, i}
        case "tree":
            found = {i // 2}
        case "fft":
            reach = 2 ** ((t + log - 1) % log)
            found = {i - reach, i, i + reach}
        case "all_to_all":
            found = set(range(w))
        case "nearest":
            found = {each for each in range(w) if i - r // 2 <= each <= i + (r - 1) // 2}
        case "spread":
            found = {(i + k * w // r + (t % 3 if k else 0)) % w for k in range(r)}
        case _:
            raise AssertionError(graph.pattern)
    return {each for each in found if 0 <= each < w and each in graph.columns(t - 1)}


@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name not in ("random_nearest", "stencil_3d")])
def test_edges_are_those_of_task_bench(pattern: str) -> None:
    for width in WIDTHS:
        for radix in (1, 2, 3, 5):
            graph = TaskGraph(pattern, steps=9, width=width, radix=radix)
            for step in range(1, graph.steps):
                for column in graph.columns(step):
                    assert set(graph.dependencies(step, column)) == wanted(graph, step, column)
            assert not any(graph.dependencies(0, column) for column in graph.columns(0))


def test_random_nearest_keeps_itself_and_a_part_of_the_window() -> None:
    graph = TaskGraph("random_nearest", steps=4, width=400, radix=9)
    kept = [graph.dependencies(1, column) for column in range(10, 390)]
    assert all(column in each for column, each in zip(range(10, 390), kept, strict=True))
    assert all(abs(other - column) <= 4 for column, each in zip(range(10, 390), kept, strict=True) for other in each)
    assert 2.5 < sum(map(len, kept)) / len(kept) < 3.5  # itself, and a quarter of eight
    assert graph.dependencies(1, 50) == graph.dependencies(4, 50)  # the same again after a period


def test_stencil_3d_is_a_cube_with_six_faces() -> None:
    graph = TaskGraph("stencil_3d", steps=2, width=27)
    assert graph.grid == (3, 3, 3)
    assert graph.dependencies(1, 13) == (4, 10, 12, 13, 14, 16, 22)
    assert graph.dependencies(1, 0) == (0, 1, 3, 9)
    assert TaskGraph("stencil_3d", width=2).grid == (2, 1, 1)


def test_dom_grows_and_shrinks_and_tree_doubles() -> None:
    dom = TaskGraph("dom", steps=6, width=3)
    assert [list(dom.columns(step)) for step in range(6)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [1, 2], [2]]
    tree = TaskGraph("tree", steps=4, width=5)
    assert [len(tree.columns(step)) for step in range(4)] == [1, 2, 4, 5]
    assert tree.tasks() == 12


@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize(("width", "ranks"), [(8, 2), (7, 3), (5, 5), (16, 4)])
def test_schedules_of_ranks_mirror_each_other(pattern: str, width: int, ranks: int) -> None:
    graph = TaskGraph(pattern, steps=7, width=width)
    planned = [plan_rows(graph, ranks, rank) for rank in range(ranks)]
    for step in range(graph.steps):
        rows = [rows[step] for rows in planned]
        sent = {(rank, peer): columns for rank, row in enumerate(rows) for peer, columns in row.sends}
        received = {(peer, rank): columns for rank, row in enumerate(rows) for peer, columns in row.receives}
        assert sent == received
        assert all(row.moves == bool(sent) for row in rows)
        assert [column for row in rows for column, _ in row.tasks] == list(graph.columns(step))
        for rank, row in enumerate(rows):
            own = own_columns(width, ranks, rank)
            for column, inputs in row.tasks:
                assert tuple(each.column for each in inputs) == graph.dependencies(step, column)
                for each in inputs:
                    place = own.start + each.place if each.source == HERE else row.receives[each.source][1][each.place]
                    assert place == each.column


def test_metg_is_twice_a_constant_overhead_and_none_without_a_crossing() -> None:
    best, overhead, sizes = 1e6, 30e-6, [2**n for n in range(12, -1, -1)]
    walls = [100 * (size / best + overhead) / 2 for size in sizes]  # 100 tasks on 2 cores
    found = curve("fft", "x", 2, 100, [walls, [1.5 * each for each in walls], walls], sizes, best)
    assert found.metg == pytest.approx(2 * overhead, rel=0.02)
    assert found.rounds[0] == found.metg and found.rounds[1] > found.metg  # the median is not moved by one slow round
    assert found.limit(50) == pytest.approx(50 * found.metg)
    assert metg([point for point in found.points if point.efficiency > 0.5]) is None
    assert metg([point for point in found.points if point.efficiency < 0.5]) is None
    dip = [GranularityPoint(4, 4.0, 0.9), GranularityPoint(2, 3.0, 0.45), GranularityPoint(1, 2.0, 0.6)]
    assert 3.0 < (metg(dip) or 0) < 4.0  # the first crossing from above: no luck of a smaller size counts


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pattern": "stencil"}, "no pattern 'stencil'"),
        ({"pattern": "fft", "kernel": "quick"}, "no kernel 'quick'"),
        ({"pattern": "fft", "output_bytes": 24}, "pairs of 16 bytes"),
        ({"pattern": "fft", "steps": 1}, "2 steps"),
    ],
)
def test_graphs_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(TaskBenchError, match=said):
        TaskGraph(**wrong)  # type: ignore[arg-type]


def test_what_no_convolution_expresses_is_said() -> None:
    assert {name for name in PATTERNS if unfit_for_rule(TaskGraph(name), 2)} == {
        "trivial", "tree", "all_to_all", "spread",
    }  # fmt: skip
    assert "no rule expresses tree" in unfit_for_rule(TaskGraph("tree"), 2)
    assert "do not divide" in unfit_for_rule(TaskGraph("fft", width=9), 2)
    assert set(EXPRESSED) < set(PATTERNS)
    with pytest.raises(TaskBenchError, match="without a task"):
        plan_rows(TaskGraph("fft", width=2), 3, 0)
