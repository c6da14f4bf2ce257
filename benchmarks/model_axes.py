"""``bench model-axes``: steps of a network whose weights are cut, against torch's own tensor parallelism.

The same ranks hold the network seven times: cut by ``parallelize_module`` (columns and rows, as Megatron has it), by
each layout by hand that cuts both weights of a block, by the first of them with sums that travel in one piece, and by
the layout that ``layout="auto"`` chooses. Steps alternate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from halocline.errors import HaloclineError
from halocline.testing import RankPool

from .cluster import Cluster
from .machine import Others, describe
from .model_axes_ranks import AUTO, BY_HAND, IN_ONE_PIECE, TORCH, Sizes, measure

DEADLINE = 300.0
AGREE = 1e-4  # relative, of losses in float32
TARGETS = {"over_torch": 1.0, "auto_over_best": 1.03}


def measure_model_axes(
    ranks: Sequence[int], rate: str | None, sizes: Sizes, rounds: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """On each number of ranks, on loopback or, with ``rate``, on a cluster whose links have it."""
    cases = []
    share: float | None = None
    for count in ranks:
        say(f"{count} ranks")
        place = RankPool(count) if rate is None else Cluster(nodes=count, rate=rate, collective_timeout=DEADLINE)
        with place as pool:
            others = Others(pool.run) if rate is not None else None
            every = pool.run(measure, sizes, rounds, deadline=DEADLINE)
            share = others.share() if others is not None else share
        cases.append(_case(count, rate, every))
    return {
        "cases": cases,
        "over_torch": max(case["over_torch"] for case in cases),
        "auto_over_best": max(case["auto_over_best"] for case in cases),
        "targets": TARGETS,
        "width": sizes.width,
        "layers": sizes.layers,
        "tokens": sizes.tokens,
        "rounds": rounds,
        "oversubscribed": max(ranks) > (os.cpu_count() or 1),
        "machine": describe(share),
    }


def _case(count: int, rate: str | None, every: Sequence[Any]) -> dict[str, Any]:
    """Medians over rounds of the slowest rank's seconds, and the ratios within each round."""
    ways = every[0][0]
    slowest = {way: [max(each) for each in zip(*(seconds[way] for seconds, _ in every), strict=True)] for way in ways}
    losses = every[0][1]
    for way, curve in losses.items():
        if any(abs(a - b) > AGREE * abs(b) for a, b in zip(curve, losses[TORCH], strict=True)):
            raise HaloclineError(f"bench model-axes: {way} gives losses {curve}, and {TORCH} {losses[TORCH]}")
    times = {way: median(seconds) for way, seconds in slowest.items()}
    best = min(BY_HAND, key=lambda way: times[way])

    def ratio(way: str, other: str) -> float:
        return median(a / b for a, b in zip(slowest[way], slowest[other], strict=True))

    return {
        "ranks": count,
        "links": rate or "loopback",
        "seconds": times,
        "best_by_hand": best,
        "over_torch": ratio(next(iter(BY_HAND)), TORCH),
        "over_one_piece": ratio(next(iter(BY_HAND)), IN_ONE_PIECE),
        "auto_over_torch": ratio(AUTO, TORCH),
        "auto_over_best": ratio(AUTO, best),
    }
