"""The ranks of this run, or some started for the occasion: do they all come, and can they talk?

Ranks that somebody else started first meet at the store alone, which takes no more than an address and a port. Each
leaves a report there, so that rank 0 can name who is missing and who differs even where messages will not pass.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, whatever the stub says

from ..errors import HaloclineError
from ..testing.pool import RankPool
from ..world import ProcessWorld, forget, init, this_world
from ..world.rendezvous import within
from .compare import About, about_this_rank, compare
from .finding import Finding, problems, ranks_text
from .launch import DoctorLaunch
from .links import Links, examine_links, measure_links, together
from .network import is_loopback, resolve

TOPIC = "ranks"
SLACK = 5.0  # seconds in which the library itself says who kept it waiting, once its own deadline has passed
PARTING = 5.0  # seconds for the others to hear the verdict before rank 0, and with it the store, goes

Say = Callable[[str], None]


@dataclass
class Meeting:
    """What came of it. ``alone``: this rank could not tell rank 0. ``stuck``: only the process's end ends a call."""

    findings: list[Finding]
    ranks: list[About] = field(default_factory=list)
    links: Links = field(default_factory=Links)
    alone: bool = False
    stuck: bool = False


# ---- ranks of our own ----


def start_ranks(size: int, interfaces: str, deadline: float, say: Say) -> Meeting:
    """On this machine, over the interfaces that gloo is told to use, or loopback."""
    try:
        with RankPool(size) as pool:
            say(f"starting {size} ranks")
            ranks = pool.run(about_this_rank, per_rank=[(rank,) for rank in range(size)], deadline=deadline)
            say(f"measuring the links between {size} ranks")
            links = together(pool.run(measure_on_rank, interfaces, deadline / 2, deadline=deadline))
    except (HaloclineError, OSError) as error:
        return Meeting([_silence(f"{size} ranks of this machine", error, deadline)])
    links.interface = interfaces or "loopback"
    return Meeting([*compare(ranks), *examine_links(links)], ranks, links)


def measure_on_rank(interfaces: str, deadline: float) -> Links:
    """The pool met over loopback; a world makes process groups of its own, for which gloo looks at its variable."""
    if interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    return measure_links(ProcessWorld(deadline))


def not_tried() -> Finding:
    text = "not tried: the problems found would spoil it"
    return Finding(TOPIC, "messages", "warning", text, "mend them and run the doctor again")


def _silence(who: str, error: Exception, deadline: float) -> Finding:
    said = next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(", at")  # a stack follows
    remedy = (
        "see whether a firewall stands between them, whether memory or open files ran out, and whether the interface "
        f"in GLOO_SOCKET_IFNAME is the one they share; if they were merely slow, --deadline {deadline * 4:g}"
    )
    return Finding(TOPIC, "messages", "problem", f"{who} cannot talk: {said}", remedy)


# ---- ranks that torchrun or Slurm started ----


def join_ranks(launch: DoctorLaunch, me: About, deadline: float, say: Say) -> Meeting:
    """Every rank calls this; what comes of it is whole on rank 0 alone. The others get the verdict."""
    try:
        _reach(launch, deadline)
        # A store that is another program's may never answer, and torch then waits without end.
        store = within(deadline + 1, lambda: meeting_point(launch, deadline))
        return lead(store, launch.size, me, deadline, say) if me.rank == 0 else follow(store, me, deadline)
    except (RuntimeError, OSError) as error:  # the first are torch's own of stores
        where = f"{launch.address}:{launch.port}"
        said, stuck = next(iter(str(error).splitlines()), ""), isinstance(error, TimeoutError)
        remedy = "see whether rank 0 runs, what holds that port, and whether a firewall lets this machine reach it"
        text = f"rank {me.rank} cannot meet the others at {where} within {deadline:g} s: {said}"
        return Meeting([Finding(TOPIC, "meeting point", "problem", text, remedy)], alone=True, stuck=stuck)


def _reach(launch: DoctorLaunch, deadline: float) -> None:
    """Wait until somebody listens at the meeting point: torch's own way of not getting there fills a screen."""
    until = time.monotonic() + deadline
    while launch.rank and not launch.held:
        try:
            socket.create_connection((launch.address, launch.port), max(until - time.monotonic(), 0.1)).close()
            break
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def meeting_point(launch: DoctorLaunch, deadline: float) -> Any:
    """The store of the run: torchrun's, or one that rank 0 keeps and torch will share when it asks for its own."""
    options: dict[str, Any] = {}
    serve = launch.rank == 0 and not launch.held
    address = resolve(launch.address) or launch.address
    if serve and is_loopback(address):  # one that the store opens itself listens to the whole network
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        options["master_listen_fd"] = socket.create_server((address, launch.port), family=family).detach()
    limit = timedelta(seconds=deadline)
    met = TCPStore(launch.address, launch.port, None, serve, limit, False, multi_tenant=True, **options)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"halocline/doctor/{restart}", met)


