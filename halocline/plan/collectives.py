"""What a sum over ranks or a halo exchange costs on a machine, in seconds.

Sums on GPUs follow the model with which NCCL chooses its own algorithm: for ring and tree, with each of three
protocols, latency plus bytes over bandwidth; the cheapest is taken. Sums over sockets are rings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log2

from .machine import Machine, NetworkLevel, NodeLoad

PROTOCOLS = ("LL", "LL128", "Simple")
# Microseconds by protocol, from NCCL's tuning table: once a call, then for each step over a kind of link.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_STEP = {
    ("ring", "nvlink"): (0.6, 1.9, 3.4),
    ("ring", "pci"): (1.0, 2.5, 5.7),
    ("ring", "network"): (2.7, 4.0, 14.0),
    ("tree", "nvlink"): (0.6, 1.25, 4.0),
    ("tree", "pci"): (1.0, 1.9, 4.0),
    ("tree", "network"): (5.0, 8.5, 14.0),
}
_NETWORK_OVERHEAD = (1.0, 1.0, 3.0)  # at least so many a step inside nodes, once a ring crosses them
# Share of the link's bandwidth that a protocol reaches, and the most it reaches at all, in GB/s.
_RING_SHARE = (0.5, 0.92, 1.0)
_TREE_SHARE = (1 / 3.8, 0.92, 0.92)
_MOST = (39.0, float("inf"), float("inf"))


@dataclass(frozen=True)
class SumGroup:
    """Ranks that sum together, as a sum sees them: how many, on how many nodes, over which links."""

    ranks: int
    nodes: int
    inner: NetworkLevel
    outer: NetworkLevel | None

    @property
    def per_node(self) -> float:
        return self.ranks / self.nodes


def group_of(machine: Machine, ranks: Sequence[int]) -> SumGroup:
    """Ranks are devices, numbered node by node."""
    each = machine.devices_per_node
    nodes = len({rank // each for rank in ranks})
    ordered = sorted(ranks)
    pairs = list(zip(ordered, [*ordered[1:], ordered[0]], strict=True))
    links = [machine.link_between(*pair) for pair in pairs if pair[0] != pair[1]]
    inside = [link for pair, link in zip(pairs, links, strict=False) if pair[0] // each == pair[1] // each]
    slowest = min(inside or links or [machine.links[0]], key=lambda link: link.gb_per_s.value)
    return SumGroup(len(ordered), nodes, slowest, machine.links[-1] if nodes > 1 else None)


def sum_seconds(machine: Machine, size: int, ranks: Sequence[int], load: NodeLoad | None = None) -> float:
    """An all-reduce of ``size`` bytes over ``ranks``, of nodes that are at work as ``load`` says."""
    if len(ranks) < 2 or size == 0:
        return 0.0
    group = group_of(machine, ranks)
    if machine.collectives != "nccl":
        return _socket_ring(group, size, load)
    return min(_nccl(group, size, algorithm, number)[1] for algorithm in ("ring", "tree") for number in range(3))


def chosen_algorithm(machine: Machine, size: int, ranks: Sequence[int]) -> str:
    """Such as "tree LL128": what NCCL would take, for explanations."""
    group = group_of(machine, ranks)
    if machine.collectives != "nccl":
        return "ring"
    return min(_nccl(group, size, algorithm, number)[::-1] for algorithm in ("ring", "tree") for number in range(3))[1]


def _nccl(group: SumGroup, size: int, algorithm: str, protocol: int) -> tuple[str, float]:
    """Name and seconds of one of NCCL's choices, as its tuner models it. A tree's bandwidth is half of the bus."""
    ports = [group.inner.gb_per_s.value] + ([group.outer.gb_per_s.value] if group.outer else [])
    share = (_RING_SHARE if algorithm == "ring" else _TREE_SHARE)[protocol]
    bus = min(min(ports) * share, _MOST[protocol])
    if algorithm == "ring":
        bandwidth = bus * group.ranks / (2 * (group.ranks - 1))
    else:
        bandwidth = bus / 2
    latency = latency_us(group, algorithm, protocol)
    return f"{algorithm} {PROTOCOLS[protocol]}", latency * 1e-6 + size / (bandwidth * 1e9)


def latency_us(group: SumGroup, algorithm: str, protocol: int) -> float:
    """Microseconds: steps inside nodes and between them."""
    inside = _STEP[algorithm, "nvlink" if group.inner.kind == "nvlink" else "pci"][protocol]
    between = _STEP[algorithm, "network"][protocol] if group.outer else 0.0
    if algorithm == "ring":
        if group.outer:
            inside = max(inside, _NETWORK_OVERHEAD[protocol])  # the ring waits for its slowest step
        steps, crossing = 2 * (group.ranks - 1), 2 * (group.nodes - 1)
        return _BASE[algorithm][protocol] + (steps - crossing) * inside + crossing * between
    levels = floor(log2(group.nodes)) if group.nodes > 1 else 0
    return _BASE[algorithm][protocol] + 2 * ((group.per_node - 1) * inside + levels * between)


def _socket_ring(group: SumGroup, size: int, load: NodeLoad | None) -> float:
    """2 (n - 1) steps of size / n bytes, each at the speed of the slowest link.

    A ring leaves a node once, whichever ranks share its port; inside a node all ranks send at once.
    Where the whole sum's latency was measured, on ranks that compute, it counts in place of the steps'.
    """
    link = group.outer or group.inner
    shared = 1 if group.outer else min(link.shared_by, group.ranks)
    steps = 2 * (group.ranks - 1)
    latency = steps * link.latency_us.value if load is None else load.sum_latency_us.value
    return latency * 1e-6 + shared * steps * size / group.ranks / (link.gb_per_s.value * 1e9)


def exchange_seconds(
    machine: Machine, rank: int, sends: Iterable[tuple[int, int]], load: NodeLoad | None = None
) -> float:
    """Messages ``(peer, bytes)`` of one rank, all under way at once; ranks that compute answer as ``load`` says.

    Every rank of a node sends at the same time, so a shared port serves ``shared_by`` flows. Messages over different
    levels run beside each other; the slowest level decides.
    """
    bytes_over: Counter[str] = Counter()
    links: dict[str, NetworkLevel] = {}
    for peer, size in sends:
        link = machine.link_between(rank, peer)
        links[link.name] = link
        bytes_over[link.name] += size
    times = [
        _latency_us(link, load) * 1e-6 + bytes_over[name] * link.shared_by / (link.gb_per_s.value * 1e9)
        for name, link in links.items()
    ]
    return max(times, default=0.0)


def _latency_us(link: NetworkLevel, load: NodeLoad | None) -> float:
    """Of a message to a rank that computes: the load's was measured inside a node, so a farther link may add more."""
    return link.latency_us.value if load is None else max(load.latency_us.value, link.latency_us.value)
