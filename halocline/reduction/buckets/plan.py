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

#: By when sums are to be done; "one by one": none breaks into another.
Goal = Literal["end of backward", "next forward", "next forward, one by one", "step after"]
FORWARD = ("next forward", "next forward, one by one")
_NOTICED = 1e-4  # seconds
#: Seconds of the wire that a message costs where each is waited for by itself; where several are under way, hardly any.
_HANDLING = {"next forward": 1e-4, "next forward, one by one": 4e-3}
_CLOSE = 0.01  # of a step's time: cuts that are later by less count as equally good, and the fewest messages are taken
_GAIN = 0.97  # of the time that the sums take longer than backward: what another plan must come down to


@dataclass(frozen=True)
class GradientFacts:
    """Of each parameter: when its gradient was ready on the last rank (less than 0: on none), whether some rank had
    none, whether it is sparse, when the next forward needs it (less than 0: not known); whether gradients are to be
    differentiated themselves; and what a sum costs."""

    ready: list[float]
    lacking: list[bool]
    sparse: list[bool]
    needs: list[float]
    graph: bool
    link: LinkCost

    def agreed(self, world: World, ranks: tuple[int, ...], name: str) -> GradientFacts:
        """The largest of all ranks, in one exchange."""
        mine = torch.tensor(
            [*self.ready, *self.lacking, *self.sparse, *self.needs, self.graph, self.link.latency, self.link.per_byte],
            dtype=torch.float64,
            device="cpu",
        )
        label = Label(f"{name}: which came, and when", "backward", "gradients")
        found = world.maximum(mine, ranks, label).tolist()
        count = len(self.ready)
        return GradientFacts(
            found[:count],
            [bool(value) for value in found[count : 2 * count]],
            [bool(value) for value in found[2 * count : 3 * count]],
            found[3 * count : 4 * count],
            bool(found[4 * count]),
            LinkCost(*found[4 * count + 1 :]),
        )

    @cached_property
    def needed(self) -> list[float]:
        """Seconds after the first gradient at which the next forward needs each parameter, if it starts at once.

        Where it is not known: forward takes half as long as backward, the other way round.
        """
        end = max(self.ready, default=0.0)
        return [
            end + (need if need >= 0 else (end - ready) / 2) for need, ready in zip(self.needs, self.ready, strict=True)
        ]

    @property
    def came(self) -> list[int]:
        """In the order in which they were ready."""
        found = [index for index, ready in enumerate(self.ready) if ready >= 0]
        return sorted(found, key=lambda index: (self.ready[index], index))


