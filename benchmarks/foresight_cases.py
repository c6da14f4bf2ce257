"""The runs that ``bench foresight`` predicts and then measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from halocline.arrangement import DATA
from halocline.plan.api import mean_square
from halocline.plan.recording import LETTERS, Subject
from halocline.workloads import WORKLOADS

__all__ = ["LETTERS", "Case", "cluster_cases", "local_cases", "make_network", "subject_of", "workload_cases"]


@dataclass(frozen=True)
class Case:
    """One network at one size, cut in one way. ``rate`` is that of the emulated cluster's links; None: loopback."""

    workload: str
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]  # of one sample, with a batch of one
    sizes: Mapping[str, int]  # of the mesh
    batch: int = 1  # samples of a step
    rate: str | None = None
    points: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def group(self) -> tuple[object, ...]:
        """Cases that differ in their cut alone, and can be ranked."""
        return self.workload, repr(self.arguments), self.shape, self.ranks, self.batch, self.rate

    @property
    def name(self) -> str:
        cut = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one rank"
        links = f" at {self.rate}" if self.rate else ""
        return f"{self.workload} {'x'.join(map(str, self.shape[2:]))} batch {self.batch} {cut}{links}"


def make_network(case: Case) -> nn.Module:
    """The case's network, from the built-in workloads."""
    return WORKLOADS[case.workload].factory(**case.arguments)


def subject_of(case: Case) -> Subject:
    """The case as a planner takes it: the step that the ranks run."""
    return Subject(lambda: make_network(case), mean_square, (case.shape,), torch.float32, torch.optim.Adam)


def _cases(
    workload: str, shape: tuple[int, ...], cuts: Sequence[Mapping[str, int]], batch: int, rate: str | None, **more: Any
) -> list[Case]:
    axes = ("data", "depth", "height", "width") if len(shape) == 5 else ("data", "height", "width")
    arguments = {**WORKLOADS[workload].fit((shape,)), **more}
    return [Case(workload, arguments, shape, {axis: cut.get(axis, 1) for axis in axes}, batch, rate) for cut in cuts]


def local_cases() -> list[Case]:
    """Networks x sizes x cuts x ranks on this machine, from one rank to twice the cores of a small one."""
    pairs_3d = ({"data": 2}, {"depth": 2}, {"width": 2})
    fours_3d = ({"depth": 4}, {"depth": 2, "height": 2}, {"data": 2, "depth": 2})
    return [
        *_cases("unet3d", (1, 1, 40, 40, 40), [{}], 1, None, width=8),
        *_cases("unet3d", (1, 1, 40, 40, 40), pairs_3d, 2, None, width=8),
        *_cases("unet3d", (1, 1, 40, 40, 40), fours_3d, 2, None, width=8),
        *_cases("unet3d", (1, 1, 24, 24, 24), [{}, {"depth": 2}, {"height": 2}], 1, None, width=20),
        *_cases("cosmoflow", (1, 4, 64, 64, 64), [{}, {"depth": 2}, {"width": 2}], 1, None),
        *_cases("tiramisu", (1, 16, 112, 144), [{}], 1, None),
        *_cases("tiramisu", (1, 16, 112, 144), [{"data": 2}, {"height": 2}], 2, None),
        *_cases("deeplab", (1, 16, 160, 192), [{}, {"height": 2}], 1, None),
    ]


def cluster_cases(rates: Sequence[str]) -> list[Case]:
    """Two nodes of the emulated cluster, joined by slow links."""
    found = []
    for rate in rates:
        found += _cases("unet3d", (1, 1, 40, 40, 40), ({"data": 2}, {"depth": 2}), 2, rate, width=8)
        found += _cases("cosmoflow", (1, 4, 64, 64, 64), ({"data": 2}, {"depth": 2}), 2, rate)
    return found


def workload_cases() -> list[Case]:
    """Every workload at its small size on two ranks: plain data parallel, and each cut by hand."""
    found = []
    for name, workload in WORKLOADS.items():
        if workload.tables:  # what travels depends on values, which no plan knows
            continue
        small = workload.small
        shape = (1, *workload.data(1, 0, **small.data)["x"].store.shape)
        arguments = {**workload.fit((shape,)), **small.network}
        axes = ("depth", "height", "width")[5 - len(shape) :]
        for cut in (DATA, *axes):
            sizes = {axis: 1 + (axis == cut) for axis in (DATA, *axes)}
            found.append(Case(name, arguments, shape, sizes, small.training["batch"]))
    return found
