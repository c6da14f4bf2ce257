"""Between the ranks: do messages arrive intact, and how fast? Measured in the library's own world, whose costs
count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..world import Label, Receive, Send, World
from ..world.agreement import errors_on_any_rank
from .finding import Finding, judged, problem_if, ranks_text, warn_if

ROUNDS, WARM = 200, 20  # measured and discarded round trips of small messages
LARGE, LARGE_ROUNDS = 8 << 20, 6  # bytes of a large message; the first is not counted
ALL_PAIRS, MOST_PEERS = 4, 32  # beyond so many ranks only pairs with rank 0, and not all of those
WORDS = 1000  # numbers of a message whose content is checked
RING = 1 << 16  # elements of a sum that goes round the backend's ring
SLOW_US, SLOW_MB_S = 1000.0, 100.0  # a local network has a tenth of this latency and ten times this bandwidth

LABEL = Label("doctor", "halocline doctor")


@dataclass
class Links:
    """What was measured between ranks: half a round trip of a small message, and the rate of large ones.

    Figures are those of the slowest pair and rank; None if there is no pair.
    """

    ranks: int = 0
    interface: str = ""
    backend: str = ""
    latency_us: float | None = None
    bandwidth_mb_s: float | None = None
    sum_latency_us: float | None = None
    pairs: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def examine_links(links: Links) -> Iterator[Finding]:
    """What the measurements mean: slow links are a warning, damaged messages a problem."""
    if links.ranks == 1:
        yield Finding("ranks", "messages", "ok", f"a single rank ({links.backend}) has nobody to talk to")
        return
    well = f"{links.ranks} ranks over {links.interface} ({links.backend}): messages and sums came out right"
    remedy = "messages were damaged, which no transport should do: try another interface, then another machine"
    yield judged("ranks", "messages", well, problem_if(links.faults, "; ".join(links.faults[:4]), remedy))
    if links.faults:
        return
    text = f"{links.latency_us:.0f} us a message{_slowest(links, 'latency_us', max)}"
    text = f"{text}; a sum over all {links.sum_latency_us:.0f} us"
    slow = (links.latency_us or 0) >= SLOW_US
    remedy = "give each rank a core of its own, and name the fastest interface in GLOO_SOCKET_IFNAME"
    yield judged("ranks", "latency", text, warn_if(slow, f"{text}: small tiles will mostly wait", remedy))
    text = f"{links.bandwidth_mb_s:.0f} MB/s{_slowest(links, 'bandwidth_mb_s', min)}"
    slow = (links.bandwidth_mb_s or 0) <= SLOW_MB_S
    remedy = "name the fastest interface in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME); see what else uses it"
    yield judged("ranks", "bandwidth", text, warn_if(slow, f"{text}: less than gigabit Ethernet", remedy))


def _slowest(links: Links, figure: str, choose: Callable[..., dict[str, Any]]) -> str:
    """In words, between which ranks a figure is worst."""
    if len(links.pairs) < 2:
        return ""
    first, second = choose(links.pairs, key=lambda pair: pair[figure])["ranks"]
    return f" between ranks {first} and {second}, the slowest pair"


def measure_links(world: World) -> Links:
    """Exchange messages and sums, check them, and measure. By all ranks together; the result is the same on all.

    Pairs are measured one after another, with a barrier between them, so that they do not disturb each other; of a
    pair, the lower rank takes the time. Latency is the median of 200 round trips, bandwidth that of six messages of 8
    MiB.
    """
    everyone, chosen = tuple(range(world.size)), pairs(world.size)
    backend = dist.get_backend()
    # Messages of nccl are in GPU memory.
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    faults = [*_exchange(world, device), *_sums(world, device)]

    def barrier() -> None:
        _settle(world.sum(torch.ones(1, dtype=torch.float64, device=device), everyone, LABEL))

    figures = torch.zeros(len(chosen), 2, dtype=torch.float64)
    for row, pair in zip(figures, chosen, strict=True):
        if world.rank in pair:
            measured = _pair(world, pair, device)
            row += measured if world.rank == pair[0] else 0
        barrier()
    sums = torch.tensor([_median(barrier, ROUNDS, WARM) * 1e6 if chosen else 0.0], dtype=torch.float64)
    *seen, sum_latency = world.maximum(torch.cat([figures.flatten(), sums]), everyone, LABEL).tolist()
    each = [
        {"ranks": list(pair), "latency_us": latency, "bandwidth_mb_s": rate}
        for pair, latency, rate in zip(chosen, seen[::2], seen[1::2], strict=True)
    ]
    own = {world.rank: "; ".join(faults)} if faults else {}
    told, _ = errors_on_any_rank(world, own, world.size, LABEL)
    return Links(
        world.size,
        backend=backend,
        latency_us=max(seen[::2], default=None),
        bandwidth_mb_s=min(seen[1::2], default=None),
        sum_latency_us=sum_latency or None,
        pairs=each,
        faults=[text for _, text in told.values()],
    )


def pairs(size: int) -> list[tuple[int, int]]:
    """The pairs to measure: all of few ranks, else rank 0 with peers spread over the rest.

    So the number of pairs stays below 33, however many ranks there are.
    """
    if size <= ALL_PAIRS:
        return list(combinations(range(size), 2))
    step = -(-(size - 1) // MOST_PEERS)
    return [(0, peer) for peer in range(1, size, step)]


# ---- what the ranks do ----


def _exchange(world: World, device: torch.device) -> list[str]:
    """Exchange numbers that are different for each pair, and return a text if wrong ones arrive.

    By all ranks together. A message that was delivered to another rank, or damaged, is found.
    """
    everyone, peers = tuple(range(world.size)), _peers(world.rank, world.size)
    sends = [Send(peer, _words(world.rank, peer, device)) for peer in peers]
    receives = [Receive(peer, WORDS) for peer in peers]
    came = world.begin(sends, receives, _words(0, 0, device), everyone, LABEL).wait()
    wrong = [p for p, message in zip(peers, came, strict=True) if not message.equal(_words(p, world.rank, device))]
    return [f"rank {world.rank} got wrong numbers from {ranks_text(wrong)}"] if wrong else []


def _peers(rank: int, size: int) -> list[int]:
    """The ranks that a rank exchanges with: all others, or of very many those at distances 1, 2, 4, ... both ways."""
    if size <= MOST_PEERS:
        return [other for other in range(size) if other != rank]
    steps = [1 << power for power in range((size - 1).bit_length())]
    return sorted({(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank})


def _words(sender: int, receiver: int, device: torch.device) -> Tensor:
    """The message from one rank to another: numbers that no other pair has."""
    return torch.arange(WORDS, device=device) + (sender * 1_000_003 + receiver) * WORDS


def _sums(world: World, device: torch.device) -> list[str]:
    """Sum numbers that float64 holds exactly, in a small and a large tensor; a text for each wrong sum."""
    everyone, faults = tuple(range(world.size)), []
    for count in (3, RING):
        total = world.sum(torch.full((count,), world.rank + 1.0, dtype=torch.float64, device=device), everyone, LABEL)
        if not (total == world.size * (world.size + 1) / 2).all():
            faults.append(f"rank {world.rank} got a wrong sum of {count} numbers")
    return faults


def _pair(world: World, pair: tuple[int, int], device: torch.device) -> Tensor:
    """Microseconds of a small message, and megabytes per second of large ones, between two ranks."""
    small, large = torch.zeros(1, device=device), torch.zeros(LARGE, dtype=torch.uint8, device=device)

    def round_trip(there: Tensor) -> None:
        first, second = pair
        for message, sender, receiver in ((there, first, second), (small, second, first)):
            sends = [Send(receiver, message)] if world.rank == sender else []
            receives = [Receive(sender, message.numel())] if world.rank == receiver else []
            world.begin(sends, receives, message, pair, LABEL).wait()
        _settle(small)

    trip = _median(lambda: round_trip(small), ROUNDS, WARM)
    there = _median(lambda: round_trip(large), LARGE_ROUNDS, 1)
    rate = LARGE / max(there - trip / 2, 1e-9) / 1e6  # the reply is a small message
    return torch.tensor([trip / 2 * 1e6, rate], dtype=torch.float64)


def _settle(tensor: Tensor) -> None:
    """Wait for the GPU, whose work is only queued until then."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _median(call: Callable[[], None], rounds: int, warm: int) -> float:
    """The median time of a call, without the first ``warm`` calls."""
    times = []
    for _ in range(rounds + warm):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times[warm:])
