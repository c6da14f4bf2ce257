"""``halocline doctor``: a healthy machine, and each thing that can be amiss with what it says to do."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from halocline._torch_private import default_store
from halocline.cli.app import app
from halocline.doctor import checks, links, machine, ranks
from halocline.doctor.finding import Finding, problems, ranks_text
from halocline.doctor.machine import Interface
from halocline.doctor.ranks import COMPARED, About, compare
from halocline.testing.pool import Outcome, RankError, shared_pool
from halocline.world.launcher import RankInfo, Rendezvous

COMMAND = "from halocline.cli import main; main()"
LAUNCHERS = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC_|GLOO_|NCCL_")
LO, ETH, DOWN = Interface("lo", "127.0.0.1", True), Interface("eth0", "192.0.2.7", True), Interface("ib0", None, False)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around, ranks that are there already, and a host name that needs no name server."""
    for name in list(filter(LAUNCHERS.match, os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setattr(ranks, "RankPool", lambda size: nullcontext(shared_pool(size)))
    monkeypatch.setattr(machine, "resolve", lambda host: "127.0.0.1")
    monkeypatch.setenv("COLUMNS", "200")


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def amiss(report: dict[str, Any], status: str = "problem") -> dict[str, dict[str, str]]:
    return {one["name"]: one for one in report["findings"] if one["status"] == status}


def begin(code: str = COMMAND) -> subprocess.Popen[str]:
    """The command in a process of its own, in the environment of the test."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, "doctor", "--json", "--deadline", "30"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in errors
    return process.returncode, out


@pytest.fixture
def run_of_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[int, dict[str, Any], int, str]]:
    """The command as both ranks of a run, over loopback: rank 0 in this process, rank 1 in another."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": checks.free_port(), "GLOO_SOCKET_IFNAME": "lo"}

    def run(code: str) -> tuple[int, dict[str, Any], int, str]:
        for name, value in {**meet, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1}.items():
            monkeypatch.setenv(name, str(value))
        other = begin(code)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        return *doctor("--deadline", "30"), *end(other)

    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("a call is stuck"))
    return run


# ---- as a user meets it ----


@pytest.mark.long
def test_a_healthy_machine() -> None:
    status, out = end(begin())  # with ranks of its own
    report = json.loads(out.splitlines()[-1])
    assert (status, report["healthy"], report["problems"]) == (0, True, 0), amiss(report)
    assert set(report) >= {"warnings", "findings", "versions", "devices", "interfaces", "links"}
    assert all({"name", "status", "found", "remedy"} <= set(one) for one in report["findings"])
    assert report["links"]["latency_us"] > 0 and report["links"]["bandwidth_mb_s"] > 0
    assert report["links"]["sum_latency_us"] > 0
    assert report["versions"]["torch"] and report["devices"]["cores"] >= 1
    assert [one["rank"] for one in report["ranks"]] == [0, 1]


@pytest.mark.long
def test_the_ranks_of_a_run_check_each_other(run_of_two: Callable[[str], Any]) -> None:
    """Rank 0 speaks for both."""
    status, report, other_status, other_out = run_of_two(COMMAND)
    assert (status, other_status, other_out) == (0, 0, ""), amiss(report)
    assert report["links"]["ranks"] == 2 and report["links"]["latency_us"] > 0
    assert "rank 0 of 2" in next(one["found"] for one in report["findings"] if one["name"] == "launcher")
    assert not dist.is_initialized()


@pytest.mark.long
def test_ranks_of_a_run_with_different_versions(run_of_two: Callable[[str], Any]) -> None:
    status, report, *other = run_of_two(f"import halocline; halocline.__version__ = '0.0.9'; {COMMAND}")
    problem = amiss(report)["halocline versions"]
    assert (status, *other) == (1, 1, "")
    assert re.search(r"halocline \S+ on rank 0 .*; halocline 0\.0\.9 on rank 1 ", problem["found"])
    assert "same environment" in problem["remedy"]


def test_a_wrong_interface_is_found_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setattr(ranks, "RankPool", None)
    status, report = doctor()
    problem = amiss(report)["gloo interface"]
    assert status == 1 and not report["healthy"]
    assert "'nosuch0'" in problem["found"]
    assert all(name in problem["found"] for _, name in socket.if_nameindex())
    assert "export GLOO_SOCKET_IFNAME=lo" in problem["remedy"]
    assert "not tried" in amiss(report, "warning")["messages"]["found"]


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        status, report = doctor()
    problem = amiss(report)["MASTER_PORT"]
    assert status == 1
    assert f"{port} cannot be had: another program holds it" in problem["found"]
    free = re.search(r"export MASTER_PORT=(\d+)", problem["remedy"])
    assert free and int(free[1]) != port
    assert report["links"]["latency_us"] > 0  # the ranks started here have a port of their own


def test_no_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_free() -> int:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(checks, "free_port", none_free)
    status, report = doctor("--no-ranks")
    assert status == 1
    assert "ss -tlnp" in amiss(report)["free port"]["remedy"]