def lead(store: Any, size: int, me: About, deadline: float, say: Say) -> Meeting:
    """Rank 0: hear everybody, let them measure if it makes sense, and tell them how it went."""
    say(f"waiting for the reports of {size} ranks")
    said = _collect(store, "about", range(1, size), deadline)
    ranks = [me, *(_read_about(said[rank]) for rank in sorted(said))]
    findings = [*_absent(set(range(1, size)) - set(said), deadline), *compare(ranks)]
    go = not problems([*findings, *me.findings])
    store.set("go", "yes" if go else "no")
    met = Meeting(findings if go else [*findings, not_tried()], ranks)
    if go:
        say(f"measuring the links between {size} ranks")
        _measure_together(store, met, size, deadline)
    _part(store, set(said), met, me)
    return met


def _measure_together(store: Any, met: Meeting, size: int, deadline: float) -> None:
    try:
        mine = within(deadline + SLACK, lambda: _measure(deadline / 2))
        said = _collect(store, "links", range(1, size), deadline + SLACK)
        if mute := set(range(1, size)) - set(said):
            raise HaloclineError(f"no figures came from {ranks_text(mute)}")
        met.links = together([mine, *(Links(**json.loads(text)) for text in said.values())])
        met.links.interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        met.findings += examine_links(met.links)
    except (HaloclineError, RuntimeError, OSError) as error:
        met.findings.append(_silence(f"the {size} ranks", error, deadline))
        met.stuck = isinstance(error, TimeoutError)


def _measure(deadline: float) -> Links:
    """Joins as every run of the library does, and leaves no process group behind."""
    init(deadline)
    found = measure_links(this_world())
    forget()
    dist.destroy_process_group()
    return found


def follow(store: Any, me: About, deadline: float) -> Meeting:
    """The other ranks: report, measure if told to, and hear the verdict."""
    store.set(f"about/{me.rank}", json.dumps(asdict(me)))
    met = Meeting([])
    store.wait(["go"], timedelta(seconds=2 * (deadline + SLACK)))
    if store.get("go") == b"yes":
        met.stuck = not _report_links(store, me.rank, deadline)
    store.wait(["verdict"], timedelta(seconds=3 * (deadline + SLACK)))
    met.findings = [Finding(**one) for one in json.loads(store.get("verdict"))]
    store.set(f"heard/{me.rank}", "yes")
    return met


def _report_links(store: Any, rank: int, deadline: float) -> bool:
    """False if the measurement has not come back."""
    try:
        links = within(deadline + SLACK, lambda: _measure(deadline / 2))
        store.set(f"links/{rank}", json.dumps(links.as_json()))
    except TimeoutError:
        return False
    except (HaloclineError, RuntimeError, OSError):
        pass  # rank 0 hears nothing from this rank, and has an error of its own
    return True


def _collect(store: Any, key: str, ranks: Sequence[int], deadline: float) -> dict[int, str]:
    """What the ranks leave under ``key`` until the deadline."""
    keys, until = {rank: f"{key}/{rank}" for rank in ranks}, time.monotonic() + deadline
    while keys and not store.check(list(keys.values())) and time.monotonic() < until:
        time.sleep(0.02)
    return {rank: store.get(name).decode() for rank, name in keys.items() if store.check([name])}


def _read_about(text: str) -> About:
    said: Mapping[str, Any] = json.loads(text)
    return About(**{**said, "findings": [Finding(**one) for one in said["findings"]]})


def _absent(ranks: set[int], deadline: float) -> list[Finding]:
    if not ranks:
        return []
    remedy = (
        "see whether they started, and what they wrote: all ranks of the run must call the doctor, in a batch script "
        f"by srun or torchrun; if they were merely slow, --deadline {deadline * 4:g}"
    )
    text = f"{ranks_text(ranks)} did not come to the meeting point within {deadline:g} s"
    return [Finding(TOPIC, "ranks that came", "problem", text, remedy)]


def _part(store: Any, others: set[int], met: Meeting, me: About) -> None:
    store.set("verdict", json.dumps([asdict(one) for one in problems([*met.findings, *me.findings])]))
    _collect(store, "heard", sorted(others), PARTING)
