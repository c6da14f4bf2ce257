"""``bench recurrent``: an LSTM whose weights are cut by hidden units, against the same with gathered weights.

Both ways are in the same ranks, and steps (forward and backward) alternate. Losses must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import halocline as hc
from halocline.errors import HaloclineError
from halocline.testing import RankPool
from halocline.testing.memory import peak_bytes

from .machine import describe

DEADLINE = 300.0
AGREE = 1e-4  # relative, of losses in float32
WAYS: Mapping[str, hc.Choices] = {"by units": hc.Choices(), "gathered": hc.Choices(remedy="gather")}


@dataclass(frozen=True)
class Sizes:
    """Of the network and its input."""

    units: int
    steps: int
    samples: int


def measure_recurrent(ranks: int, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of a step each way, of the slowest rank, and the ratio within each round."""
    with RankPool(ranks) as pool:
        every = pool.run(measure, sizes, rounds, deadline=DEADLINE)
    losses = every[0]["losses"]
    if any(abs(loss - losses["gathered"]) > AGREE * abs(loss) for loss in losses.values()):
        raise HaloclineError(f"bench recurrent: the losses differ: {losses}")
    slowest = {way: [max(each) for each in zip(*(r["seconds"][way] for r in every), strict=True)] for way in WAYS}
    return {
        "ranks": ranks,
        **vars(sizes),
        "seconds": {way: median(seconds) for way, seconds in slowest.items()},
        "peak_bytes": {way: max(rank["peak"][way] for rank in every) for way in WAYS},
        "time_over_gathered": median(a / b for a, b in zip(*slowest.values(), strict=True)),
        "machine": describe(None),
    }


def measure(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """What a rank does: by way the seconds of each round, the loss, and the peak of one more step."""
    torch.set_num_threads(1)
    steps = {way: _stepper(sizes, choices) for way, choices in WAYS.items()}
    losses = {way: step() for way, step in steps.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses, "peak": {way: peak_bytes(step).peak for way, step in steps.items()}}


def _stepper(sizes: Sizes, choices: hc.Choices) -> Callable[[], float]:
    torch.manual_seed(0)
    net = nn.LSTM(sizes.units, sizes.units)
    x = torch.randn(sizes.steps, sizes.samples, sizes.units)
    hc.distribute(net, hc.Mesh(choices, model=dist.get_world_size()), layout={"*": {0: "model"}})

    def step() -> float:
        net.zero_grad()
        loss = net(x)[0].square().mean()
        loss.backward()
        return loss.item()

    return step