@dataclass
class BucketPlan:
    """``buckets`` in the order in which they go; ``sparse`` parameters go by themselves, after backward.

    ``dynamic``: ranks took different ways, so that each bucket goes when all ranks have agreed that it may.
    """

    buckets: list[Bucket]
    sparse: list[int]
    facts: GradientFacts
    dynamic: bool = False
    goal: Goal = "end of backward"
    home: dict[int, int] = field(default_factory=dict)  # of a parameter: its bucket
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
        dynamic = any(lacking and ready >= 0 for lacking, ready in zip(facts.lacking, facts.ready, strict=True))
        sparse = [index for index, flag in enumerate(facts.sparse) if flag]
        dense = [index for index in facts.came if not facts.sparse[index]]
        if explicit is not None:
            runs = [list(kind) for run in explicit for kind in by_kind(_known(run, dense), parameters)]
            left = set(dense).difference(*map(set, runs)) if runs else set(dense)
            runs += by_kind([index for index in dense if index in left], parameters)
        else:
            runs = [run for kind in by_kind(dense, parameters) for run in _cut(kind, facts, parameters, goal)]
            runs = [runs[place] for place in _order(runs, facts, parameters, goal)]
        if dynamic or goal != "end of backward":  # gradients that did not come may come later
            absent = [index for index, ready in enumerate(facts.ready) if ready < 0 and not facts.sparse[index]]
            runs += by_kind(absent, parameters)
        buckets = [Bucket(run, [parameters[index] for index in run]) for run in runs if run]
        return cls(buckets, sparse, facts, dynamic, goal)

    @property
    def on_cpus(self) -> bool:
        return all(bucket.device.type == "cpu" for bucket in self.buckets)

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Are these parameters still what it was made for?"""
        return all(bucket.fits(parameters) for bucket in self.buckets)

    def urgency(self, number: int) -> float:
        """The smaller, the sooner it is needed."""
        return self._urgency[number]

    @property
    def complete(self) -> bool:
        """Are all parameters in it, those too that have never had a gradient?"""
        return self.goal != "end of backward"

    def twin(self, parameters: Sequence[Tensor]) -> BucketPlan:
        """The same in other memory, for one pass while another is under way; its twin is this one."""
        if self._twin is None:
            buckets = [
                Bucket(bucket.indices, [parameters[index] for index in bucket.indices]) for bucket in self.buckets
            ]
            self._twin = BucketPlan(buckets, self.sparse, self.facts, self.dynamic, self.goal, _twin=self)
        return self._twin

    def worth_changing(self, facts: GradientFacts, parameters: Sequence[Tensor]) -> bool:
        """Would buckets made from what was seen lately be done clearly earlier?"""
        dense = [index for bucket in self.buckets for index in bucket.indices if facts.ready[index] >= 0]
        if self.dynamic or not dense or (not self.complete and len(dense) < len(self.home)):
            return False
        order = sorted(dense, key=lambda index: (facts.ready[index], index))
        now = _late_by([bucket.indices for bucket in self.buckets], facts, parameters, self.goal)
        if now <= _NOTICED:
            return False
        runs = _cut(order, facts, parameters, self.goal)
        best = [runs[place] for place in _order(runs, facts, parameters, self.goal)]
        return _late_by(best, facts, parameters, self.goal) < _GAIN * now - _NOTICED


def _known(run: Sequence[int], dense: list[int]) -> list[int]:
    known = set(dense)
    return [index for index in run if index in known]


def _cut(kind: list[int], facts: GradientFacts, parameters: Sequence[Tensor], goal: Goal) -> list[list[int]]:
    ready, sizes = [facts.ready[index] for index in kind], [_bytes(parameters[index]) for index in kind]

    def runs(cut: Sequence[int]) -> list[list[int]]:
        return [kind[begin:end] for begin, end in zip(cut, [*cut[1:], len(kind)], strict=True)]

    if goal not in FORWARD:
        return runs(robust_cut(ready, sizes, facts.link))

    def late(cut: list[list[int]]) -> float:
        return _late_by([cut[place] for place in _order(cut, facts, parameters, goal)], facts, parameters, goal)

    facts = replace(facts, link=LinkCost(_HANDLING[goal], facts.link.per_byte))
    cuts = [runs(cut) for cut in finer_cuts(ready, sizes, facts.link)]
    lateness = [late(cut) for cut in cuts]
    allowed = max(0.0, min(lateness)) + _CLOSE * max(facts.needed)
    return min((cut for cut, each in zip(cuts, lateness, strict=True) if each <= allowed), key=len)


def _order(runs: Sequence[Sequence[int]], facts: GradientFacts, parameters: Sequence[Tensor], goal: Goal) -> list[int]:
    messages = _messages(runs, facts, parameters)
    if goal == "next forward, one by one":
        return deadline_order(messages, facts.link)
    return sorted(range(len(runs)), key=lambda place: messages[place].ready)


def _late_by(runs: Sequence[Sequence[int]], facts: GradientFacts, parameters: Sequence[Tensor], goal: Goal) -> float:
    """Seconds by which the latest of these comes after it is needed, if they go in this order."""
    messages = _messages([run for run in runs if max(facts.ready[index] for index in run) >= 0], facts, parameters)
    if goal == "next forward":
        return urgent_lateness(messages, facts.link, EXPRESS, URGENT_CHUNK)
    if goal not in FORWARD:  # all are waited for when backward has ended
        messages = [replace(message, needed=max(m.ready for m in messages)) for message in messages]
    return lateness(messages, facts.link, shared=goal in FORWARD)


def _messages(runs: Sequence[Sequence[int]], facts: GradientFacts, parameters: Sequence[Tensor]) -> list[BucketTiming]:
    return [
        BucketTiming(
            max(facts.ready[index] for index in run),
            min(facts.needed[index] for index in run),
            sum(_bytes(parameters[index]) for index in run),
        )
        for run in runs
    ]


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
