"""An emulated cluster on paper: which commands of ``ip`` and ``tc`` make its nodes and links. Nothing is run here.

Every node is a network namespace; so is the switch, in which one bridge a rail joins the nodes' cables (veth pairs).
Both ends of a cable send through a token bucket, so that a link has its rate in each direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from halocline.errors import HaloclineError

Placement = Literal["block", "cyclic"]
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
#: Of the token bucket, by the rate up to which it serves. A smaller one splits the kernel's 64 KB packets, which costs
#: more processor time than the link has.
BURSTS = ((10**9, "256kb"), (2 * 10**9, "512kb"), (4 * 10**9, "1mb"), (10 * 10**9, "2560kb"))
QUEUE = "50ms"  # what may wait in a bucket before packets are dropped
MOST_NODES = 250  # in one subnet
NAME = re.compile(r"hc(\d+)(?:n\d+|s)")  # of a namespace; the number is the process that made it


class ClusterError(HaloclineError):
    """A cluster that cannot be made here; the message says what is missing and how to get it."""


class ShellCommand(NamedTuple):
    """Arguments of a program. Where an optional one fails, the cluster is as it would be without."""

    arguments: tuple[str, ...]
    optional: bool = False


def bits_per_second(rate: str) -> int:
    """
    >>> bits_per_second("500mbit")
    500000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if bits < 1:
        raise ClusterError(f"a rate is a number of kbit, mbit or gbit, such as 500mbit; not {rate!r}")
    return bits


def burst(rate: str) -> str:
    """The size of the token bucket for a rate."""
    bits = bits_per_second(rate)
    for most, size in BURSTS:
        if bits <= most:
            return size
    raise ClusterError(f"a link of {rate} is faster than one machine can pretend; give at most 10gbit, or no rate")


@dataclass(frozen=True)
class Topology:
    """Nodes, the ranks on them and the links between them. ``rate`` None leaves links as fast as the processor is."""

    nodes: int
    ranks_per_node: int = 1
    rate: str | None = None
    placement: Placement = "block"
    rails: int = 1
    owner: int = 0  # process that makes it

    def __post_init__(self) -> None:
        _at_least_one("nodes", self.nodes)
        _at_least_one("ranks_per_node", self.ranks_per_node)
        if self.nodes > MOST_NODES:
            raise ClusterError(f"{self.nodes} nodes: an emulated cluster has at most {MOST_NODES}")
        if self.rails not in (1, 2):
            raise ClusterError(f"a node has one or two rails (network cards), not {self.rails}")
        if self.placement not in ("block", "cyclic"):
            raise ClusterError(f"placement is 'block' (0 0 1 1) or 'cyclic' (0 1 0 1), not {self.placement!r}")
        if self.rate is not None:
            burst(self.rate)

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.placement == "block" else rank % self.nodes

    def local_rank(self, rank: int) -> int:
        return rank % self.ranks_per_node if self.placement == "block" else rank // self.nodes

    def namespace(self, node: int) -> str:
        return f"hc{self.owner}n{node}"

    @property
    def switch(self) -> str:
        return f"hc{self.owner}s"

    def address(self, node: int, rail: int = 0) -> str:
        return f"10.77.{rail}.{node + 1}"

    @property
    def interfaces(self) -> tuple[str, ...]:
        """A node's network cards."""
        return tuple(f"eth{rail}" for rail in range(self.rails))

    def cables(self) -> Iterator[tuple[int, int, str, str]]:
        """Node, rail, and the names of the two ends: in the node and in the switch."""
        for node in range(self.nodes):
            for rail in range(self.rails):
                yield node, rail, f"eth{rail}", f"n{node}r{rail}"

    def with_rate(self, rate: str | None) -> Topology:
        return replace(self, rate=rate)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ClusterError(f"{name}={value}: a cluster has at least one")


def setup_commands(topology: Topology) -> list[ShellCommand]:
    """What makes the cluster, in order."""
    switch = topology.switch
    made = [_command("ip", "netns", "add", switch)]
    for rail in range(topology.rails):
        made += [
            _ip(switch, "link", "add", f"br{rail}", "type", "bridge"),
            _ip(switch, "link", "set", f"br{rail}", "up"),
        ]
    for node in range(topology.nodes):
        name = topology.namespace(node)
        made += [_command("ip", "netns", "add", name), _ip(name, "link", "set", "lo", "up")]
    for node, rail, ours, theirs in topology.cables():
        made += _cable(topology, node, rail, ours, theirs)
    return made + rate_commands(topology)


def _cable(topology: Topology, node: int, rail: int, ours: str, theirs: str) -> list[ShellCommand]:
    name, switch, address = topology.namespace(node), topology.switch, topology.address(node, rail)
    subnet = f"10.77.{rail}.0/24"
    # Both ends are born in their namespaces: the machine's own network never sees them.
    pair = ("link", "add", ours, "netns", name, "type", "veth", "peer", "name", theirs, "netns", switch)
    # Cubic fills a link both ways at once; of some kernels' default (bbr) a quarter is lost to retransmission.
    steady = ("route", "change", subnet, "dev", ours, "src", address, "congctl", "cubic")
    return [
        _command("ip", *pair),
        _ip(name, "address", "add", f"{address}/24", "dev", ours),
        _ip(name, "link", "set", ours, "up"),
        _ip(switch, "link", "set", theirs, "master", f"br{rail}", "up"),
        ShellCommand(_ip(name, *steady).arguments, optional=True),
    ]


def rate_commands(topology: Topology) -> list[ShellCommand]:
    """What gives every link its rate, or takes it away; also of a cluster that runs."""
    made = []
    for node, _, ours, theirs in topology.cables():
        for name, end in ((topology.namespace(node), ours), (topology.switch, theirs)):
            made.append(_bucket(name, end, topology.rate))
    return made


def _bucket(namespace: str, interface: str, rate: str | None) -> ShellCommand:
    place = ("dev", interface, "root")
    if rate is None:
        return ShellCommand(("tc", "-n", namespace, "qdisc", "del", *place), optional=True)  # there may be none
    limits = ("rate", rate, "burst", burst(rate), "latency", QUEUE)
    return _command("tc", "-n", namespace, "qdisc", "replace", *place, "tbf", *limits)


def teardown_commands(topology: Topology) -> list[ShellCommand]:
    """Cables and bridges go with their namespaces."""
    names = [*(topology.namespace(node) for node in range(topology.nodes)), topology.switch]
    return [delete_command(name) for name in names]


def delete_command(namespace: str) -> ShellCommand:
    return ShellCommand(("ip", "netns", "delete", namespace), optional=True)


def counter_command(namespace: str) -> ShellCommand:
    return _ip(namespace, "-json", "-statistics", "link", "show")


def _command(*arguments: str) -> ShellCommand:
    return ShellCommand(arguments)


def _ip(namespace: str, *arguments: str) -> ShellCommand:
    return ShellCommand(("ip", "-n", namespace, *arguments))
