"""Which buckets there are and in which order they go, from facts that all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ...world import Label, World
from ..transport.rings import EXPRESS, URGENT_CHUNK
from .bucket import Bucket, by_kind
from .cutting import BucketTiming, LinkCost, deadline_order, finer_cuts, lateness, robust_cut, urgent_lateness

#: When sums must be done. "one by one": a sum under way cannot be overtaken by a more urgent one.
Goal = Literal["end of backward", "next forward", "next forward, one by one", "step after"]
FORWARD = ("next forward", "next forward, one by one")
_NOTICED = 1e-4  # seconds of lateness below which no other plan is looked for
#: Seconds of link time that one message costs. High where each message is waited for before the next begins.
_HANDLING = {"next forward": 1e-4, "next forward, one by one": 4e-3}
_CLOSE = 0.01  # of a step's time: among cuts later by less than this, the one with the fewest messages wins
_GAIN = 0.97  # a new plan must bring lateness down to this part of today's


@dataclass(frozen=True)
class GradientFacts:
    """What a plan is made from: one entry per parameter in each list; after :meth:`agreed` the same on all ranks."""

    ready: list[float]  #: seconds at which the gradient was ready on the last rank; negative: on no rank
    lacking: list[bool]  #: some rank had no gradient
    sparse: list[bool]  #: the gradient is a sparse tensor
    needs: list[float]  #: seconds at which the next forward needs the parameter; negative: not known
    graph: bool  #: backward(create_graph=True): gradients are differentiated themselves
    link: LinkCost

    def agreed(self, world: World, ranks: tuple[int, ...], name: str) -> GradientFacts:
        """The maximum over ``ranks`` of every number, in one exchange that all of them take part in."""
        lists = torch.tensor([self.ready, self.lacking, self.sparse, self.needs], dtype=torch.float64, device="cpu")
        scalars = lists.new_tensor([self.graph, self.link.latency, self.link.per_byte])
        label = Label(f"{name}: which came, and when", "backward", "gradients")
        largest = world.maximum(torch.cat([lists.flatten(), scalars]), ranks, label)
        ready, lacking, sparse, needs = largest[:-3].view(4, len(self.ready)).tolist()
        graph, latency, per_byte = largest[-3:].tolist()
        flags = [bool(value) for value in lacking], [bool(value) for value in sparse]
        return GradientFacts(ready, *flags, needs, bool(graph), LinkCost(latency, per_byte))

    @cached_property
    def needed(self) -> list[float]:
        """Seconds after the first gradient at which the next forward needs each parameter, if it starts at once.

        Where that was not measured: forward takes half as long as backward and goes the other way round.
        """
        end = max(self.ready, default=0.0)
        return [
            end + (need if need >= 0 else (end - ready) / 2) for need, ready in zip(self.needs, self.ready, strict=True)
        ]

    @property
    def came(self) -> list[int]:
        """The parameters of which some rank had a gradient, in the order in which they were ready."""
        ready = [index for index, moment in enumerate(self.ready) if moment >= 0]
        return sorted(ready, key=lambda index: (self.ready[index], index))


@dataclass
class BucketPlan:
    """``buckets`` in the order in which they go; ``sparse`` parameters go by themselves, after backward.

    ``dynamic``: ranks took different paths, so each bucket goes when all ranks have agreed that it may.
    """

    buckets: list[Bucket]
    sparse: list[int]
    facts: GradientFacts
    dynamic: bool = False
    goal: Goal = "end of backward"
    home: dict[int, int] = field(default_factory=dict)  # parameter -> number of its bucket
    _twin: BucketPlan | None = None

    def __post_init__(self) -> None:
        self.home = {index: number for number, bucket in enumerate(self.buckets) for index in bucket.indices}
        self._urgency = [0.0] * len(self.buckets)
        if self.goal in FORWARD:
            self._urgency = [min(self.facts.needed[index] for index in bucket.indices) for bucket in self.buckets]

    @classmethod
    def of(
        cls,
        facts: GradientFacts,
        parameters: Sequence[Tensor],
        explicit: Sequence[Sequence[int]] | None,
        goal: Goal = "end of backward",
    ) -> BucketPlan:
        """Make a plan, the same on every rank; ``explicit`` buckets replace those that would be computed."""
        dynamic = any(lacking and ready >= 0 for lacking, ready in zip(facts.lacking, facts.ready, strict=True))
        sparse = [index for index, flag in enumerate(facts.sparse) if flag]
        dense = [index for index in facts.came if not facts.sparse[index]]
        if explicit is not None:
            known = [[index for index in run if index in dense] for run in explicit]
            runs = [kind for run in known for kind in by_kind(run, parameters)]
            placed = {index for run in runs for index in run}
            runs += by_kind([index for index in dense if index not in placed], parameters)
        else:
            cutter = _Cutter(facts, parameters, goal)
            runs = cutter.ordered([run for kind in by_kind(dense, parameters) for run in cutter.cut(kind)])
        if dynamic or goal != "end of backward":  # gradients that did not come may come later
            absent = [index for index, ready in enumerate(facts.ready) if ready < 0 and not facts.sparse[index]]
            runs += by_kind(absent, parameters)
        return cls([Bucket(run, parameters) for run in runs if run], sparse, facts, dynamic, goal)

    @property
    def on_cpus(self) -> bool:
        """Do all buckets lie in host memory?"""
        return all(bucket.device.type == "cpu" for bucket in self.buckets)

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Do the parameters still have the shapes, dtypes and devices that the plan was made for?"""
        return all(bucket.fits(parameters) for bucket in self.buckets)

    def urgency(self, number: int) -> float:
        """Of a bucket: the smaller, the sooner it is needed."""
        return self._urgency[number]

    @property
    def complete(self) -> bool:
        """Are all parameters in it, even those that have never had a gradient?"""
        return self.goal != "end of backward"

    def twin(self, parameters: Sequence[Tensor]) -> BucketPlan:
        """The same plan on other memory, for a pass that runs while this one's sums are under way. Twins alternate."""
        if self._twin is None:
            buckets = [Bucket(bucket.indices, parameters) for bucket in self.buckets]
            self._twin = BucketPlan(buckets, self.sparse, self.facts, self.dynamic, self.goal, _twin=self)
        return self._twin

    def let_go(self) -> None:
        """Give the buckets' memory back, between steps."""
        for bucket in (*self.buckets, *(self._twin.buckets if self._twin is not None else ())):
            bucket.let_go()

    def worth_changing(self, facts: GradientFacts, parameters: Sequence[Tensor]) -> bool:
        """Would buckets made from these newer facts be done clearly earlier?"""
        dense = [index for bucket in self.buckets for index in bucket.indices if facts.ready[index] >= 0]
        if self.dynamic or not dense or (not self.complete and len(dense) < len(self.home)):
            return False
        cutter = _Cutter(facts, parameters, self.goal)
        now = cutter.lateness([bucket.indices for bucket in self.buckets])
        if now <= _NOTICED:
            return False
        best = cutter.cut(sorted(dense, key=lambda index: (facts.ready[index], index)))
        return cutter.lateness(cutter.ordered(best)) < _GAIN * now - _NOTICED


