"""The whole examination, in the order in which things can go wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ..errors import MeshError
from . import hardware, launch, network, ranks, software
from .compare import COMPARED, About
from .finding import Finding, problems
from .links import Links

Voice = Literal["all", "problems", "none"]


@dataclass
class DoctorReport:
    """All that was found. Rank 0 speaks for all; another rank only of its problems, if it cannot reach rank 0."""

    findings: list[Finding]
    versions: software.Versions
    backends: dict[str, bool]
    devices: hardware.Devices
    interfaces: list[network.Interface]
    links: Links = field(default_factory=Links)
    ranks: list[About] = field(default_factory=list)
    voice: Voice = "all"
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
    run, findings = _read_run()
    report = _examine_machine(run, count, findings)
    report.voice = "all" if run is None or run.rank == 0 else "problems"
    if run is None or not meet:
        return report
    if run.by:
        return _with_this_run(report, run, deadline, say)
    return _with_new_ranks(report, count, deadline, say)


def _read_run() -> tuple[launch.DoctorLaunch | None, list[Finding]]:
    """None where the environment contradicts itself, and nobody can say which rank this is."""
    if wrong := launch.contradictions(os.environ):
        return None, wrong
    try:
        return launch.read_launch(), []
    except MeshError as error:  # it says what to do
        return None, [Finding(launch.TOPIC, "environment", "problem", str(error), "set MASTER_ADDR by hand")]


def _examine_machine(run: launch.DoctorLaunch | None, count: int, findings: list[Finding]) -> DoctorReport:
    env, host = os.environ, socket.gethostname()
    versions, backends = software.versions(), software.backends()
    devices, interfaces = hardware.devices(), network.interfaces()
    gpus = len(devices.gpus)
    here, everywhere = (run.local_size, run.size) if run and run.by else (count, count)
    findings = [
        *software.examine_software(versions, backends, gpus),
        *hardware.examine_devices(devices, env, here, everywhere, bool(run and run.by)),
        *network.examine_network(interfaces, env, host),
        *(launch.examine_launch(run, env, gpus) if run else findings),
    ]
    return DoctorReport(findings, versions, backends, devices, interfaces)


def _with_new_ranks(report: DoctorReport, count: int, deadline: float, say: Callable[[str], None]) -> DoctorReport:
    """A port that is taken is no hindrance here: these ranks find one of their own."""
    if problems(report.findings, software.TOPIC, network.TOPIC):
        return replace(report, findings=[*report.findings, ranks.not_tried()])
    met = ranks.start_ranks(count, os.environ.get("GLOO_SOCKET_IFNAME", ""), deadline, say)
    return replace(report, findings=[*report.findings, *met.findings], links=met.links, ranks=met.ranks)


def _with_this_run(
    report: DoctorReport, run: launch.DoctorLaunch, deadline: float, say: Callable[[str], None]
) -> DoctorReport:
    """A rank that can reach rank 0 leaves its own findings there; what it hears back is the verdict on them all."""
    if problems(report.findings, launch.TOPIC):
        return replace(report, findings=[*report.findings, ranks.not_tried()])
    met = ranks.join_ranks(run, _about(report, run), deadline, say)
    report = replace(report, links=met.links, ranks=met.ranks, stuck=met.stuck)
    if run.rank and not met.alone:
        return replace(report, findings=met.findings, voice="none")
    return replace(report, findings=[*report.findings, *met.findings])


def _about(report: DoctorReport, run: launch.DoctorLaunch) -> About:
    host, amiss = socket.gethostname(), [one for one in report.findings if one.status != "ok"]
    loopback = network.gloo_loopback(report.interfaces, os.environ, host)
    found = report.devices
    return About(
        rank=run.rank,
        host=host,
        versions={name: report.versions[name] for name in COMPARED},
        gpus=len(found.gpus),
        threads=found.threads,
        cores=found.machine_cores,
        loopback=loopback,
        findings=amiss,
    )
