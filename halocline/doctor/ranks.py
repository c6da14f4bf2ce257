"""The ranks of this run, or some that are started for the check: do they all come, and can they communicate?

Ranks that a launcher started first meet at the store alone, which needs only an address and a port. Each leaves a
report there, so that rank 0 can name ranks that are missing or differ even if no messages arrive between them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, whatever the stub says

from ..errors import HaloclineError
from ..testing.pool import RankPool
from ..world import ProcessWorld, forget, init, this_world
from ..world.launcher import Rendezvous
from ..world.rendezvous import listen_at, within
from .finding import Finding, problems, ranks_text
from .links import Links, examine_links, measure_links

COMPARED = ("python", "torch", "halocline")
SLACK = 5.0  # seconds beyond the library's own deadline, in which its error names the rank that was waited for
PARTING = 5.0  # seconds for the others to read the verdict before rank 0, and with it the store, ends
_NOT_TRIED = "not tried, since there are problems"
NOT_TRIED = Finding("ranks", "messages", "warning", _NOT_TRIED, "solve them and run the doctor again")

Say = Callable[[str], None]


@dataclass
class About:
    """The report of one rank about itself, sent to rank 0 as JSON."""

    rank: int
    host: str
    versions: dict[str, str | None]
    gpus: int = 0
    threads: int = 1
    cores: int = 0  # of the machine; 0 if threads are not to be compared with it
    loopback: bool = False  # gloo would use loopback
    findings: list[Finding] = field(default_factory=list)


@dataclass
class Meeting:
    """The outcome of a meeting. ``alone``: this rank could not reach rank 0. ``stuck``: a call hangs until the process
    ends."""

    findings: list[Finding]
    ranks: list[About] = field(default_factory=list)
    links: Links = field(default_factory=Links)
    alone: bool = False
    stuck: bool = False


# ---- do they fit together? ----


def compare(ranks: Sequence[About]) -> Iterator[Finding]:
    """Findings about all ranks together, and those of other ranks about themselves, each text only once.

    Ranks must have the same versions, and all or none of them GPUs; their threads must fit the cores of their machine;
    and gloo must not use loopback between machines.
    """
    differ, remedy = False, "start every rank from the same environment: virtual environment, container or module"
    for name in COMPARED:
        holders = _grouped(ranks, [str(one.versions.get(name)) for one in ranks])
        if len(holders) > 1:
            text = "; ".join(f"{name} {version} on {_who(some)}" for version, some in holders.items())
            yield Finding("ranks", f"{name} versions", "problem", text, remedy)
            differ = True
    if not differ and len(ranks) > 1:
        text = ", ".join(f"{name} {ranks[0].versions.get(name)}" for name in COMPARED)
        yield Finding("ranks", "same versions", "ok", f"{text} on all {len(ranks)} ranks")
    hosts = _grouped(ranks, [one.host for one in ranks])
    without = [one for one in ranks if not one.gpus]
    if without and len(without) < len(ranks):
        text = f"{_who(without)} without a GPU, the others with: they would choose different backends and never meet"
        remedy = "start ranks on like machines, or hide the GPUs everywhere with CUDA_VISIBLE_DEVICES="
        yield Finding("ranks", "GPUs", "problem", text, remedy)
    for some in hosts.values():
        threads, cores = sum(one.threads for one in some), some[0].cores
        if 0 < cores < threads:
            remedy = f"export OMP_NUM_THREADS={cores // len(some)}" if cores >= len(some) else "start fewer ranks there"
            text = f"{threads} threads of {_who(some)} on {cores} cores: they will wait for each other"
            yield Finding("ranks", "threads", "warning", text, remedy)
    unheard = [one for one in ranks if one.loopback and not one.gpus]  # with GPUs nccl finds an interface by itself
    if unheard and len(hosts) > 1:
        text = f"on {_who(unheard)} gloo would talk over loopback, where ranks on other machines cannot hear it"
        remedy = "export GLOO_SOCKET_IFNAME with the interface that the machines share, the same line for all ranks"
        yield Finding("ranks", "gloo interface", "problem", text, remedy)
    for each in dict.fromkeys(one for rank in ranks if rank.rank for one in rank.findings if one.status != "ok"):
        some = [rank for rank in ranks if rank.rank and each in rank.findings]
        yield replace(each, found=f"on {_who(some)}: {each.found}")


def _grouped(ranks: Iterable[About], keys: Iterable[str]) -> dict[str, list[About]]:
    groups: dict[str, list[About]] = {}
    for one, key in zip(ranks, keys, strict=True):
        groups.setdefault(key, []).append(one)
    return groups


def _who(some: Sequence[About]) -> str:
    """Ranks and their hosts in words."""
    hosts = sorted({one.host for one in some})
    return f"{ranks_text(one.rank for one in some)} ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"


# ---- ranks of our own ----


def start_ranks(size: int, me: About, interfaces: str, deadline: float, say: Say) -> Meeting:
    """Start ranks on this machine, over the interfaces that gloo is told to use or loopback, and measure their
    links."""
    try:
        say(f"starting {size} ranks")
        with RankPool(size) as pool:
            say(f"measuring the links between {size} ranks")
            links: Links = pool.run(measure_on_rank, interfaces, deadline / 2, deadline=deadline)[0]
    except (HaloclineError, OSError) as error:
        return Meeting([_silence(f"{size} ranks of this machine", error, deadline)])
    links.interface = interfaces or "loopback"
    ranks = [About(rank, me.host, me.versions) for rank in range(size)]
    return Meeting([*compare(ranks), *examine_links(links)], ranks, links)


def measure_on_rank(interfaces: str, deadline: float) -> Links:
    """On a started rank: measure in a new world, for whose groups gloo reads ``interfaces`` from its variable."""
    if interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    world = ProcessWorld(deadline)
    try:
        return measure_links(world)
    finally:
        world.close()


def _silence(who: str, error: Exception, deadline: float) -> Finding:
    """The finding for ranks that cannot communicate."""
    # The first line: a stack follows where it ends in ", at".
    said = next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(", at")
    remedy = (
        "see whether a firewall stands between them, whether memory or open files ran out, and whether the interface "
        f"in GLOO_SOCKET_IFNAME is the one they share; if they were merely slow, --deadline {deadline * 4:g}"
    )
    return Finding("ranks", "messages", "problem", f"{who} cannot talk: {said}", remedy)


# ---- ranks that torchrun or Slurm started ----


def join_ranks(where: Rendezvous, size: int, me: About, deadline: float, say: Say) -> Meeting:
    """Meet the ranks that a launcher started. Called by every rank; rank 0 gets all findings, the others the verdict.

    If the store cannot be reached within the deadline, this rank reports that by itself (``alone``). A call that hangs
    is left behind in its thread (``stuck``).
    """
    try:
        _reach(where, me.rank, deadline)
        # Another program at that port may never answer, and torch would wait for ever.
        store = within(deadline + 1, lambda: _store(where, me.rank, deadline))
        return lead(store, size, me, deadline, say) if me.rank == 0 else follow(store, size, me, deadline)
    except (RuntimeError, OSError) as error:  # torch's stores raise RuntimeError
        said = next(iter(str(error).splitlines()), "")
        remedy = "see whether rank 0 runs, what holds that port, and whether a firewall lets this machine reach it"
        place = f"{where.address}:{where.port}"
        text = f"rank {me.rank} cannot meet the others at {place} within {deadline:g} s: {said}"
        finding = Finding("ranks", "meeting point", "problem", text, remedy)
        return Meeting([finding], alone=True, stuck=isinstance(error, TimeoutError))


def _reach(where: Rendezvous, rank: int, deadline: float) -> None:
    """Wait until a store listens at the meeting point; torch's own error for that would fill a screen."""
    until = time.monotonic() + deadline
    while rank and not where.served:
        try:
            socket.create_connection((where.address, where.port), max(until - time.monotonic(), 0.1)).close()
            break
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def _store(where: Rendezvous, rank: int, deadline: float) -> Any:
    """The store of the run: torchrun's, or one that rank 0 serves, and that torch.distributed shares later."""
    serve = rank == 0 and not where.served
    options = listen_at(where.address, where.port) if serve else {}
    limit = timedelta(seconds=deadline)
    store = TCPStore(where.address, where.port, None, serve, limit, False, multi_tenant=True, **options)
    return PrefixStore(f"halocline/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def lead(store: Any, size: int, me: About, deadline: float, say: Say) -> Meeting:
    """Rank 0: collect all reports, let the ranks measure if there are no problems, and publish the verdict.

    Waits ``deadline`` seconds for the reports, and a few more at the end, so that all ranks can read the verdict before
    the store ends with this process.
    """
    say(f"waiting for the reports of {size} ranks")
    said = _collect(store, "about", range(1, size), deadline)
    reports = [json.loads(said[rank]) for rank in sorted(said)]
    ranks = [me, *(About(**{**one, "findings": [Finding(**each) for each in one["findings"]]}) for one in reports)]
    met = Meeting([], ranks)
    if absent := set(range(1, size)) - set(said):
        remedy = (
            "see whether they started, and what they wrote: all ranks of the run must call the doctor, in a batch "
            f"script by srun or torchrun; if they were merely slow, --deadline {deadline * 4:g}"
        )
        text = f"{ranks_text(absent)} did not come to the meeting point within {deadline:g} s"
        met.findings.append(Finding("ranks", "ranks that came", "problem", text, remedy))
    met.findings += compare(ranks)
    go = not problems([*met.findings, *me.findings])
    store.set("go", "yes" if go else "no")
    if go:
        say(f"measuring the links between {size} ranks")
        _measure(met, size, deadline)
    else:
        met.findings.append(NOT_TRIED)
    store.set("verdict", json.dumps([asdict(one) for one in problems([*met.findings, *me.findings])]))
    _collect(store, "heard", sorted(said), PARTING)
    return met


def follow(store: Any, size: int, me: About, deadline: float) -> Meeting:
    """The other ranks: report, measure if rank 0 says so, and read the verdict."""
    store.set(f"about/{me.rank}", json.dumps(asdict(me)))
    met = Meeting([])
    store.wait(["go"], timedelta(seconds=2 * (deadline + SLACK)))
    if store.get("go") == b"yes":
        _measure(met, size, deadline)
    store.wait(["verdict"], timedelta(seconds=3 * (deadline + SLACK)))
    met.findings = [Finding(**one) for one in json.loads(store.get("verdict"))]
    store.set(f"heard/{me.rank}", "yes")
    return met


def _measure(met: Meeting, size: int, deadline: float) -> None:
    """Join as every run does, measure the links, and destroy the process group again. By all ranks together.

    Results and findings are added to ``met``.
    """

    def work() -> Links:
        init(deadline / 2)
        links = measure_links(this_world())
        forget()
        dist.destroy_process_group()
        return links

    try:
        met.links = within(deadline + SLACK, work)
        met.links.interface = os.environ.get("GLOO_SOCKET_IFNAME", "the interface above")
        met.findings += examine_links(met.links)
    except (HaloclineError, RuntimeError, OSError) as error:
        met.findings.append(_silence(f"the {size} ranks", error, deadline))
        met.stuck = isinstance(error, TimeoutError)


def _collect(store: Any, key: str, ranks: Sequence[int], deadline: float) -> dict[int, str]:
    """The values that ranks have left under ``key`` by the deadline."""
    keys, until = {rank: f"{key}/{rank}" for rank in ranks}, time.monotonic() + deadline
    while keys and not store.check(list(keys.values())) and time.monotonic() < until:
        time.sleep(0.02)
    return {rank: store.get(name).decode() for rank, name in keys.items() if store.check([name])}
