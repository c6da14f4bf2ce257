"""Checks a whole zoo, one network after another on the same rank processes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..errors import HaloclineError
from ..zoo import find_zoo
from .check import NetworkReport, check_task
from .pool import RankError, RankPool
from .task import NetworkTask, make_task

DEADLINE = 120.0  # seconds for the cut run of one network; those of the zoos take a few
VERDICTS = ("exact", "gathered", "refused", "wrong")
#: Verdicts that prove nothing: no gradient to compare, or a network that fails by itself. Each says why.
UNPROVEN = ("vacuous", "broken")
SHOWN = (
    *("verdict", "why", "output_error", "gradient_error", "worst_parameter", "noise", "activation_ratio"),
    "gathered_bytes",
    *(
        "gathers",
        "cut_share",
        "layout",
        "moved_bytes",
        "messages",
        "seconds",
        "refusals",
        "without_rule",
        "gradient_zero",
        "dtype",
        "shapes",
    ),
)


@dataclass(frozen=True)
class ZooReport:
    """The reports of all networks of a zoo, by name."""

    zoo: str
    ranks: int
    cut: Mapping[str, int]
    networks: Mapping[str, NetworkReport]

    @property
    def counts(self) -> dict[str, int]:
        """Networks by verdict; what is not proven counts as refused."""
        verdicts = ["refused" if one.verdict in UNPROVEN else one.verdict for one in self.networks.values()]
        return {verdict: verdicts.count(verdict) for verdict in VERDICTS}

    def as_json(self) -> dict[str, Any]:
        """The report of each network, and counts by verdict."""
        shown = {name: report.as_json() for name, report in self.networks.items()}
        networks = {name: {key: one[key] for key in SHOWN} for name, one in shown.items()}
        return {**self.counts, "zoo": self.zoo, "ranks": self.ranks, "cut": dict(self.cut), "networks": networks}


def check_zoo(
    name: str,
    *,
    only: Sequence[str] = (),
    deadline: float | None = None,
    pool: RankPool | None = None,
    say: Callable[[str], None] = lambda text: None,
    done: Callable[[str, str, NetworkReport], None] = lambda number, name, report: None,
    **options: Any,
) -> ZooReport:
    """Every network of a zoo, or ``only`` those named, as `check_network` does one.

    ``options`` are ranks, cut, dtype, steps and seed of :func:`check_network`. ``done`` is told of each network: its
    number such as "3 of 49", its name, and its report.
    """
    zoo = find_zoo(name)
    tasks = {one: make_task(f"{name}/{one}", **options) for one in only or zoo.names}
    zoo.package()
    first = next(iter(tasks.values()))
    reports: dict[str, NetworkReport] = {}
    with nullcontext(pool) if pool else RankPool(first.ranks) as ready:
        for number, (one, task) in enumerate(tasks.items(), 1):
            count = f"{number} of {len(tasks)}"
            started = time.monotonic()

            def tell(text: str, prefix: str = f"{count}, {one}: ") -> None:
                say(prefix + text)

            report = _checked(task, ready, deadline or DEADLINE, tell)
            reports[one] = replace(report, seconds=time.monotonic() - started)
            done(count, one, reports[one])
    return ZooReport(name, first.ranks, first.cut, reports)


def _checked(task: NetworkTask, pool: RankPool, deadline: float, say: Callable[[str], None]) -> NetworkReport:
    """A refusal is an answer. Any other failure of the ranks is a defect of the library, one of one rank is not."""
    nothing = NetworkReport(task.target, "broken", ranks=task.ranks, cut=dict(task.cut), dtype=task.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of others are no news here
            report = check_task(task, deadline, pool, say)
    except RankError as error:
        return replace(nothing, verdict="wrong", why=str(error))
    except HaloclineError as error:
        return replace(nothing, why=str(error))
    if report.gradient_zero and report.verdict in ("exact", "gathered"):
        return replace(report, verdict="vacuous", why="every gradient of one rank is zero: there is nothing to compare")
    return report
