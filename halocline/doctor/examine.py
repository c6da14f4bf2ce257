"""The whole examination, in the order in which things can go wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import MeshError
from ..world.launcher import node_info_of
from . import checks, machine, ranks
from .finding import Finding, problems
from .links import Links
from .machine import Interface, LaunchedRun
from .ranks import NOT_TRIED, About, Meeting


@dataclass
class DoctorReport:
    """All findings. Rank 0 speaks for all; another rank only of its problems, if it cannot reach rank 0."""

    versions: dict[str, str | None] = field(default_factory=machine.versions)
    backends: dict[str, bool] = field(default_factory=machine.backends)
    devices: dict[str, Any] = field(default_factory=machine.devices)
    interfaces: list[Interface] = field(default_factory=machine.interfaces)
    findings: list[Finding] = field(default_factory=list)
    links: Links = field(default_factory=Links)
    ranks: list[About] = field(default_factory=list)
    voice: Literal["all", "problems", "none"] = "all"
    stuck: bool = False

    @property
    def problems(self) -> int:
        return len(problems(self.findings))

    @property
    def warnings(self) -> int:
        return sum(one.status == "warning" for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        shown = {name: value for name, value in asdict(self).items() if name not in ("voice", "stuck", "ranks")}
        each = [{"rank": one.rank, "host": one.host, "versions": one.versions} for one in self.ranks]
        counts = {"healthy": not self.problems, "problems": self.problems, "warnings": self.warnings}
        return {**counts, **shown, "ranks": each}


def examine(
    count: int = 2, meet: bool = True, deadline: float = 60.0, say: Callable[[str], None] = lambda text: None
) -> DoctorReport:
    """Look at this machine, then at the ranks: those of the run that this process is part of, or ``count`` new ones."""
    say("looking at this machine")
    run, wrong = _read_run()
    report = DoctorReport()
    report.voice = "problems" if run and run.rank else "all"
    report.findings += [*_check_machine(report, run, count), *wrong]
    if run is None or not meet:
        return report
    # Ranks that are started here find a port of their own: a port that is taken does not hinder them.
    if problems(report.findings, *(("launch",) if run.by else ("software", "network"))):
        report.findings.append(NOT_TRIED)
    elif not run.by:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        _add(report, ranks.start_ranks(count, interfaces, deadline, say))
    else:
        met = ranks.join_ranks(run, _about(report, run), deadline, say)
        if run.rank and not met.alone:  # rank 0 has this rank's findings, and answered with the verdict on all
            report.findings, report.voice = [], "none"
        _add(report, met)
    return report


def _add(report: DoctorReport, met: Meeting) -> None:
    report.findings += met.findings
    report.links, report.ranks, report.stuck = met.links, met.ranks, met.stuck


def _read_run() -> tuple[LaunchedRun | None, list[Finding]]:
    """None where the environment contradicts itself, and nobody can say which rank this is."""
    if wrong := list(checks.contradictions(os.environ)):
        return None, wrong
    try:
        return machine.read_run(os.environ), []
    except MeshError as error:  # it says what to do
        return None, [Finding("launch", "environment", "problem", str(error), "set MASTER_ADDR by hand")]


def _check_machine(report: DoctorReport, run: LaunchedRun | None, count: int) -> Iterator[Finding]:
    env, gpus, launched = os.environ, len(report.devices["gpus"]), bool(run and run.by)
    here, world = (node_info_of(env).local_size, run.size) if run and run.by else (count, count)
    yield from checks.check_software(report.versions, report.backends, gpus)
    yield from checks.check_devices(report.devices, env.get("OMP_NUM_THREADS"), here, world, launched)
    yield from checks.check_network(report.interfaces, env, socket.gethostname())
    if run:
        yield from checks.check_launch(run, env, gpus)


def _about(report: DoctorReport, run: LaunchedRun) -> About:
    return About(
        rank=run.rank,
        host=socket.gethostname(),
        versions={name: report.versions[name] for name in ranks.COMPARED},
        gpus=len(report.devices["gpus"]),
        threads=report.devices["threads"],
        cores=report.devices["machine_cores"],
        loopback=machine.gloo_loopback(report.interfaces, os.environ),
        findings=[one for one in report.findings if one.status != "ok"],
    )