def test_the_table_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "RANK=2 with WORLD_SIZE=2" in result.stdout
    assert "do: set WORLD_SIZE to the number of ranks" in result.stdout
    assert "1 problem, " in result.stdout


def test_another_rank_speaks_only_of_its_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**settings, "GLOO_SOCKET_IFNAME": "nosuch0"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor", "--no-ranks", "--json"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "halocline doctor: gloo interface: " in result.stderr and "nosuch0" in result.stderr


def test_the_help_teaches() -> None:
    text = CliRunner().invoke(app, ["doctor", "--help"]).stdout
    for word in ("torchrun", "srun", "GLOO_SOCKET_IFNAME", "--no-ranks", "--deadline", "Exit status"):
        assert word in text


def meeting_at(port: int) -> Rendezvous:
    """That rank 0 has to serve."""
    return Rendezvous("127.0.0.1", port, served=False)


# ---- the environment of a launcher ----

RUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1: numbers"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: numbers"),
        ({"WORLD_SIZE": None}, "RANK=0 is set, but not WORLD_SIZE"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 with LOCAL_WORLD_SIZE=1"),
    ],
)
def test_contradictions(changes: dict[str, str | None], words: str) -> None:
    assert not list(checks.contradictions(RUN))
    env = {name: value for name, value in {**RUN, **changes}.items() if value is not None}
    (found,) = checks.contradictions(env)
    assert found.status == "problem" and words in found.found and found.remedy


def test_a_rank_exported_in_a_slurm_script() -> None:
    env = {**RUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    found = checks.check_launch(RankInfo("Slurm", rank=1, size=2), env, gpus=0)
    assert "RANK=0, but Slurm calls this task 1" in next(one.found for one in found if one.status == "warning")


def test_a_port_out_of_range() -> None:
    found = checks.check_launch(None, {"MASTER_PORT": "70000"}, gpus=0)
    assert "70000 is no port" in problems(found)[0].found


# ---- interfaces ----


def interface_problems(**env: str) -> list[str]:
    return [one.found for one in problems(checks.check_network([LO, ETH, DOWN], env, "localhost"))]


def test_interfaces_that_are_down_or_misspelt() -> None:
    assert not interface_problems()
    assert not interface_problems(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth")
    (down,) = interface_problems(GLOO_SOCKET_IFNAME="lo,ib0")
    assert "'ib0', which is down; there are lo (127.0.0.1, up), eth0 (192.0.2.7, up), ib0 (no address, down)" in down
    (spaced,) = interface_problems(GLOO_SOCKET_IFNAME="lo, eth0")  # gloo does not trim
    assert "' eth0', which is not there" in spaced


@pytest.mark.parametrize(
    ("setting", "fit"), [("=eth", False), ("=eth0", True), ("ib", False), ("^lo", True), ("^lo,eth", False)]
)
def test_nccl_reads_its_interfaces_in_its_own_way(setting: str, fit: bool) -> None:
    assert (not interface_problems(NCCL_SOCKET_IFNAME=setting)) is fit


def test_a_system_that_does_not_list_interfaces() -> None:
    found = checks.check_network([], {"GLOO_SOCKET_IFNAME": "en0"}, "localhost")
    assert not problems(found)


def test_a_host_name_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "resolve", lambda host: None)
    found = checks.check_network([LO, ETH], {}, "nowhere")
    assert [one.name for one in found if one.status == "warning"] == ["host name"]


# ---- ranks ----


def report_of_odd_rank() -> list[dict[str, Any]] | None:
    """Rank 1 has another torch; everything after that is the doctor's own."""
    rank, store = dist.get_rank(), dist.PrefixStore("odd rank", default_store())
    versions = {**machine.versions(), **({"torch": "2.12.1"} if rank == 1 else {})}
    me = About(rank, socket.gethostname(), {name: versions[name] for name in COMPARED})
    met = ranks.lead(store, 2, me, 20, print) if rank == 0 else ranks.follow(store, 2, me, 20)
    return [vars(one) for one in problems(met.findings)]


def test_another_torch_on_one_rank_is_named_on_all() -> None:
    first, second = shared_pool(2).run(report_of_odd_rank)
    assert first == second and [one["name"] for one in first] == ["torch versions"]
    assert re.search(r"torch 2\.\S+ on rank 0 \(.*\); torch 2\.12\.1 on rank 1 \(", first[0]["found"])


ABOUT = About(0, "a", {"python": "3.11", "torch": "2.13", "halocline": "0.1"}, loopback=True)


def test_ranks_that_do_not_fit_together() -> None:
    assert not problems(compare([ABOUT, replace(ABOUT, rank=1)]))
    (apart,) = problems(compare([ABOUT, replace(ABOUT, rank=1, host="b")]))
    assert "ranks 0-1 (a, b) gloo would talk over loopback" in apart.found
    (mixed,) = problems(compare([replace(ABOUT, gpus=1), replace(ABOUT, rank=1)]))
    assert "rank 1 (a) without a GPU" in mixed.found
    crowd = compare([replace(ABOUT, rank=rank, threads=4, cores=8) for rank in range(4)])
    assert next(one.remedy for one in crowd if one.name == "threads") == "export OMP_NUM_THREADS=2"


def test_threads_that_nobody_set_are_a_hint() -> None:
    (threads,) = [one for one in checks.check_devices(machine.devices(), None, 2, 2, False) if one.name == "threads"]
    assert threads.status == "hint" and "set it to 1" in threads.found and "export OMP_NUM_THREADS=" in threads.remedy


def test_what_other_ranks_found_is_told_once() -> None:
    low = Finding("devices", "open files", "warning", "at most 256", "ulimit")
    told = compare([ABOUT, *(replace(ABOUT, rank=rank, findings=[low]) for rank in (1, 2, 3))])
    assert [one.found for one in told if one.name == "open files"] == ["on ranks 1-3 (a): at most 256"]


def test_ranks_that_do_not_come_are_named() -> None:
    met = ranks.lead(dist.HashStore(), 4, ABOUT, 0.1, print)
    (absent,) = problems(met.findings)
    assert (ranks_text([4, 0, 1, 2, 7]), ranks_text([3])) == ("ranks 0-2, 4, 7", "rank 3")
    assert "ranks 1-3 did not come" in absent.found and "--deadline" in absent.remedy


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port where somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_meeting_point_that_is_no_store(stranger: int) -> None:
    met = ranks.join_ranks(meeting_at(stranger), 2, replace(ABOUT, rank=1), 0.2, print)
    assert met.alone and f"cannot meet the others at 127.0.0.1:{stranger}" in met.findings[0].found


def test_a_meeting_point_where_nobody_is() -> None:
    met = ranks.join_ranks(meeting_at(checks.free_port()), 2, replace(ABOUT, rank=1), 0.3, print)
    assert met.alone and not met.stuck and "refused" in met.findings[0].found


def error_over(interface: str) -> str:
    """Caught on the rank, so that the pool lives on."""
    before = os.environ["GLOO_SOCKET_IFNAME"]
    try:
        return str(ranks.measure_on_rank(interface, 10))
    except RuntimeError as error:
        return str(error)
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = before


def test_ranks_talk_over_the_interface_that_is_named() -> None:
    assert all("Unable to find address for: nosuch0" in said for said in shared_pool(2).run(error_over, "nosuch0"))
    assert all("latency_us" in said for said in shared_pool(2).run(error_over, "lo,lo"))


def test_ranks_that_cannot_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankError([Outcome(0, "value"), Outcome(1, "hung", text="was still running after 9.0 s, at\n a stack")])

    monkeypatch.setattr(ranks, "RankPool", lambda size: nullcontext(SimpleNamespace(run=fail)))
    (silent,) = problems(ranks.start_ranks(2, ABOUT, "", 20, print).findings)
    assert silent.found == "2 ranks of this machine cannot talk: rank 1 was still running after 9.0 s"
    assert "firewall" in silent.remedy and "--deadline 80" in silent.remedy


# ---- the rest ----


def test_the_oldest_torch_is_that_of_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, checks.TORCH))}"' in text


