"""``bench pipeline``: a pipelined step beside torch.distributed.pipelining, and bubbles of stages that sleep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from halocline.testing.pool import RankPool

from .machine import Others, describe
from .pipeline_balance import measure_balance
from .pipeline_ranks import SleepCase, StepCase, sleeping_steps, steps_beside_torch

DEADLINE = 120.0


@dataclass(frozen=True)
class PipelineTrial:
    """What is measured."""

    ranks: tuple[int, ...] = (2, 3, 4)  # of sleeping stages
    microbatches: tuple[int, ...] = (4, 8)
    sleep: float = 0.1  # seconds of a forward; a backward takes twice as long
    width: int = 512
    repeat: int = 7


def measure_pipeline(trial: PipelineTrial, tell: Callable[[str], None]) -> dict[str, Any]:
    """``step_over_torch``: the largest ratio of medians; ``bubble_over_theory``: the largest ratio of GPipe, 1F1B and
    interleaved 1F1B; ``balance_off``: the largest error of a predicted imbalance."""
    busy: list[float] = []
    steps = [_beside_torch(StepCase(schedule, 8, trial.width), trial.repeat, tell) for schedule in ("gpipe", "1f1b")]
    bubbles = []
    for ranks in trial.ranks:
        with RankPool(ranks, collective_timeout=DEADLINE) as pool:
            others = Others(pool.run)
            bubbles += _bubbles(pool, ranks, trial, tell)
            busy.append(others.share() or 0.0)
    balance = measure_balance(trial.repeat, tell)
    compared = [case["bubble_over_theory"] for case in bubbles if case["bubble_over_theory"] is not None]
    return {
        "trial": asdict(trial),
        "step_over_torch": max(case["ratio"] for case in steps),
        "bubble_over_theory": max(compared),
        "zero_bubble_over_1f1b": max(zero_over_plain(bubbles)),
        "balance_off": max(case["off"] for case in balance),
        "cases": steps + bubbles + balance,
        "machine": describe(max(busy, default=None)),
    }


def _beside_torch(case: StepCase, repeat: int, tell: Callable[[str], None]) -> dict[str, Any]:
    with RankPool(2, collective_timeout=DEADLINE) as pool:
        by_rank = pool.run(steps_beside_torch, case, repeat, deadline=DEADLINE)
    ours = [max(rank.ours[n] for rank in by_rank) for n in range(repeat)]
    theirs = [max(rank.torch[n] for rank in by_rank) for n in range(repeat)]
    found = {
        **asdict(case), "kind": "step", "ranks": 2, "ours_s": median(ours), "torch_s": median(theirs),
        "ratio": median(a / b for a, b in zip(ours, theirs, strict=True)),
        "largest_difference": max(rank.difference for rank in by_rank),
    }  # fmt: skip
    tell(f"{case.schedule}: {1e3 * found['ours_s']:.1f} ms, torch {1e3 * found['torch_s']:.1f} ms")
    return found


def _bubbles(pool: RankPool, ranks: int, trial: PipelineTrial, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    found = []
    for microbatches in trial.microbatches:
        for schedule, rounds in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
            if schedule == "interleaved" and microbatches % ranks:
                continue
            case = SleepCase(schedule, microbatches, rounds, trial.sleep)
            by_rank = pool.run(sleeping_steps, case, 3, deadline=DEADLINE)
            seconds = min(max(rank.seconds[n] for rank in by_rank) for n in range(3))
            told = bubble_case(case, ranks, seconds)
            held = [(rank.in_flight, rank.promised) for rank in by_rank]
            found.append({**told, "in_flight": [most for most, _ in held], "promised": [most for _, most in held]})
            tell(f"{ranks} ranks, {microbatches} micro-batches, {schedule}: bubble {told['bubble']:.3f}")
    return found


def bubble_case(case: SleepCase, ranks: int, seconds: float) -> dict[str, Any]:
    """The share of a step in which a rank waits, and what theory says of it: of interleaved 1F1B as a share of work."""
    work = 3 * case.sleep * case.microbatches
    waits, m = seconds - work, case.microbatches
    theory = {"interleaved": (ranks - 1) / (case.rounds * m), "zero-bubble": None}.get(
        case.schedule, (ranks - 1) / (m + ranks - 1)
    )
    bubble = waits / (work if case.schedule == "interleaved" else seconds)
    ratio = None if theory is None else bubble / theory
    return {**asdict(case), "kind": "bubble", "ranks": ranks, "step_s": seconds, "bubble": bubble, "theory": theory,
            "bubble_over_theory": ratio}  # fmt: skip


def zero_over_plain(bubbles: Sequence[dict[str, Any]]) -> list[float]:
    """Of each set-up, the bubble of zero-bubble over that of 1F1B."""
    by = {(case["ranks"], case["microbatches"], case["schedule"]): case["bubble"] for case in bubbles}
    return [bubble / by[ranks, count, "1f1b"] for (ranks, count, name), bubble in by.items() if name == "zero-bubble"]
