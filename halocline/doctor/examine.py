"""The whole examination, in the order in which things can go wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import MeshError
from ..world.launcher import adopt_environment, node_info_of, rank_info_of, rendezvous_of
from . import checks, machine, ranks
from .finding import Finding, problems
from .links import Links
from .machine import Interface
from .ranks import NOT_TRIED, About


@dataclass
class DoctorReport:
    """All findings and measurements.

    Rank 0 reports for all ranks: ``voice`` says whether this rank prints everything, only its problems (it cannot reach
    rank 0), or nothing. ``stuck``: a call hangs, and only the end of the process ends it.
    """

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
        """The number of findings with which no run will work."""
        return len(problems(self.findings))

    @property
    def warnings(self) -> int:
        """The number of findings with which some runs will fail or be slow."""
        return sum(one.status == "warning" for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: counts, findings, facts of this machine, links, and one entry for each rank."""
        shown = {name: value for name, value in asdict(self).items() if name not in ("voice", "stuck", "ranks")}
        each = [{"rank": one.rank, "host": one.host, "versions": one.versions} for one in self.ranks]
        counts = {"healthy": not self.problems, "problems": self.problems, "warnings": self.warnings}
        return {**counts, **shown, "ranks": each}


def examine(
    count: int = 2, meet: bool = True, deadline: float = 60.0, say: Callable[[str], None] = lambda text: None
) -> DoctorReport:
    """Check this machine, then the ranks: those of the run that this process is part of, or ``count`` new ones.

    Of a run, all ranks call it together. ``deadline`` is the seconds for each stage, and ``say`` is called with the
    name of the stage. Without ``meet`` only this machine is checked.

    If launcher variables contradict each other, ranks are not met: no one could say which rank this is. With problems
    that would make a meeting fail, it is not tried, and a finding says so.
    """
    # Whatever can be checked without other ranks comes first: it explains most failures to meet.
    say("looking at this machine")
    env, host, report, run = os.environ, socket.gethostname(), DoctorReport(), None
    wrong, gpus = list(checks.contradictions(env)), len(report.devices["gpus"])
    if not wrong:
        try:
            run = rank_info_of(env)
            run = run if adopt_environment() else None
        except MeshError as error:  # its text says what to do
            wrong = [Finding("launch", "environment", "problem", str(error), "set MASTER_ADDR by hand")]
    here, world = (node_info_of(env).local_size, run.size) if run else (count, count)
    report.findings += checks.check_software(report.versions, report.backends, gpus)
    report.findings += checks.check_devices(report.devices, env.get("OMP_NUM_THREADS"), here, world, run is not None)
    report.findings += checks.check_network(report.interfaces, env, host)
    report.findings += wrong or checks.check_launch(run, env, gpus)
    if run and run.rank:
        report.voice = "problems"
    if wrong or not meet:  # with contradictory variables it is unknown which rank this is
        return report
    # Ranks that are started here choose a free port, so that a taken one does not matter.
    if problems(report.findings, *(("launch",) if run else ("software", "network"))):
        report.findings.append(NOT_TRIED)
        return report
    me = About(
        rank=run.rank if run else 0,
        host=host,
        versions={name: report.versions[name] for name in ranks.COMPARED},
        gpus=gpus,
        threads=report.devices["threads"],
        cores=report.devices["machine_cores"],
        loopback=machine.gloo_loopback(report.interfaces, env),
        findings=[one for one in report.findings if one.status != "ok"],
    )
    if run:
        met = ranks.join_ranks(rendezvous_of(env), run.size, me, deadline, say)
        if run.rank and not met.alone:  # rank 0 has this rank's findings, and answered with the verdict on all
            report.findings, report.voice = [], "none"
    else:
        met = ranks.start_ranks(count, me, env.get("GLOO_SOCKET_IFNAME", ""), deadline, say)
    report.findings += met.findings
    report.links, report.ranks, report.stuck = met.links, met.ranks, met.stuck
    return report
