"""The rank pool: results, and above all what it does when ranks fail, die or hang."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halocline.errors import HaloclineError
from halocline.testing import pool as pool_module
from halocline.testing.pool import RankError, RankPool, shared_pool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def total(*values: int, factor: int = 1) -> tuple[int, float]:
    x = torch.tensor(float(sum(values)))
    dist.all_reduce(x)
    return dist.get_rank(), factor * x.item()


def facts() -> tuple[int, str, str, int, float]:
    env = os.environ
    return (
        os.getpid(),
        env["GLOO_SOCKET_IFNAME"],
        env["OMP_NUM_THREADS"],
        torch.get_num_threads(),
        torch.rand(()).item(),
    )


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Touchy(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise Touchy("this", "that")
    dist.barrier()


def rank_1_leaves() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def rank_1_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    raise ValueError("rank 1 did not come")


def rank_1_returns_no_pickle() -> object:
    return (lambda: None) if dist.get_rank() == 1 else "fine"


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert pool.run(total, 1, per_rank=[(10,), (20,)], factor=2) == [(0, 64.0), (1, 64.0)]


def test_calls_share_processes_but_no_random_state(pool: RankPool) -> None:
    before = dict(os.environ)
    first, second = pool.run(facts), pool.run(facts)
    assert first == second
    assert len({pid for pid, *_ in first}) == 2
    assert {one[2:4] for one in first} == {("1", 1)}
    assert first[0][1].startswith("lo")
    assert dict(os.environ) == before


def test_large_tensors_pass(pool: RankPool) -> None:
    x = torch.arange(2_000_000.0)
    assert all(torch.equal(result, 2 * x) for result in pool.run(doubled, x))


def test_a_call_is_cheap(pool: RankPool) -> None:
    pool.run(total, 1)
    started = time.perf_counter()
    for _ in range(20):
        pool.run(total, 1)
    assert (time.perf_counter() - started) / 20 < 0.1  # some 3 ms on an idle machine


def test_outcomes_give_values_beside_errors_and_the_next_call_has_fresh_ranks(pool: RankPool) -> None:
    before = {pid for pid, *_ in pool.run(facts)}
    first, second = pool.outcomes(rank_1_returns_no_pickle)
    assert (first.kind, first.value, second.kind) == ("value", "fine", "error")
    assert "pickle" in second.text
    assert before.isdisjoint(pid for pid, *_ in pool.run(facts))


@pytest.mark.long
def test_a_rank_lost_between_calls_is_replaced(pool: RankPool) -> None:
    victim = pool.run(facts)[0][0]
    os.kill(victim, signal.SIGKILL)
    assert pool._ranks is not None
    pool._ranks.processes[0].join(20)  # the system takes a while to end a process with many threads
    assert pool.run(total, 1) == [(0, 2.0), (1, 2.0)]


@pytest.mark.long
def test_an_interrupted_call_leaves_no_stale_replies(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pool.run(total, 1)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module._Ranks, "gather", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(total, 5)
    assert pool.run(total, 1) == [(0, 2.0), (1, 2.0)]


def test_an_error_names_its_rank_and_ends_the_wait_of_the_others(pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*Touchy: this and that.*in rank_1_raises") as caught:
        pool.run(rank_1_raises, deadline=30)
    assert time.monotonic() - started < 15
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, HaloclineError)  # in place of the one that does not unpickle
    assert [outcome.kind for outcome in caught.value.outcomes] == ["hung", "error"]
    assert "in barrier" in caught.value.outcomes[0].text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.long
def test_a_death_is_told_from_the_errors_it_causes(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"^rank 1 exited with status 7\nrank 0 raised RuntimeError") as caught:
        pool.run(rank_1_leaves, deadline=30)
    assert [outcome.kind for outcome in caught.value.outcomes] == ["error", "died"]


@pytest.mark.long
def test_a_hang_meets_the_deadline_and_shows_where(pool: RankPool) -> None:
    stopped, asleep = pool.outcomes(rank_1_sleeps, deadline=1)
    assert (stopped.kind, type(stopped.error)) == ("error", ValueError)
    assert asleep.kind == "hung"
    assert "in rank_1_sleeps" in asleep.text


@pytest.mark.long
def test_a_rank_that_cannot_say_where_it_is_has_no_place(pool: RankPool) -> None:
    os.kill(pool.run(os.getpid)[1], signal.SIGSTOP)
    assert re.fullmatch(r"was still running after [\d.]+ s", pool.outcomes(total, 1, deadline=1)[1].text)


def test_bad_sizes_are_refused(pool: RankPool) -> None:
    with pytest.raises(HaloclineError, match="at least one rank"):
        RankPool(0)
    with pytest.raises(HaloclineError, match="3 entries for 2 ranks"):
        pool.run(total, per_rank=[(1,), (2,), (3,)])


def test_shared_pools_are_kept_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Fake:
        def __init__(self, size: int) -> None:
            self.size = size

        def close(self) -> None:
            closed.append(self.size)

        def renew(self) -> None:
            pass

    monkeypatch.setattr(pool_module, "_shared", OrderedDict())
    monkeypatch.setattr(pool_module, "RankPool", Fake)
    first = shared_pool(2)
    shared_pool(3)
    assert shared_pool(2) is first
    shared_pool(4)
    assert closed == [3]


def groups_pile_up() -> int:
    for _ in range(8):
        dist.new_group()
    return os.getpid()


def test_ranks_with_many_threads_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(2) as pool:
        before = pool.run(os.getpid)
        pool.renew()
        assert pool.run(groups_pile_up) == before, "few threads: the same processes"
        monkeypatch.setattr(pool_module, "WORN", 10)
        pool.renew()
        assert not set(pool.run(os.getpid)) & set(before)


PARENT = """
import test_pool
from halocline.testing.pool import RankPool
if __name__ == "__main__":
    pool = RankPool(2)
    print(*(pid for pid, *_ in pool.run(test_pool.facts)), flush=True)
    pool.run(test_pool.rank_1_sleeps, deadline=1000)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_ranks_go_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    until = time.monotonic() + 10
    while any(alive(pid) for pid in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(ranks) == 2
    assert not any(alive(pid) for pid in ranks)
    assert list(tmp_path.iterdir()) == [script]
