"""Built-in networks in every schedule: loss, gradients and buffers of one rank with the same micro-batches."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
from pipelining import Case

import halocline as hc
from halocline.world import run_local

EXACT = 1e-8
ROUNDS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
MICROBATCHES = (1, 2, 3, 4, 6)
INSIDE: dict[str, list[dict[str, int]]] = {
    "unet3d": [{}, {"data": 2}, {"depth": 2}, {"data": 2, "depth": 2}],
    "resnet50": [{}, {"data": 2}, {"depth": 2}],
    "transformer": [{}, {"data": 2}, {"model": 2}, {"data": 2, "model": 2}],
}


class Setup(NamedTuple):
    """One pipeline of a network."""

    network: str
    schedule: str
    stages: int
    microbatches: int
    inside: dict[str, int]

    def __str__(self) -> str:
        inside = "".join(f"-{axis}{size}" for axis, size in self.inside.items())
        return f"{self.network}-{self.schedule}-{self.stages}x{self.microbatches}{inside}"


def setups() -> list[Setup]:
    """Every schedule, number of stages and of micro-batches, and cut inside the stages that fit together."""
    every = (
        Setup(network, schedule, stages, count, inside)
        for network in INSIDE
        for schedule, stages, count, inside in itertools.product(ROUNDS, (2, 3, 4), MICROBATCHES, INSIDE[network])
    )
    return [s for s in every if s.schedule != "interleaved" or s.microbatches % s.stages == 0]


def is_long(place: int, setup: Setup) -> bool:
    """One in thirteen, which is no divisor of any of the counts, on at most eight ranks; the others are trials."""
    return place % 13 == 0 and setup.stages * math.prod(setup.inside.values()) <= 8


EVERY = [
    pytest.param(setup, marks=pytest.mark.long if is_long(place, setup) else pytest.mark.trial, id=str(setup))
    for place, setup in enumerate(setups())
]


def step(case: Case, setup: Setup) -> tuple[float, int, int]:
    """Of this rank: the error of a step, the micro-batches that it held, and those that the schedule promises."""
    mesh = hc.Mesh(stage=setup.stages, **setup.inside)
    options: dict[str, Any] = {"schedule": setup.schedule, "rounds": ROUNDS[setup.schedule]}
    pipe = case.pipeline(mesh, **options)
    loss = pipe.step(*case.batch)
    assert pipe.lane is not None
    promised = pipe.schedule.in_flight[pipe.lane]
    if setup.schedule == "1f1b":
        assert promised == min(setup.microbatches, setup.stages - pipe.lane)
    return case.error(pipe, loss), pipe.in_flight, promised


@pytest.mark.parametrize("setup", EVERY)
def test_a_network_in_stages(setup: Setup) -> None:
    case = Case.of(setup.network, setup.microbatches)
    for error, held, promised in run_local(setup.stages * math.prod(setup.inside.values()), lambda: step(case, setup)):
        assert error <= EXACT
        assert held <= promised
