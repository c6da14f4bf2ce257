"""``bench gradients``: how well are gradient averages hidden behind backward? On an emulated cluster.

The same training step runs in turn, round by round: without averages (*compute*), only the sum of as many bytes
(*communication*), under DistributedDataParallel as it comes and as the best of several settings, and under
``hc.distribute``: waiting at the end of backward, going on into the next forward, so in bfloat16, and one step late.
Emulated models compute for as long as their gradients take on the wire: there is just enough to hide them behind. No
step is faster than the larger of the two (*ideal*); ``gradients_case.bound`` says what a synchronous step could reach
that overlaps with backward alone, ``bound_ahead`` what one could that goes on into forward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from statistics import median
from typing import Any

import torch

from halocline.errors import HaloclineError

from . import gradients_ranks as ranks
from .cluster import Cluster, check_possible
from .core_share import CoreShare, enter
from .gradients_case import GradientsCase, Round, bound, bound_ahead, slowest, spread, summary, typical, typical_cpu
from .gradients_models import SUBJECTS, bytes_of, check_models, layers_of, tensors_of
from .gradients_ranks import (
    AHEAD,
    AHEAD_BF16,
    COMPUTE,
    IN_A_ROW,
    LAGGED,
    OURS,
    DdpSetting,
    ModelOnRanks,
    StepRecord,
    WireWay,
    task_of,
)
from .gradients_trace import trace_events
from .machine import Others, describe
from .topology import ClusterError, Placement, Topology

DEADLINE = 120.0  # seconds for one call on the ranks
QUICK_SECONDS = 220.0  # in all, the making of the clusters included
LEAST_ROUNDS = 2  # of a case, whatever the time
OVERHEAD = 20e6  # bytes that could be sent while a case is set up
CAPS = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0)
SETTINGS = tuple(DdpSetting(cap, view, static) for cap, view, static in product(CAPS, (False, True), (False, True)))
#: Without a static graph, with which the first two steps overlap nothing.
QUICK_SETTINGS = tuple(DdpSetting(cap, view=True) for cap in (1.0, 5.0, 25.0))
DEFAULT = DdpSetting()
WIRE = "communication"

Say = Callable[[str], None]
Way = str | DdpSetting


@dataclass(frozen=True)
class GradientsPlan:
    """What is measured, and how thoroughly."""

    nodes: int = 4
    ranks_per_node: tuple[int, ...] = (1, 2)
    rate: str = "1gbit"
    models: tuple[str, ...] = tuple(SUBJECTS)
    rounds: int = 7
    placement: Placement = "block"
    quick: bool = False
    cores: float | None = None  # of each rank; None: whatever it gets

    def check(self) -> None:
        check_models(self.models)
        if self.nodes < 2:
            raise ClusterError(f"{self.nodes} nodes average nothing over links; give two or more")
        if self.cores is not None and not 0.1 <= self.cores <= 1:
            raise HaloclineError(f"{self.cores:g} of a core a rank; give a share from 0.1 to 1, such as 0.33")
        if not self.ranks_per_node:
            raise HaloclineError("no number of ranks on a node; give some, such as 1,2")
        for count in self.ranks_per_node:
            Topology(self.nodes, count, self.rate, self.placement)

    @property
    def settings(self) -> tuple[DdpSetting, ...]:
        return QUICK_SETTINGS if self.quick else SETTINGS

    @property
    def kept(self) -> int:
        """Settings of DDP that take part in the rounds; a single step of each says which."""
        return 1 if self.quick else 3

    @property
    def trial(self) -> int:
        """Steps of a setting of DDP, of which the last says how good it is; a static graph overlaps from the third."""
        return 2 if self.quick else 3

    @property
    def warm_up(self) -> int:
        """Steps that the library has to see how gradients come."""
        return 3 if self.quick else 9

    @property
    def wire_ways(self) -> tuple[WireWay, ...]:
        """In pieces it is hardly ever faster."""
        return ("flat",) if self.quick else ("flat", "pieces")

    @property
    def tries(self) -> int:
        """Sums of all bytes by which the compute of emulated models is chosen."""
        return 1 if self.quick else 3


class TimeShares:
    """Divides the time that is left among the cases to come; without a limit there is always more."""

    def __init__(self, limit: float | None, weights: Sequence[float]) -> None:
        self.end = None if limit is None else time.monotonic() + limit
        self.weights = list(weights)
        self.pace = 0.0  # seconds that a case took, by its weight; the slowest
        self.began, self.weight = 0.0, 1.0
        self.until: float | None = None

    def begin(self) -> bool:
        """Is there time for the next case?"""
        if self.end is None:
            return True
        self.began, share = time.monotonic(), self.weights[0] / sum(self.weights)
        left = self.end - self.began
        self.until = self.began + left * share
        self.weight = self.weights.pop(0)
        return left > self.weight * self.pace

    def finish(self) -> None:
        self.pace = max(self.pace, (time.monotonic() - self.began) / self.weight)

    @property
    def over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until


def measure_gradients(
    plan: GradientsPlan, say: Say = lambda text: None, trace: list[Any] | None = None
) -> dict[str, Any]:
    """Every model on every cluster. ``trace`` gets the events of a step of each."""
    plan.check()
    check_possible()
    weights = [bytes_of(name) + OVERHEAD for _ in plan.ranks_per_node for name in plan.models]
    clock = TimeShares(QUICK_SECONDS if plan.quick else None, weights)
    cases, left_out = [], []
    for count in plan.ranks_per_node:
        found, late = measure_cluster(plan, count, clock, say, trace)
        cases += found
        left_out += late
    others = max((case.others_share for case in cases if case.others_share is not None), default=None)
    asked = {name: getattr(plan, name) for name in ("rate", "placement", "rounds", "quick", "cores")}
    return {**summary(cases), **asked, "left_out": left_out, "machine": describe(others)}


def measure_cluster(
    plan: GradientsPlan, ranks_per_node: int, clock: TimeShares, say: Say, trace: list[Any] | None
) -> tuple[list[GradientsCase], list[str]]:
    """Its cases, and those that there was no time for."""
    shown = f"{plan.nodes} x {ranks_per_node} ranks"
    say(f"{shown}: starting")
    cases, late = [], []
    with ExitStack() as stack:
        share = CoreShare(plan.cores, plan.nodes * ranks_per_node) if plan.cores is not None else None
        if share is not None:  # its groups can be removed when the ranks have ended, so it is entered first
            stack.enter_context(share)
        cluster = stack.enter_context(
            Cluster(
                nodes=plan.nodes,
                ranks_per_node=ranks_per_node,
                rate=plan.rate,
                placement=plan.placement,
                collective_timeout=DEADLINE,
            )
        )
        cluster.run(ranks.drop, deadline=DEADLINE)  # when this is done, the ranks are there
        if share is not None:
            cluster.run(enter, per_rank=share.members, deadline=DEADLINE)
        for name in plan.models:
            if clock.begin():
                cases.append(GradientsMeasurement(cluster, plan, name, clock, say).run(trace))
                clock.finish()
            else:
                late.append(f"{name} on {shown}")
    return cases, late


# ---- one case ----


class GradientsMeasurement:
    """One model on a cluster that runs."""

    def __init__(self, cluster: Cluster, plan: GradientsPlan, name: str, clock: TimeShares, say: Say) -> None:
        self.cluster, self.plan, self.name, self.clock = cluster, plan, name, clock
        self.layout = f"{plan.nodes} x {cluster.topology.ranks_per_node} ranks"
        self.say: Say = lambda text: say(f"{name} on {self.layout}: {text}")
        self.sizes = [4 * prod(shape) for layer in layers_of(name) for shape in layer.shapes]
        self.steps: dict[str, list[Round]] = {}
        self.sums: list[float] = []
        self.half_sums: list[float] = []

    def run(self, trace: list[Any] | None) -> GradientsCase:
        way, alone = self.choose_wire()
        ways, tried = self.build(task_of(self.name, alone))
        told = self.call(ranks.tell)
        others = Others(self.cluster.run)
        self.measure(ways, way)
        share = others.share()
        self.call(ranks.drop)
        if trace is not None:
            trace += trace_events(f"{self.name} on {self.layout}:", told, first=len(trace))
        return self.case(way, tried, told, share)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.cluster.run(function, *arguments, deadline=DEADLINE)

    def choose_wire(self) -> tuple[WireWay, float]:
        """The fastest way to sum all bytes, and its seconds."""
        self.say("the wire alone")
        medians = {way: median(self.sum_all(way, self.plan.tries)) for way in self.plan.wire_ways}
        best = min(medians, key=medians.__getitem__)
        return best, medians[best]

    def sum_all(self, way: WireWay, repeat: int = 1, half: bool = False) -> list[float]:
        size, dtype = (sum(self.sizes) // 2, torch.bfloat16) if half else (sum(self.sizes), torch.float32)
        by_rank = self.call(ranks.wire, size, way, repeat, dtype)
        return [max(seconds) for seconds in zip(*by_rank, strict=True)]

    def build(self, task: ModelOnRanks) -> tuple[list[Way], dict[DdpSetting, float]]:
        """Every way, warm; of the settings of DDP the best, by a step of each."""
        self.call(ranks.build, task, COMPUTE, 1)
        tried: dict[DdpSetting, float] = {}
        for setting in self.plan.settings:
            self.say(f"trying {setting}")
            tried[setting] = max(one.seconds for one in self.call(ranks.build, task, setting, self.plan.trial))
            self.call(ranks.drop, sorted(tried, key=tried.__getitem__)[self.plan.kept :])
        self.say("DDP as it comes, and halocline")
        self.call(ranks.build, task, DEFAULT, 2)
        for way in (OURS, *IN_A_ROW):
            self.call(ranks.build, task, way, self.plan.warm_up)
        return [COMPUTE, DEFAULT, *sorted(tried, key=tried.__getitem__)[: self.plan.kept], OURS, *IN_A_ROW], tried

    def measure(self, ways: Sequence[Way], wire: WireWay) -> None:
        """Turn by turn, so that noise hits all ways alike; another begins each time."""
        turns: list[Way] = [WIRE, *ways]
        for number in range(self.plan.rounds):
            if number >= LEAST_ROUNDS and self.clock.over:
                break
            self.say(f"round {number + 1} of {self.plan.rounds}")
            at = number % len(turns)
            for way in turns[at:] + turns[:at]:
                if way == WIRE:
                    self.sums += self.sum_all(wire)
                    self.half_sums += self.sum_all(wire, half=True)
                else:
                    self.steps.setdefault(str(way), []).append(self.call(ranks.step, way))

    def case(
        self, wire: WireWay, tried: Mapping[DdpSetting, float], told: Sequence[StepRecord], share: float | None
    ) -> GradientsCase:
        seconds = {way: typical(rounds) for way, rounds in self.steps.items()}
        measured = [setting for setting in (DEFAULT, *tried) if str(setting) in seconds]
        tuned = min(measured, key=lambda setting: seconds[str(setting)])
        communication = median(self.sums)
        bytes_per_second = sum(self.sizes) / communication
        return GradientsCase(
            model=self.name,
            nodes=self.plan.nodes,
            ranks_per_node=self.cluster.topology.ranks_per_node,
            megabytes=sum(self.sizes) / 1e6,
            tensors=tensors_of(self.name),
            emulated=SUBJECTS[self.name].emulated,
            like_resnet=SUBJECTS[self.name].like_resnet,
            compute_s=seconds[COMPUTE],
            communication_s=communication,
            communication=wire,
            ddp_s=seconds[str(DEFAULT)],
            ddp_tuned_s=seconds[str(tuned)],
            ddp_tuned=asdict(tuned),
            ours_s=seconds[OURS],
            bound_s=bound(self.steps[COMPUTE], self.sizes, bytes_per_second),
            ahead_s=seconds[AHEAD],
            ahead_bound_s=bound_ahead(self.steps[COMPUTE], self.sizes, bytes_per_second),
            ahead_bf16_s=seconds[AHEAD_BF16],
            bf16_communication_s=median(self.half_sums),
            lag_s=seconds[LAGGED],
            spread={WIRE: spread(self.sums), **{way: spread(slowest(taken)) for way, taken in self.steps.items()}},
            tried={str(setting): taken for setting, taken in tried.items()},
            rounds=len(self.sums),
            messages=told[0].messages,
            control_messages=told[0].control_messages,
            oversubscribed=self.cluster.size > (os.cpu_count() or 1),
            others_share=share,
            cpu_s={way: typical_cpu(rounds) for way, rounds in self.steps.items()},
        )
