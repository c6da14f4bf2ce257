"""``bench foresight``: predicted steps and memory, held against runs that the calibration has not seen.

The machine is calibrated first, without any operation at a shape that a judged run has. Each run is then recorded on
meta tensors and priced, and measured: its step by the slowest rank, in turns with the others, and its peak of memory.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import torch

from halocline.arrangement import DATA, Arrangement
from halocline.plan.calibrate import describe, measure_device
from halocline.plan.calibrate_ranks import link_on_ranks, measure_load
from halocline.plan.candidate import MARGIN
from halocline.plan.cost import Key, Prices, key_of
from halocline.plan.machine import Machine
from halocline.plan.recording import record_step
from halocline.plan.replay import Timeline
from halocline.plan.search import price
from halocline.testing.pool import RankPool

from . import foresight_ranks as on_ranks
from .cluster import Cluster
from .foresight_cases import Case, cluster_cases, local_cases, subject_of, workload_cases
from .foresight_uneven import measure_uneven
from .machine import Others
from .machine import describe as describe_run

DEADLINE = 300.0  # seconds for a case on its ranks
STEPS = 3  # of one turn; their median counts
DISTINCT = 0.10  # two cuts whose measured steps differ by less are not ranked
STORAGE = 1e9  # bytes a second; no case reads
TARGETS = {"median_error": 0.10, "worst_error": 0.25, "memory_error": 0.10, "ranking": 0.90}

Say = Callable[[str], None]


@dataclass
class Measured:
    """What a run really took."""

    seconds: list[float] = field(default_factory=list)  # of each turn
    memory: int = 0  # bytes of the rank that takes most


@dataclass(frozen=True)
class Predicted:
    timeline: Timeline
    memory: int


def measure_foresight(
    repeat: int, rates: Sequence[str], seconds: float, say: Say = lambda text: None
) -> dict[str, Any]:
    """Calibrate, predict, measure, compare. ``rates`` are those of the emulated cluster's links; none: no cluster."""
    torch.set_num_threads(1)
    cases = [*local_cases(), *cluster_cases(rates)]
    say(f"{len(cases)} runs; collecting their shapes")
    judged = {key for case in cases for key in shapes_of(case)}
    say(f"calibrating without their {len(judged):,} operations (up to {seconds:g} s)")
    device = measure_device(torch.device("cpu"), lambda what, share: None, without=judged, seconds=seconds)
    seen = sum(_row_key(row) in judged for row in device["operations"])
    assert seen == 0, f"{seen} judged operations were calibrated"
    rows, others, machines = [], [], dict[Place, Machine]()
    for place, group in by_place(cases).items():
        with ranks_at(place) as ranks:
            machine = machines[place] = describe_ranks(ranks, place, device)
            say(f"{place}: {len(group)} runs")
            predictions = {case.name: predict(case, machine) for case in group}
            watch = Others(ranks.run)
            runs = measure_runs(ranks, group, repeat, say)
            others.append(watch.share())
        with ranks_at(place) as ranks:  # fresh ones: what the timed ones keep is not the case's
            for case in group:
                runs[case.name].memory = max(ranks.run(on_ranks.memory_peak_of, case, deadline=DEADLINE))
        rows += [row(case, predictions[case.name], runs[case.name]) for case in group]
    say("every workload at its small size, plain and cut")
    small = measure_workloads(machines[PAIR], repeat, say)
    say("unequal ranks")
    uneven = measure_uneven(machines[PAIR], repeat)
    facts = describe_run(max((share for share in others if share is not None), default=None))
    return {
        **summary(rows, cases),
        "workloads": small,
        "uneven": uneven,
        "calibrated_operations": len(device["operations"]),
        "machine": facts,
    }


