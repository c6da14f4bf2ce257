"""``bench overhead``: what the library adds to a small operation, beside plain torch, DTensor and the bare message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from halocline.testing.pool import RankPool

from . import overhead_ranks as ranks
from .machine import Others, describe

CALLS = 40  # of a contender in a row; then it is the next one's turn
DEADLINE = 120.0  # seconds of a round
MICRO = 1e6
#: Microseconds, and for the last a ratio: what is aimed at.
TARGETS = {"pointwise_added_us": 8, "window_added_us": 20, "halo_over_raw": 2}

Key = tuple[str, str, str]  # subject, "forward" or "both", contender


@dataclass(frozen=True)
class Figure:
    """Microseconds a call of one contender: rank 0's median, the larger of the ranks' medians, and rank 0's spread."""

    median: float
    slowest_rank: float
    tenth: float
    mean: float

    @classmethod
    def of(cls, times: Sequence[Sequence[float]]) -> Figure:
        """From each rank's list of seconds."""
        micro = [[second * MICRO for second in one] for one in times]
        medians = [median(one) for one in micro]
        return cls(medians[0], max(medians), quantiles(micro[0], n=10)[0], fmean(micro[0]))


Figures = Mapping[Key, Figure]


def measure_overhead(repeat: int, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """``repeat`` rounds in each of which every contender has its turn, so that noise hits all alike."""
    with RankPool(ranks.RANKS) as pool:
        notes = pool.run(ranks.prepare, deadline=DEADLINE)[0]
        rounds, others = [], Others(pool.run)
        for _ in range(repeat):
            rounds.append(pool.run(ranks.round_of, CALLS, deadline=DEADLINE))
            tick()
        facts = describe(others.share())
    everyone = range(ranks.RANKS)
    times = {key: [[t for one in rounds for t in one[rank][key]] for rank in everyone] for key in rounds[0][0]}
    return summary({key: Figure.of(of_ranks) for key, of_ranks in times.items()}, notes, repeat, facts)


def summary(figures: Figures, notes: Mapping[str, str], repeat: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    relu, add = added(figures, "relu"), added(figures, "add")
    raw = fastest_raw(figures, "halo")
    hand = figures["halo", "forward", "by hand"].median
    norm, total = added(figures, "norm"), fastest_raw(figures, "norm")
    return {
        "pointwise_added_us": max(relu, add),
        "relu_added_us": relu,
        "add_added_us": add,
        "window_added_us": added(figures, "window"),
        "window_function_added_us": added(figures, "window function"),
        "halo_over_raw": added(figures, "halo") / raw.median,
        "halo_over_raw_quiet": added(figures, "halo", of="tenth") / raw.tenth,
        "halo_over_by_hand": figures["halo", "forward", "halocline"].median / hand,
        "halo_added_us": added(figures, "halo"),
        "raw_exchange_us": raw.median,
        "norm_added_us": norm,
        "norm_added_less_sum_us": norm - total.median,
        "raw_sum_us": total.median,
        "targets": TARGETS,
        "dtensor": {name: notes.get(name, "right") for name in _subjects(figures)},
        "details": details(figures),
        "rounds": repeat,
        "calls": repeat * CALLS,
        "tile": list(ranks.TILE),
        "machine": facts,
    }


def added(figures: Figures, subject: str, kind: str = "forward", of: str = "median") -> float:
    """What the library takes longer than plain torch does on the tile."""
    ours, plain = figures[subject, kind, "halocline"], figures[subject, kind, "plain"]
    return float(getattr(ours, of) - getattr(plain, of))


def fastest_raw(figures: Figures, subject: str) -> Figure:
    raw = [figure for (name, _, who), figure in figures.items() if name == subject and who.startswith("raw")]
    return min(raw, key=lambda figure: figure.median)


def details(figures: Figures) -> dict[str, Any]:
    """By subject: medians by contender, and the same of forward and backward together."""
    rows: dict[str, Any] = {}
    for subject in _subjects(figures):
        ways = {}
        for kind, name in (("forward", "forward"), ("both", "forward_and_backward")):
            of_kind = {who: f for (s, k, who), f in figures.items() if (s, k) == (subject, kind)}
            shown: dict[str, Any] = {who: _row(figure) for who, figure in of_kind.items()}
            shown.setdefault("dtensor", None)
            ways[name] = {**shown, "added_us": added(figures, subject, kind)}
        rows[subject] = ways
    return rows


def _row(figure: Figure) -> dict[str, float]:
    return {
        "median_us": figure.median,
        "slowest_rank_us": figure.slowest_rank,
        "tenth_us": figure.tenth,
        "mean_us": figure.mean,
    }


def _subjects(figures: Figures) -> list[str]:
    return list(dict.fromkeys(subject for subject, _, _ in figures))
