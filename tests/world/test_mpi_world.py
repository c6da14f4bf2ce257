"""Ranks over MPI, started by mpiexec: what the process world and the movements are tested with, run again on them."""

import inspect
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mpi_ranks
import pytest
import test_guards
import test_movements
import test_ranks
import torch

import halocline as hc
from halocline.doctor import checks
from halocline.testing import EXACT, RankPool, relative_error
from halocline.testing.mpi_place import MpiPlace, mpiexec
from halocline.world import joining, mpi_library

if mpiexec() is None:
    pytest.skip("needs mpiexec, such as that of the mpich wheel", allow_module_level=True)
pytest.importorskip("mpi4py", reason="needs mpi4py")

RANKS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS, place=MpiPlace()) as started:
        yield started


# ---- the same tests, on these ranks ----


def cases(module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every test of the module with every set of its parameters, where the ranks suffice."""
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        marks = [mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(given for _, given in marks)):
            arguments = dict(zip((names for names, _ in marks), values, strict=True))
            ranks = max(arguments.get("ranks", 1), math.prod(arguments.get("mesh", {}).values()))
            if ranks <= RANKS and set(arguments) == set(inspect.signature(function).parameters):
                yield name, arguments


MOVEMENTS = list(cases(test_movements))
GUARDS = list(cases(test_guards))


@pytest.mark.long
@pytest.mark.parametrize("module", ["test_movements", "test_guards"])
def test_what_threads_do_mpi_does(pool: RankPool, module: str) -> None:
    """One call for a whole module: the ranks run each test themselves, with MPI where it would have had threads."""
    found = {"test_movements": MOVEMENTS, "test_guards": GUARDS}[module]
    assert len(found) > 15
    for failures in pool.run(mpi_ranks.run_tests, module, found, deadline=120.0):
        assert failures == []


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"data": 2, "height": 2}, {"data": 1, "height": 4}, {"data": 4, "height": 1}])
def test_training_equals_one_rank(pool: RankPool, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    monkeypatch.setattr(test_ranks, "shared_pool", lambda size: pool)
    test_ranks.test_training_equals_one_rank(sizes)


@pytest.mark.long
@pytest.mark.parametrize(
    "test",
    [
        test_ranks.test_plain_inputs_on_a_data_mesh_are_local_batches,
        test_ranks.test_different_models_on_ranks_are_refused,
        test_ranks.test_rank_zeros_weights_go_everywhere,
    ],
)
def test_as_between_processes(pool: RankPool, monkeypatch: pytest.MonkeyPatch, test: Any) -> None:
    monkeypatch.setattr(test_ranks, "shared_pool", lambda size: pool)
    test()


@pytest.mark.trial  # its deadline is short, and ranks over MPI ask for messages in a loop
@pytest.mark.parametrize("kind", ["dies", "hangs", "diverges"])
def test_a_failing_rank_is_named_by_all_others(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(test_ranks, "RankPool", lambda size: RankPool(size, place=MpiPlace()))
    test_ranks.test_a_failing_rank_is_named_by_all_others(kind)


# ---- what is MPI's own ----


def test_a_network_cut_in_rows_and_columns_equals_one_rank(pool: RankPool) -> None:
    model, x = mpi_ranks.network()
    x.requires_grad_()
    true = model(x).square().mean()
    true.backward()
    for kind, loss, gradients, of_input in pool.run(mpi_ranks.cut_network):
        assert kind == "MpiWorld"
        assert relative_error(loss, true.detach()) <= EXACT
        assert relative_error(of_input, x.grad) <= EXACT
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) <= EXACT


@pytest.mark.long
def test_comparing_places_during_a_wait_takes_nothing_from_it(pool: RankPool) -> None:
    assert pool.run(mpi_ranks.cut_network_comparing_places) == [4] * RANKS


def test_gradients_are_averaged_while_backward_runs(pool: RankPool) -> None:
    model, batches = mpi_ranks.deep_network(RANKS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    found = pool.run(mpi_ranks.average_with_overlap)
    for sums, state in found:
        assert sums > 4  # several a pass, from the second on
        for name, value in model.state_dict().items():
            assert relative_error(state[name], value) <= EXACT
            assert torch.equal(state[name], found[0][1][name])


def test_a_sum_goes_on_while_nobody_waits(pool: RankPool) -> None:
    """A look now and then would not do: 8 MB take thousands of calls of MPI."""
    assert all(looks < 200 for looks in pool.run(mpi_ranks.looks_until_done))


def test_a_dtype_that_mpi_cannot_sum_is_refused(pool: RankPool) -> None:
    assert all("float8" in refused and "convert" in refused for refused in pool.run(mpi_ranks.sum_float8))


def check_same_bits(found: list[dict[Any, tuple[torch.Tensor, torch.Tensor]]], ranks: int) -> None:
    for count, size, dtype in found[0]:
        own = [found[rank][count, size, dtype] for rank in range(count)]
        assert all(torch.equal(total, own[0][1]) for _, total in own), (count, size, dtype)
        true = torch.stack([part.double() for part, _ in own]).sum(0)
        scale = torch.stack([part.double().abs() for part, _ in own]).sum(0)
        rounding = torch.finfo(dtype).eps * ranks
        assert ((own[0][1].double() - true).abs() <= rounding * scale).all(), (count, size, dtype)


def test_sums_have_the_same_bits_on_every_rank(pool: RankPool) -> None:
    check_same_bits(pool.run(mpi_ranks.sums_of_many_sizes), RANKS)


@pytest.mark.long
def test_sums_have_the_same_bits_on_eight_ranks() -> None:
    with RankPool(8, place=MpiPlace()) as eight:
        check_same_bits(eight.run(mpi_ranks.sums_of_many_sizes, deadline=120.0), 8)


def test_ranks_that_take_different_paths_raise(pool: RankPool) -> None:
    for text in pool.run(mpi_ranks.diverge):
        assert "conv2d" in text and "nothing came from rank" in text


def test_a_rank_that_leaves_is_heard_at_once(pool: RankPool) -> None:
    """The deadline of these waits is beyond that of the test."""
    first, _, third, fourth = pool.run(mpi_ranks.wait_for_one_that_leaves, deadline=30.0)
    assert "the connection to rank 1 closed" in first and "a reduction did not complete" in third
    assert "an earlier exchange failed" in fourth


def test_the_doctor_names_the_library_and_its_threads() -> None:
    found = checks.check_mpi("4")
    assert found.status == "ok" and "thread level multiple" in found.found
    assert checks.check_mpi(None).status == "ok"  # nobody needs it


# ---- how it is chosen ----


def test_without_mpi4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mpi_library.library.cache_clear()
    with pytest.raises(hc.MeshError, match=r"halocline\[mpi\]"):
        joining.connect(5.0, "mpi")


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(hc.MeshError, match="no transport 'pigeon'; it is torch or mpi"):
        joining.connect(5.0, "pigeon")


STARTED = {
    "mpich": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, True),
    "open mpi": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, True),
    "pmix": ({"PMIX_RANK": "0"}, True),
    "one rank": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
    "one task of srun": ({"PMIX_RANK": "0", "SLURM_NTASKS": "1"}, False),
    "nobody": ({}, False),
}


@pytest.mark.parametrize("case", STARTED)
def test_mpiexec_is_known_by_its_variables(case: str) -> None:
    variables, several = STARTED[case]
    assert joining.started_by_mpiexec(variables) is several
    told = next(checks.check_launch(None, variables, gpus=0)).found
    assert ("over MPI" if several else "single rank") in told


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import halocline as hc
mesh = hc.Mesh(data=-1)
from halocline.world import Label
total = mesh.world.sum(torch.ones(3), tuple(range(mesh.size)), Label("sum", "program"))
dist.all_reduce(total)
with open(f"{sys.argv[2]}/rank{mesh.rank}", "w") as said:
    print(type(mesh.world).__name__, os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"], int(total[0]), file=said)
dist.barrier()
if mesh.rank == 1 and sys.argv[1] == "raises":
    raise ValueError("of rank 1 alone")
if sys.argv[1] == "raises":
    mesh.world.sum(torch.ones(3), tuple(range(mesh.size)), Label("sum", "after"))
"""


@pytest.mark.long
@pytest.mark.parametrize("ending", ["well", "raises"])
def test_a_program_under_mpiexec_finds_mpi_by_itself(ending: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [mpiexec() or "", "-n", "3", sys.executable, str(program), ending, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, check=False)
    said = [(tmp_path / f"rank{rank}").read_text().strip() for rank in range(3)]
    assert said == [f"MpiWorld {rank} 3 9" for rank in range(3)], done.stderr
    assert (done.returncode == 0) is (ending == "well")
    assert ("of rank 1 alone" in done.stderr) is (ending == "raises")


@pytest.mark.long
def test_ranks_that_diverge_hear_of_it_long_before_the_deadline() -> None:
    with RankPool(2, place=MpiPlace()) as two:
        outcomes = two.outcomes(mpi_ranks.print_a_mean_on_rank_0, deadline=90.0)
    for outcome in outcomes:
        text, seconds = outcome.value
        assert text.count("mpi_ranks.py:") == 2 and "different paths" in text
        assert seconds < 30.0