@dataclass(frozen=True)
class _Cutter:
    """Divides gradients into runs, one per bucket, and predicts how late they will be."""

    facts: GradientFacts
    parameters: Sequence[Tensor]
    goal: Goal

    def cut(self, kind: list[int]) -> list[list[int]]:
        """Runs of parameters of one kind, which come in ready order."""
        ready, sizes = [self.facts.ready[index] for index in kind], [self.parameters[index].nbytes for index in kind]

        def runs(begins: Sequence[int]) -> list[list[int]]:
            return [kind[begin:end] for begin, end in zip(begins, [*begins[1:], len(kind)], strict=True)]

        if self.goal not in FORWARD:
            return runs(robust_cut(ready, sizes, self.facts.link))
        handled = replace(
            self, facts=replace(self.facts, link=LinkCost(_HANDLING[self.goal], self.facts.link.per_byte))
        )
        cuts = [runs(begins) for begins in finer_cuts(ready, sizes, handled.facts.link)]
        late = [handled.lateness(handled.ordered(cut)) for cut in cuts]
        allowed = max(0.0, min(late)) + _CLOSE * max(self.facts.needed)
        return min((cut for cut, each in zip(cuts, late, strict=True) if each <= allowed), key=len)

    def ordered(self, runs: Sequence[list[int]]) -> list[list[int]]:
        """The runs in the order in which they should go."""
        timings = self._timings(runs)
        if self.goal == "next forward, one by one":
            return [runs[place] for place in deadline_order(timings, self.facts.link)]
        return [runs[place] for place in sorted(range(len(runs)), key=lambda place: timings[place].ready)]

    def lateness(self, runs: Sequence[Sequence[int]]) -> float:
        """Seconds by which the latest run comes after it is needed, if they go in this order."""
        timings = self._timings([run for run in runs if max(self.facts.ready[index] for index in run) >= 0])
        if self.goal == "next forward":
            return urgent_lateness(timings, self.facts.link, EXPRESS, URGENT_CHUNK)
        if self.goal not in FORWARD:  # all are waited for when backward has ended
            end = max((timing.ready for timing in timings), default=0.0)
            timings = [replace(timing, needed=end) for timing in timings]
        return lateness(timings, self.facts.link, shared=self.goal in FORWARD)

    def _timings(self, runs: Sequence[Sequence[int]]) -> list[BucketTiming]:
        ready, needed = self.facts.ready, self.facts.needed
        return [
            BucketTiming(
                max(ready[index] for index in run),
                min(needed[index] for index in run),
                sum(self.parameters[index].nbytes for index in run),
            )
            for run in runs
        ]
