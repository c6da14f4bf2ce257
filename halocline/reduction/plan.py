"""Which groups there are and in which order they go, from facts that all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..world import Label, World
from .buffer import Group, by_kind
from .grouping import Link, finish_time, robust_cut

_GAIN = 0.97  # of the time that the sums take longer than backward: what another plan must come down to


@dataclass(frozen=True)
class Facts:
    """Of each parameter: when its gradient was ready on the last rank (less than 0: on none), whether some rank had
    none, whether it is sparse; whether gradients are to be differentiated themselves; and what a sum costs."""

    ready: list[float]
    lacking: list[bool]
    sparse: list[bool]
    graph: bool
    link: Link

    def agreed(self, world: World, name: str) -> Facts:
        """The largest of all ranks, in one exchange."""
        mine = torch.tensor(
            [*self.ready, *self.lacking, *self.sparse, self.graph, self.link.latency, self.link.per_byte],
            dtype=torch.float64,
            device="cpu",
        )
        label = Label(f"{name}: which came, and when", "backward", "gradients")
        found = world.maximum(mine, tuple(range(world.size)), label).tolist()
        count = len(self.ready)
        return Facts(
            found[:count],
            [bool(value) for value in found[count : 2 * count]],
            [bool(value) for value in found[2 * count : 3 * count]],
            bool(found[3 * count]),
            Link(*found[3 * count + 1 :]),
        )

    @property
    def came(self) -> list[int]:
        """In the order in which they were ready."""
        found = [index for index, ready in enumerate(self.ready) if ready >= 0]
        return sorted(found, key=lambda index: (self.ready[index], index))


@dataclass
class Plan:
    """``groups`` in the order in which they go; ``sparse`` parameters go by themselves, after backward.

    ``dynamic``: ranks took different ways, so that each group goes when all ranks have agreed that it may.
    """

    groups: list[Group]
    sparse: list[int]
    facts: Facts
    dynamic: bool = False
    home: dict[int, int] = field(default_factory=dict)  # of a parameter: its group

    def __post_init__(self) -> None:
        self.home = {index: number for number, group in enumerate(self.groups) for index in group.indices}

    @classmethod
    def of(cls, facts: Facts, parameters: Sequence[Tensor], explicit: Sequence[Sequence[int]] | None) -> Plan:
        dynamic = any(lacking and ready >= 0 for lacking, ready in zip(facts.lacking, facts.ready, strict=True))
        sparse = [index for index, flag in enumerate(facts.sparse) if flag]
        dense = [index for index in facts.came if not facts.sparse[index]]
        if explicit is not None:
            runs = [list(kind) for run in explicit for kind in by_kind(_known(run, dense), parameters)]
            left = set(dense).difference(*map(set, runs)) if runs else set(dense)
            runs += by_kind([index for index in dense if index in left], parameters)
        else:
            runs = [run for kind in by_kind(dense, parameters) for run in _cut(kind, facts, parameters)]
            runs.sort(key=lambda run: max(facts.ready[index] for index in run))
        if dynamic:  # whoever did not come may yet
            absent = [index for index, ready in enumerate(facts.ready) if ready < 0 and not facts.sparse[index]]
            runs += by_kind(absent, parameters)
        groups = [Group(run, [parameters[index] for index in run]) for run in runs if run]
        return cls(groups, sparse, facts, dynamic)

    def worth_changing(self, facts: Facts, parameters: Sequence[Tensor]) -> bool:
        """Would groups made from what was seen lately be done clearly earlier?"""
        dense = [index for group in self.groups for index in group.indices]
        if self.dynamic or not dense or any(facts.ready[index] < 0 for index in dense):
            return False
        order = sorted(dense, key=lambda index: (facts.ready[index], index))
        sizes = [_bytes(parameters[index]) for index in order]
        ready = [facts.ready[index] for index in order]
        best = finish_time(robust_cut(ready, sizes, facts.link), ready, sizes, facts.link)
        done = 0.0
        for group in self.groups:
            done = max(done, *(facts.ready[index] for index in group.indices)) + facts.link.seconds(group.bytes)
        return best - ready[-1] < _GAIN * (done - ready[-1])


def _known(run: Sequence[int], dense: list[int]) -> list[int]:
    known = set(dense)
    return [index for index in run if index in known]


def _cut(kind: list[int], facts: Facts, parameters: Sequence[Tensor]) -> list[list[int]]:
    ready = [facts.ready[index] for index in kind]
    cut = robust_cut(ready, [_bytes(parameters[index]) for index in kind], facts.link)
    return [kind[begin:end] for begin, end in zip(cut, [*cut[1:], len(kind)], strict=True)]


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