def shapes_of(case: Case) -> set[Key]:
    """The operations of a case, as a key names them."""
    recorded = record_step(subject_of(case), case.sizes, case.batch // case.sizes["data"], warm=0)
    return {key_of(event) for event in recorded.record.operations}


def _row_key(row: dict[str, Any]) -> Key:
    return row["name"], row["dtype"], row["shapes"], row["options"], row["flops"], row["bytes"]


# ---- where a case runs ----

Place = tuple[int, str | None]  # ranks, and the rate of the cluster's links, or None on loopback


def by_place(cases: Sequence[Case]) -> dict[Place, list[Case]]:
    found: dict[Place, list[Case]] = defaultdict(list)
    for case in cases:
        found[case.ranks, case.rate].append(case)
    return dict(sorted(found.items(), key=lambda item: (item[0][1] or "", item[0][0])))


@contextmanager
def ranks_at(place: Place) -> Iterator[Any]:
    count, rate = place
    if rate is None:
        with RankPool(count) as pool:
            yield pool
    else:
        with Cluster(nodes=count, rate=rate, collective_timeout=DEADLINE) as cluster:
            yield cluster


def describe_ranks(ranks: Any, place: Place, device: dict[str, Any]) -> Machine:
    """The machine as these ranks see it: their links, and what they take from each other."""
    count, rate = place
    links = ranks.run(link_on_ranks, deadline=DEADLINE)[0] if count > 1 else NO_LINK
    load = measure_load(ranks, count, device, links)
    if rate is not None:  # a node is a namespace, and all share this machine's cores
        described = describe(device, links, [{**load, "ranks": 1}], STORAGE, nodes=count, ranks=1)
    else:
        described = describe(device, links, [load], STORAGE, ranks=count)
    return Machine.model_validate(described)


PAIR: Place = (2, None)
#: Of one rank, which exchanges nothing.
NO_LINK = {"latency_us": 1.0, "gb_per_s": 10.0, "overlap_loss": 1.0}


# ---- predicted and measured ----


def predict(case: Case, machine: Machine) -> Predicted:
    """As `halocline plan` does."""
    found = price(subject_of(case), machine, Arrangement(case.sizes, case.points), case.batch, Prices(machine.device))
    return Predicted(found.timeline, found.recorded.memory)


def measure_runs(ranks: Any, cases: Sequence[Case], repeat: int, say: Say) -> dict[str, Measured]:
    """In turns, so that noise hits all cases alike."""
    ranks.run(on_ranks.warm_up, deadline=DEADLINE)
    found = {case.name: Measured() for case in cases}
    for case in cases:
        ranks.run(on_ranks.prepare, case, deadline=DEADLINE)
    for number in range(repeat):
        say(f"turn {number + 1} of {repeat}")
        for case in cases:
            found[case.name].seconds.append(max(ranks.run(on_ranks.timed_steps, case.name, STEPS, deadline=DEADLINE)))
    return found


def measure_workloads(machine: Machine, repeat: int, say: Say) -> dict[str, Any]:
    """What the planner would take for each workload, beside plain data parallel and every cut by hand.

    Its operations may have been calibrated: this judges the choice, not the prices.
    """
    cases = workload_cases()
    rows = {}
    for name in dict.fromkeys(case.workload for case in cases):
        group = [case for case in cases if case.workload == name]
        with ranks_at(PAIR) as ranks:
            runs = measure_runs(ranks, group, repeat, lambda text: None)
        rows[name] = [row(case, predict(case, machine), runs[case.name]) for case in group]
        say(f"{name}: {choices([rows[name]])[0]}")
    taken = choices(list(rows.values()))
    return {
        "worst_over_plain": max(each["over_plain"] for each in taken),
        "worst_over_best": max(
            (each["over_best"] for each in taken if each["best_over_plain"] <= 1 / 1.1), default=None
        ),
        "median_error": median(abs(each["error"]) for group in rows.values() for each in group),
        "chosen": taken,
        "cases": [each for group in rows.values() for each in group],
    }


def row(case: Case, predicted: Predicted, run: Measured) -> dict[str, Any]:
    """One line of the table."""
    step = median(run.seconds)
    line = predicted.timeline
    return {
        "case": case.name,
        "ranks": case.ranks,
        "plain": all(size == 1 for axis, size in case.sizes.items() if axis != DATA),
        "oversubscribed": case.ranks > (os.cpu_count() or 1),
        "measured_s": step,
        "spread": (max(run.seconds) - min(run.seconds)) / step,
        "predicted_s": line.seconds,
        "error": line.seconds / step - 1,
        "compute_s": line.compute,
        "exposed_s": dict(line.exposed),
        "measured_bytes": run.memory,
        "predicted_bytes": predicted.memory,
        "memory_error": predicted.memory / run.memory - 1 if run.memory else None,
    }


def choices(groups: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each network on so many ranks: what the planner would take, measured against the best and the plain."""
    found = []
    for group in groups:
        plain = next((each for each in group if each["plain"]), None)
        taken = min(group, key=lambda each: each["predicted_s"])
        if plain is not None and taken["predicted_s"] > (1 - MARGIN) * plain["predicted_s"]:
            taken = plain
        best = min(each["measured_s"] for each in group)
        found.append(
            {
                "taken": taken["case"],
                "over_best": taken["measured_s"] / best,
                "over_plain": None if plain is None else taken["measured_s"] / plain["measured_s"],
                "best_over_plain": None if plain is None else best / plain["measured_s"],
            }
        )
    return found


def summary(rows: Sequence[dict[str, Any]], cases: Sequence[Case]) -> dict[str, Any]:
    """The figures that the table is judged by."""
    errors = [abs(each["error"]) for each in rows]
    by_name = {each["case"]: each for each in rows}
    groups: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        groups[case.group].append(by_name[case.name])
    several = [group for group in groups.values() if len(group) > 1]
    pairs = [pair for group in several for pair in combinations(group, 2)]
    distinct = [
        pair
        for pair in pairs
        if abs(pair[0]["measured_s"] - pair[1]["measured_s"]) > DISTINCT * min(p["measured_s"] for p in pair)
    ]
    right = sum((a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"]) for a, b in distinct)
    taken = choices(several)
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "memory_error": median(abs(each["memory_error"]) for each in rows),
        "worst_memory_error": max(abs(each["memory_error"]) for each in rows),
        "ranking": right / len(distinct) if distinct else None,
        "ranked_pairs": len(distinct),
        "chosen": taken,
        "worst_over_plain": max((each["over_plain"] for each in taken if each["over_plain"]), default=None),
        "worst_over_best": max((each["over_best"] for each in taken), default=None),
        "cached_cases": 0,  # asserted: no operation of a case was calibrated
        "targets": TARGETS,
        "cases": list(rows),
    }
