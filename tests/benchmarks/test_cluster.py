"""The emulated cluster on paper: what would be run, and what is said where it cannot be. No namespace is made here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster as cluster_module
from benchmarks.cluster import Cluster, Nodes, check_possible, missing, remove_leftovers
from benchmarks.topology import (
    ClusterError,
    ShellCommand,
    Topology,
    bits_per_second,
    burst,
    rate_commands,
    setup_commands,
    teardown_commands,
)
from halocline.errors import HaloclineError


@pytest.mark.parametrize(
    ("rate", "bits", "bucket"),
    [
        ("64kbit", 64_000, "256kb"),
        ("200mbit", 200_000_000, "256kb"),
        ("1gbit", 10**9, "256kb"),
        ("1.5gbit", 1_500_000_000, "512kb"),
        ("2gbit", 2 * 10**9, "512kb"),
        ("4gbit", 4 * 10**9, "1mb"),
    ],
)
def test_each_rate_has_its_bucket(rate: str, bits: int, bucket: str) -> None:
    assert (bits_per_second(rate), burst(rate)) == (bits, bucket)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 251}, "at most 250"),
        ({"ranks_per_node": 0}, "ranks_per_node=0"),
        ({"rate": "fast"}, "such as 500mbit; not 'fast'"),
        ({"rate": "0mbit"}, "such as 500mbit"),
        ({"rate": "40gbit"}, "faster than one machine can pretend"),
        ({"placement": "random"}, "'block' .* or 'cyclic'"),
        ({"rails": 3}, "one or two rails"),
        ({"delay": "1ms"}, "netem"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster(**{"nodes": 2, **arguments})


def test_ranks_are_placed_in_blocks_or_dealt_out() -> None:
    block, cyclic = Topology(2, 3), Topology(2, 3, placement="cyclic")
    assert [block.node_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [block.local_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [cyclic.node_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [cyclic.local_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_rank_learns_where_it_is() -> None:
    place = Nodes(Topology(2, 2, placement="cyclic", rails=2))
    found = place.environment(3, 4, 1234)
    assert (found["RANK"], found["LOCAL_RANK"]) == ("3", "1")
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("4", "2", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.77.0.1", "1234")
    assert found["GLOO_SOCKET_IFNAME"] == "eth0,eth1"


ONE_NODE = """
ip netns add hc7s
ip -n hc7s link add br0 type bridge
ip -n hc7s link set br0 up
ip netns add hc7n0
ip -n hc7n0 link set lo up
ip link add eth0 netns hc7n0 type veth peer name n0r0 netns hc7s
ip -n hc7n0 address add 10.77.0.1/24 dev eth0
ip -n hc7n0 link set eth0 up
ip -n hc7s link set n0r0 master br0 up
ip -n hc7n0 route change 10.77.0.0/24 dev eth0 src 10.77.0.1 congctl cubic
tc -n hc7n0 qdisc replace dev eth0 root tbf rate 2gbit burst 512kb latency 50ms
tc -n hc7s qdisc replace dev n0r0 root tbf rate 2gbit burst 512kb latency 50ms
"""


def text(commands: list[ShellCommand]) -> list[str]:
    return [" ".join(command.arguments) for command in commands]


def test_the_commands_of_one_node() -> None:
    commands = setup_commands(Topology(1, rate="2gbit", owner=7))
    assert text(commands) == ONE_NODE.strip().splitlines()
    assert [" ".join(c.arguments) for c in commands if c.optional] == [ONE_NODE.strip().splitlines()[9]]


def test_only_namespaces_are_touched_and_all_are_removed() -> None:
    topology = Topology(3, 2, "100mbit", rails=2, owner=7)
    made = [line.split()[3] for line in text(setup_commands(topology)) if line.startswith("ip netns add")]
    assert sorted(made) == ["hc7n0", "hc7n1", "hc7n2", "hc7s"]
    for line in text(setup_commands(topology)):
        assert line.startswith("ip netns add ") or line.split()[2] in made or line.count(" netns ") == 2
    assert {line.removeprefix("ip netns delete ") for line in text(teardown_commands(topology))} == set(made)
    assert all(command.optional for command in teardown_commands(topology))  # one that is gone keeps no other
    names = [name for _, _, *ends in topology.cables() for name in ends]
    assert max(len(name) for name in (*names, *made)) <= 15  # the kernel's limit


def test_each_node_has_an_address_on_each_rail() -> None:
    lines = text(setup_commands(Topology(2, rails=2)))
    addresses = [line.split()[5] for line in lines if " address add " in line]
    assert addresses == ["10.77.0.1/24", "10.77.1.1/24", "10.77.0.2/24", "10.77.1.2/24"]
    assert sum("type bridge" in line for line in lines) == 2


def test_a_rate_can_be_changed_and_taken_away() -> None:
    topology = Topology(2, rate="1gbit", owner=7)
    slower = text(rate_commands(topology.with_rate("500mbit")))
    assert len(slower) == 4  # both ends of two cables
    assert all("qdisc replace" in line and "rate 500mbit burst 256kb" in line for line in slower)
    free = rate_commands(topology.with_rate(None))
    assert text(free)[0] == "tc -n hc7n0 qdisc del dev eth0 root"
    assert all(command.optional for command in free)


# ---- where it cannot be made ----


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had all it takes."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cluster_module.shutil, "which", lambda name, path: f"/sbin/{name}")


@pytest.mark.usefixtures("able")
def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cluster_module.shutil, "which", lambda name, path: None if name == "tc" else "/sbin/ip")
    with pytest.raises(ClusterError, match=r"root.*sudo.* and the program tc: run `apt-get install -y iproute2`"):
        check_possible()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ClusterError, match="run it on Linux"), Cluster():
        pass


@pytest.mark.usefixtures("able")
def test_a_failed_command_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, 1, "", "Something.\nOperation not permitted\n")

    monkeypatch.setattr(cluster_module.subprocess, "run", fail)
    with pytest.raises(ClusterError, match=r"`ip netns add x` failed: Operation not permitted; .*--privileged"):
        cluster_module.execute(ShellCommand(("ip", "netns", "add", "x")))
    assert cluster_module.execute(ShellCommand(("ip", "netns", "add", "x"), optional=True)) == ""


@pytest.mark.usefixtures("able")
def test_nothing_is_installed_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("apt-get was called")

    monkeypatch.setattr(cluster_module.subprocess, "run", never)
    cluster_module.install()  # all is there
    monkeypatch.setattr(cluster_module.shutil, "which", lambda name, path: None)
    with pytest.raises(ClusterError, match="no apt-get"):
        cluster_module.install()


def test_ranks_are_there_inside_the_with_only() -> None:
    with pytest.raises(HaloclineError, match="inside `with Cluster"):
        Cluster(2).run(os.getpid)


# ---- leaving nothing behind ----


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Commands that would have been run."""
    done: list[str] = []

    def execute(command: ShellCommand) -> str:
        done.append(" ".join(command.arguments))
        if "bridge" in command.arguments:
            raise ClusterError("no bridges today")
        return ""

    monkeypatch.setattr(cluster_module, "execute", execute)
    monkeypatch.setattr(cluster_module, "NAMESPACES", tmp_path)
    return done


@pytest.mark.usefixtures("able")
def test_a_failed_start_is_taken_back(executed: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ClusterError, match="no bridges"), Cluster(nodes=2):
        pass
    me = os.getpid()
    assert executed[:2] == [f"ip netns add hc{me}s", f"ip -n hc{me}s link add br0 type bridge"]
    assert executed[2:] == [f"ip netns delete hc{me}{name}" for name in ("n0", "n1", "s")]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_to_end_becomes_an_exception() -> None:
    with pytest.raises(SystemExit) as caught:
        cluster_module._leave(signal.SIGTERM, None)
    assert caught.value.code == 143


def interrupted(done: list[str]) -> None:
    with cluster_module._undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append("removed")


def test_a_second_signal_waits_until_all_is_removed() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["removed"]


def test_leftovers_of_dead_processes_go(executed: list[str], tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"hc{gone.pid}n0", f"hc{gone.pid}s", f"hc{os.getpid()}n0", "hcfoo", f"hc{gone.pid}other", "mine"):
        (tmp_path / name).touch()
    remove_leftovers()
    assert sorted(executed) == [f"ip netns delete hc{gone.pid}{name}" for name in ("n0", "s")]