def test_software_that_will_not_do() -> None:
    found = {**machine.versions(), "torch": "2.9.1+cu128", "h5py": None}
    lacking = {"gloo": True, "nccl": False, "mpi": False, "ucc": False}
    said = {one.name: one for one in checks.check_software(found, lacking, gpus=2)}
    assert said["torch"].status == said["backends"].status == "problem"
    assert "not installed: h5py (HDF5 files)" in said["optional packages"].found


def test_limits_of_the_system() -> None:
    limits = {"open_files": 256, "shared_memory_bytes": 64 << 20, "memory_available_bytes": 1 << 28, "gpu_files": 4}
    poor = {**machine.devices(), **limits, "gpus": [], "cuda": None}
    said = {one.name: one for one in checks.check_devices(poor, "all", 2, 2, False)}
    assert {name for name, one in said.items() if one.status == "warning"} == {
        "threads", "memory", "GPUs", "open files", "shared memory"
    }  # fmt: skip
    assert all(one.remedy for one in said.values() if one.status == "warning")


def test_slow_links_are_warned_of() -> None:
    slow = links.Links(2, "eth0", "gloo", 5000.0, 11.0, 9000.0, [])
    assert [one.status for one in links.examine_links(slow)] == ["ok", "warning", "warning"]
    (damaged,) = links.examine_links(replace(slow, faults=["rank 1 got wrong numbers from rank 0"]))
    assert damaged.status == "problem"


@pytest.mark.parametrize("size", [1, 2, 4, 5, 33, 1000])
def test_pairs_are_few_and_spread(size: int) -> None:
    found = links.pairs(size)
    assert len(found) <= max(6, links.MOST_PEERS) and len(set(found)) == len(found)
    assert all(0 <= first < second < size for first, second in found)
    assert all(rank in links._peers(peer, size) for rank in range(size) for peer in links._peers(rank, size))


def test_damaged_messages_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: [links._words(1, 0, links.torch.device("cpu")) + 1])

    world = SimpleNamespace(rank=0, size=2, begin=damaged)
    assert links._exchange(world, links.torch.device("cpu")) == ["rank 0 got wrong numbers from rank 1"]
