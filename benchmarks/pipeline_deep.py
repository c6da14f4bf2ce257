"""``bench pipeline --deep``: a ResNet of 1,001 layers, stages times replicas against replicas alone.

On an emulated cluster whose ranks have a share of a core each, so that ranks that wait give nothing to the others. The
same batch, weights and optimizer; *data* is ``hc.distribute``, which averages gradients beside backward. The prediction
knows how long each stage, and the whole network, takes without messages, and the rate of a plain stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from halocline.parts import StageCut
from halocline.parts.cutting import step_seconds

from . import pipeline_deep_ranks as ranks
from .cluster import Cluster
from .core_share import CoreShare, enter
from .machine import Others, describe
from .pipeline_deep_ranks import DeepCase
from .reshard import link_rate

DEADLINE = 300.0
LATENCY = 1e-3  # seconds of a message between two ranks that compute
WAYS = ("hybrid", "data")

Say = Callable[[str], None]


@dataclass(frozen=True)
class DeepTrial:
    """What is measured."""

    rates: tuple[str, ...] = ("20mbit", "1gbit")
    cores: float = 0.45  # of each rank
    repeat: int = 3
    case: DeepCase = field(default_factory=DeepCase)


def measure_deep(trial: DeepTrial, tell: Say) -> dict[str, Any]:
    """For each rate: seconds of each way, predicted and measured, and by how much the hybrid wins or loses."""
    case, found = trial.case, list[dict[str, Any]]()
    with (
        CoreShare(trial.cores, case.ranks) as shares,
        Cluster(nodes=case.ranks, rate=trial.rates[0], collective_timeout=DEADLINE) as cluster,
    ):
        cluster.run(enter, per_rank=shares.members)
        others = Others(cluster.run)
        for rate in trial.rates:
            cluster.set_rate(rate)
            link = link_rate(cluster, rate)
            if not found:
                tell("timing calls, cutting stages")
                cut = _on_first(cluster, case, link)
                for way in WAYS:
                    seconds = max(cluster.run(ranks.prepare, case, way, cut, deadline=DEADLINE))
                    tell(f"{way}: made in {seconds:.1f} s")
                whole = [
                    max(each) for each in zip(*cluster.run(ranks.whole_seconds, case, deadline=DEADLINE), strict=True)
                ]
                timed = timed_cut(cut, cluster.run(ranks.stage_seconds, case, deadline=DEADLINE))
            predicted = predict(case, timed, whole[0], whole[1], link)
            found.append(_at_rate(cluster, case, rate, trial.repeat, predicted, tell))
        share = others.share()
    return {"layers": case.layers, "case": asdict(case), "cores": trial.cores, "stages": timed.explain(),
            "rates": found, "machine": describe(share)}  # fmt: skip


def timed_cut(cut: StageCut, by_rank: Sequence[tuple[int, float, float]]) -> StageCut:
    """The cut with the seconds that its stages took: the slowest rank of each counts."""
    stages = []
    for number, stage in enumerate(cut.stages):
        forward, backward = (max(each[kind] for each in by_rank if each[0] == number) for kind in (1, 2))
        stages.append(replace(stage, seconds=forward + backward, forward=forward))
    return replace(cut, stages=tuple(stages))


def _on_first(cluster: Cluster, case: DeepCase, link: float) -> StageCut:
    """Rank 0 measures while the others rest."""
    told = cluster.run(ranks.on_first, case, 1 / link, LATENCY, deadline=DEADLINE)[0]
    assert told is not None
    return told


def _at_rate(
    cluster: Cluster, case: DeepCase, rate: str, repeat: int, predicted: dict[str, float], tell: Say
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeat + 1):
        for way in WAYS:
            took = max(cluster.run(ranks.timed_step, case, way, deadline=DEADLINE))
            seconds[way] += [took] if turn else []
    measured = {way: median(each) for way, each in seconds.items()}
    speedup = {"predicted": predicted["data"] / predicted["hybrid"], "measured": measured["data"] / measured["hybrid"]}
    tell(f"{rate}: hybrid {measured['hybrid']:.2f} s, data {measured['data']:.2f} s, {speedup}")
    return {"rate": rate, "predicted_s": predicted, "measured_s": measured, "hybrid_over_data": speedup,
            "same_winner": (speedup["predicted"] > 1) == (speedup["measured"] > 1)}  # fmt: skip


def predict(case: DeepCase, cut: StageCut, forward: float, both: float, link: float) -> dict[str, float]:
    """Seconds of a step. Sums of gradients are rings: beside backward in data parallel, after it in the pipeline."""
    sizes = [stage.parameters for stage in cut.stages]
    ring = ring_seconds(sum(sizes), case.ranks, link)
    inside = max(ring_seconds(size, case.replicas, link) for size in sizes)
    schedule = ranks.schedule_of(case)
    return {
        "hybrid": step_seconds(schedule, cut, 1 / link, LATENCY) + inside,
        "data": forward + max(both - forward, ring),
    }


def ring_seconds(size: int, count: int, link: float) -> float:
    """Of an all-reduce of so many bytes."""
    return 2 * (count - 1) / count * size / link


def lines(result: dict[str, Any]) -> Sequence[tuple[str, str]]:
    """A line of the table for each rate."""
    rows = []
    for each in result["rates"]:
        told, took, gain = each["predicted_s"], each["measured_s"], each["hybrid_over_data"]
        rows.append((
            f"{result['layers']:,} layers at {each['rate']}",
            f"hybrid {took['hybrid']:.2f} s (predicted {told['hybrid']:.2f}), data {took['data']:.2f} s "
            f"({told['data']:.2f}): {gain['measured']:.2f} times as fast ({gain['predicted']:.2f})",
        ))  # fmt: skip
    return rows
