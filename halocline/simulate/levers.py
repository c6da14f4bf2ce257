"""How gradients are agreed upon and travel: the levers of the founding systems, which a simulation sets one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..plan.machine import Machine, Quantity

ControlName = Literal["planned", "bits", "tree", "coordinator"]
RingName = Literal["nccl", "flat", "levels", "hybrid"]

#: What a coordinator needs for each rank that it hears, and a rank for each message of its own.
MESSAGE_US = Quantity(
    value=48.1, source="measured", reference="`halocline bench coordinator`, two cores, Python 3.11 and torch 2.13"
)
RADIX = 4  # of the tree


@dataclass(frozen=True)
class Levers:
    """What a run does about its gradients; the defaults are those of this library.

    ``control``: "planned" needs no agreement in a step, since all ranks follow one plan. "bits" is an AND of bit
    vectors over all ranks, "tree" the same over a tree, "coordinator" a rank that hears all others: three ways to agree
    in each cycle which sums may begin. Without ``grouping`` each gradient travels by itself. ``lag``: gradients are
    applied one step late. ``wire``: "bf16" or "fp16" halves the bytes of float32 gradients. ``rings``: "nccl" takes the
    algorithm and protocol that NCCL would, "flat" one ring over all ranks, "levels" rings inside nodes and then between
    them, "hybrid" rings inside nodes and NCCL's choice between them.
    """

    control: ControlName = "planned"
    grouping: bool = True
    lag: bool = False
    wire: str | None = None
    rings: RingName = "nccl"
    cycle_ms: float = 2.0

    def with_(self, **changes: object) -> Levers:
        """The same run with other levers."""
        return replace(self, **changes)  # type: ignore[arg-type]


CONTROLS, RINGS = get_args(ControlName), get_args(RingName)


def agreement_seconds(control: ControlName, ranks: int, machine: Machine) -> float:
    """One agreement of all ranks. Messages are too short for bandwidth to count.

    A coordinator hears one rank after another and answers down a tree. Elsewhere a rank handles few messages, and the
    network's latency counts for each.
    """
    if control == "planned" or ranks < 2:
        return 0.0
    message, latency = MESSAGE_US.value * 1e-6, machine.links[-1].latency_us.value * 1e-6
    if control == "coordinator":
        return (ranks - 1) * message + math.ceil(math.log2(ranks)) * (message + latency)
    if control == "tree":
        depth = math.ceil(math.log(ranks, RADIX))
        return 2 * depth * (RADIX * message / 2 + latency)
    return math.ceil(math.log2(ranks)) * (message + latency)
