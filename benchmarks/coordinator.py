"""``bench coordinator``: what it costs a rank to negotiate with every other, a message and a tensor at a time.

A step waits while the coordinator is at work, so its processor time counts: wall-clock time of many ranks on few cores
says more about the cores. ``halocline simulate --control coordinator`` uses the costs that this measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halocline.reduction.schedule.control import Combine, Coordinator, Doubling, packed
from halocline.testing.pool import RankPool
from halocline.world import Mesh


class GatherAndBroadcast(Coordinator):
    """As the founding systems' baseline: rank 0 hears every rank, and its answer goes down a tree of two branches."""

    def agree(self, bits: Tensor, combine: Combine) -> Tensor:
        """All ranks' words combined, the same on all. By all ranks together."""
        rank, size = self.world.rank, self.world.size
        if rank:
            self._send(0, bits)
            bits = self._received((rank - 1) // 2, bits)
        else:
            for peer in range(1, size):
                bits = combine(bits, self._received(peer, bits))
        for child in (2 * rank + 1, 2 * rank + 2):
            if child < size:
                self._send(child, bits)
        return bits


CONTROLS = {"gather": GatherAndBroadcast, "coordinator": Coordinator, "doubling": Doubling}
RANKS = (3, 5, 9, 13)
TENSORS = (60, 60_000)
ROUNDS, WARM = 150, 10
DEADLINE = 120.0


def rounds_on_rank(tensors: int, rounds: int) -> dict[str, float]:
    """Microseconds of this rank's processor that one agreement takes, by algorithm."""
    world = Mesh(data=-1).world
    words, found = packed([True] * tensors), {}
    for name, make in CONTROLS.items():
        control = make(world, f"costs of {name}")
        for _ in range(WARM):
            control.agree(words, torch.bitwise_and)
        began = time.process_time()
        for _ in range(rounds):
            control.agree(words, torch.bitwise_and)
        found[name] = (time.process_time() - began) / rounds * 1e6
    return found


def measure_coordinator(repeat: int, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Rank 0's costs by least squares: a round, each other rank, each tensor of each other rank."""
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        say(f"{ranks} ranks")
        with RankPool(ranks) as pool:
            for tensors in TENSORS:
                turns = [pool.run(rounds_on_rank, tensors, ROUNDS, deadline=DEADLINE)[0] for _ in range(repeat)]
                best = {name: min(turn[name] for turn in turns) for name in turns[0]}
                rows.append({"ranks": ranks, "tensors": tensors, **{f"{name}_us": best[name] for name in best}})
    round_us, message_us, tensor_us = costs(rows, "gather")
    return {
        "round_us": round_us,
        "message_us": message_us,
        "tensor_us": tensor_us,
        "message_with_answer_us": costs(rows, "coordinator")[1],
        "cases": rows,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def costs(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """Microseconds of a round, of each rank in it, and of each rank's tensor."""
    peers = np.array([row["ranks"] - 1 for row in rows], float)
    tensors = np.array([row["tensors"] for row in rows], float)
    terms = np.stack([np.ones_like(peers), peers, peers * tensors], 1)
    found = np.linalg.lstsq(terms, np.array([row[f"{name}_us"] for row in rows]), rcond=None)[0]
    return tuple(float(max(0.0, each)) for each in found)  # type: ignore[return-value]
