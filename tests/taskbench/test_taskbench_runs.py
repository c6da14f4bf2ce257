"""Graphs on ranks: every pattern checks out, and a lost, stale or mixed-up input is caught."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halocline.cli.app import app
from halocline.plan.machine import load_machine
from halocline.taskbench import central, ranks
from halocline.taskbench.chart import draw_curves
from halocline.taskbench.exchanges import over_world
from halocline.taskbench.execute import GraphRun, MessageRun, TaskExchange, output_pair, run_graphs
from halocline.taskbench.graph import KERNELS, PATTERNS, TaskBenchError, TaskGraph
from halocline.taskbench.kernels import WORK, make_kernel
from halocline.taskbench.measure import TaskBenchResult, TaskBenchSettings
from halocline.taskbench.metg import Curve, GranularityPoint
from halocline.taskbench.runtimes import RUNTIMES, chosen_runtimes
from halocline.taskbench.sharded import ShardedRun, unfit_for_rule
from halocline.taskbench.spatial import write_spatial_metg
from halocline.testing.pool import shared_pool
from halocline.world import World, run_local, this_world


def run_everything(size: int) -> int:
    """Every pattern by messages and through a rule, on ranks that are threads; the number of runs."""
    world, count = this_world(), 0
    for pattern in PATTERNS:
        for width, output_bytes in ((size, 16), (4 * size, 16), (2 * size, 48)):
            graph = TaskGraph(pattern, 7, width, output_bytes=output_bytes, kernel="empty")
            runs: list[GraphRun] = [MessageRun(graph, world.size, world.rank, over_world(world))]
            runs += [] if unfit_for_rule(graph, size) else [ShardedRun(graph, world)]
            for run in runs:
                run_graphs([run], 1)
            count += len(runs)
    return count


@pytest.mark.parametrize("size", [2, 3])
def test_every_pattern_runs_with_right_inputs(size: int) -> None:
    assert min(run_local(size, partial(run_everything, size))) > len(PATTERNS) * 3


def run_several() -> float:
    world = this_world()
    graphs = [TaskGraph(p, 6 + n, 4, kernel="load_imbalance", number=n) for n, p in enumerate(("fft", "spread", "dom"))]
    return run_graphs([MessageRun(g, world.size, world.rank, over_world(world)) for g in graphs], 2)


def test_several_graphs_run_at_once() -> None:
    assert all(seconds > 0 for seconds in run_local(2, run_several))


class Stale(TaskExchange):
    """A runtime that delivers what it has received the last time."""

    steps = 3  # it fails in the last row, so that no rank waits in vain

    def __init__(self, inner: TaskExchange, kept: list[Sequence[memoryview]]) -> None:
        self.inner, self.kept = inner, kept

    def begin(self) -> None:
        self.inner.begin()

    def wait(self) -> Sequence[memoryview]:
        self.kept.append([memoryview(bytes(each)) for each in self.inner.wait()])
        return self.kept[max(0, len(self.kept) - 2)]


class Swapped(Stale):
    """A runtime that takes one neighbour's message for the other's."""

    steps = 2

    def wait(self) -> Sequence[memoryview]:
        return list(reversed(list(self.inner.wait())))


def spoil(kind: type[Stale]) -> str:
    world: World = this_world()
    kept: list[Sequence[memoryview]] = []
    graph = TaskGraph("stencil_1d", kind.steps, 2 * world.size, kernel="empty")

    def make(*arguments):  # type: ignore[no-untyped-def]
        return kind(over_world(world)(*arguments), kept)

    run = MessageRun(graph, world.size, world.rank, make)
    try:
        run_graphs([run], 1)
    except TaskBenchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "said"), [(Stale, "given that of (step 0,"), (Swapped, "mixed up a dependency")])
def test_a_runtime_that_loses_or_reorders_messages_is_caught(kind: type[Stale], said: str) -> None:
    caught = run_local(3, partial(spoil, kind))
    assert said in caught[1]  # the rank in the middle has two neighbours


def wrong_dependency(pattern: str, rule: bool, fault: tuple[int, int]) -> str:
    world = this_world()
    graph = TaskGraph(pattern, 6, 4, kernel="empty")
    try:
        if rule:
            run_graphs([ShardedRun(graph, world, fault)], 1)
        else:
            run_graphs([MessageRun(graph, world.size, world.rank, over_world(world), fault)], 1)
    except TaskBenchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rule", [False, True])
@pytest.mark.parametrize("pattern", ["stencil_1d", "nearest", "fft"])
def test_a_wrong_dependency_is_caught_and_named(pattern: str, rule: bool) -> None:
    caught = run_local(
        2, partial(wrong_dependency, pattern, rule, (5, 2))
    )  # in the last row, so that no rank waits in vain
    assert caught[0] == "" and "task (step 5, column 2) needs the output of" in caught[1]


def test_ranks_of_each_transport_agree() -> None:
    graph = TaskGraph("stencil_1d", 4, 4)
    for runtime in ("world", "world-gloo", "tensor", "tensor-gloo", "torch", "torch-batch"):
        seconds = shared_pool(2).run(ranks.seconds_of, runtime, [graph], [2, 1])
        assert all(len(each) == 2 and min(each) > 0 for each in seconds)
    assert all(each > 0 for each in shared_pool(2).run(ranks.kernel_seconds, "compute_bound", 4, 2))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_their_iterations(name: str) -> None:
    kernel = make_kernel(name)
    kernel(0)
    kernel(3)
    assert WORK[name][0] > 0 or name == "empty"


def test_central_tasks_check_their_inputs() -> None:
    graph = TaskGraph("stencil_1d", 3, 3)
    first = [central.task(graph, 0, column, 1) for column in range(3)]
    assert central.task(graph, 1, 1, 1, *first)[:16] == output_pair(1, 1)
    with pytest.raises(TaskBenchError, match="wrong input from 0"):
        central.task(graph, 1, 1, 1, first[1], first[1], first[2])


def test_runtimes_are_chosen_by_name_and_family() -> None:
    assert [each.name for each in chosen_runtimes(["bare", "torch"])] == ["torch", "torch-batch", "mpi"]
    assert len(chosen_runtimes(["all"])) == len(RUNTIMES)
    with pytest.raises(TaskBenchError, match="no runtime 'horse'"):
        chosen_runtimes(["horse"])


def test_the_chart_shows_every_curve() -> None:
    points = tuple(GranularityPoint(n, n * 1e-6 + 1e-5, n / (n + 10)) for n in (1, 4, 16, 64))
    drawn = draw_curves("x", [Curve("fft", name, 2, 200, points, 2e-5, (2e-5,)) for name in ("world", "torch")])
    assert drawn.count("METG 20 µs") == 2 and "fft: efficiency" in drawn and drawn.startswith("<svg")


def test_the_spatial_metg_goes_into_a_machine_file(tmp_path: Path) -> None:
    machine = tmp_path / "here.json"
    machine.write_text(load_machine("perlmutter").model_dump_json())
    points = tuple(GranularityPoint(n, n * 1e-6 + 1e-5, n / (n + 10)) for n in (1, 4, 16, 64))
    curves = tuple(
        Curve("stencil_3d", name, 2, 200, points, seconds, ()) for name, seconds in (("world", 2e-5), ("tensor", 5e-5))
    )
    settings = TaskBenchSettings(("stencil_3d",), tuple(chosen_runtimes(["world"])), output_bytes=65536)
    write_spatial_metg(machine, settings, TaskBenchResult(curves, (), 1.0))
    found = load_machine(str(machine)).spatial_metg_us
    assert found is not None and found.value == pytest.approx(50) and found.source == "measured"
    assert "faces of 65,536 bytes" in found.reference
    with pytest.raises(TaskBenchError, match="was not measured"):
        write_spatial_metg(machine, settings, TaskBenchResult((), (), 1.0))


def test_mistakes_are_one_clear_line() -> None:
    for arguments, said in (
        (["--pattern", "ring"], "no pattern 'ring'"),
        (["--runtime", "spark"], "no runtime 'spark'"),
        (["--inject", "3"], "give a step and a column"),
        (["--width", "1"], "without a task"),
    ):
        ended = CliRunner().invoke(app, ["taskbench", *arguments])
        assert ended.exit_code == 2 and said in ended.stderr and len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.long
def test_the_command_measures_and_catches_an_injected_fault(tmp_path: Path) -> None:
    plot = tmp_path / "curves.svg"
    arguments = ["taskbench", "--pattern", "stencil_1d", "--steps", "20", "--repeat", "2", "--json"]
    ended = CliRunner().invoke(app, [*arguments, "--runtime", "world,tensor,mpi,world-mpi", "--plot", str(plot)])
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout.splitlines()[-1])
    assert set(told["runtimes"]["stencil_1d"]) == {"world", "tensor", "mpi", "world-mpi"}
    assert all(entry["overhead_us"] > 0 for entry in told["runtimes"]["stencil_1d"].values())
    assert plot.read_text().startswith("<svg")
    for runtime in ("world", "torch", "tensor", "mpi"):
        ended = CliRunner().invoke(app, [*arguments, "--runtime", runtime, "--inject", "19,1"])
        assert ended.exit_code == 2 and "mixed up a dependency" in ended.stderr
