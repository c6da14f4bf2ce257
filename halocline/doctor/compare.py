"""What the ranks say of themselves, side by side: do they fit together?"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import software
from .finding import Finding, ranks_text

TOPIC = "ranks"
COMPARED = ("python", "torch", "halocline")


@dataclass
class About:
    """What one rank says of itself."""

    rank: int
    host: str
    versions: dict[str, str | None]
    gpus: int = 0
    threads: int = 1
    cores: int = 0  # of the machine; 0 where it does not matter
    loopback: bool = False  # gloo would stay on the machine
    findings: list[Finding] = field(default_factory=list)


def about_this_rank(rank: int) -> About:
    versions = software.versions()
    return About(rank, socket.gethostname(), {name: versions[name] for name in COMPARED})


def compare(ranks: Sequence[About]) -> list[Finding]:
    """Do the ranks fit together?"""
    return [*_versions(ranks), *_gpus(ranks), *_crowded(ranks), *_unreachable(ranks), *_amiss_elsewhere(ranks)]


def _versions(ranks: Sequence[About]) -> list[Finding]:
    if len(ranks) == 1:
        return []
    differ = [name for name in COMPARED if len({one.versions.get(name) for one in ranks}) > 1]
    if not differ:
        text = ", ".join(f"{name} {ranks[0].versions.get(name)}" for name in COMPARED)
        return [Finding(TOPIC, "same versions", "ok", f"{text} on all {len(ranks)} ranks")]
    remedy = "start every rank from the same environment: the same virtual environment, container or module"
    return [Finding(TOPIC, f"{name} versions", "problem", _who_has(name, ranks), remedy) for name in differ]


def _who_has(name: str, ranks: Sequence[About]) -> str:
    holders = _by(ranks, lambda one: str(one.versions.get(name)))
    return "; ".join(f"{name} {version} on {_who(some)}" for version, some in holders.items())


def _by(ranks: Sequence[About], key: Callable[[About], str]) -> dict[str, list[About]]:
    found: dict[str, list[About]] = {}
    for one in ranks:
        found.setdefault(key(one), []).append(one)
    return found


def _who(some: Sequence[About]) -> str:
    hosts = sorted({one.host for one in some})
    return f"{ranks_text(one.rank for one in some)} ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"


def _gpus(ranks: Sequence[About]) -> list[Finding]:
    without = [one for one in ranks if not one.gpus]
    if not without or len(without) == len(ranks):
        return []
    remedy = "start ranks on like machines, or hide the GPUs everywhere with CUDA_VISIBLE_DEVICES="
    text = f"{_who(without)} without a GPU, the others with: they would choose different backends and never meet"
    return [Finding(TOPIC, "GPUs", "problem", text, remedy)]


def _crowded(ranks: Sequence[About]) -> list[Finding]:
    """Machines whose ranks have more threads than there are cores."""
    found: list[Finding] = []
    for some in _by(ranks, lambda one: one.host).values():
        threads, cores = sum(one.threads for one in some), some[0].cores
        if 0 < cores < threads:
            fewer = f"export OMP_NUM_THREADS={cores // len(some)}" if cores >= len(some) else "start fewer ranks there"
            text = f"{threads} threads of {_who(some)} on {cores} cores: they will wait for each other"
            found.append(Finding(TOPIC, "threads", "warning", text, fewer))
    return found


def _unreachable(ranks: Sequence[About]) -> list[Finding]:
    lonely = [one for one in ranks if one.loopback and not one.gpus]  # nccl looks for an interface by itself
    if not lonely or len({one.host for one in ranks}) == 1:
        return []
    remedy = "export GLOO_SOCKET_IFNAME with the interface that the machines share, the same line for all ranks"
    text = f"on {_who(lonely)} gloo would talk over loopback, where ranks on other machines cannot hear it"
    return [Finding(TOPIC, "gloo interface", "problem", text, remedy)]


def _amiss_elsewhere(ranks: Sequence[About]) -> list[Finding]:
    """What other ranks found amiss with themselves, the same words only once."""
    alike: dict[Finding, list[About]] = {}
    for one in ranks:
        for finding in one.findings if one.rank else ():
            if finding.status != "ok":
                alike.setdefault(finding, []).append(one)
    return [
        Finding(one.topic, one.name, one.status, f"on {_who(some)}: {one.found}", one.remedy)
        for one, some in alike.items()
    ]
