"""Simulated against published runs, the bad ones included, beside a predictor that always answers the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..plan.machine import load_machine
from .levers import MESSAGE_US
from .published import ALWAYS, COORDINATION, RING_STEPS, RUNS, Fit, PublishedRun, network_subject
from .replaying import ring_steps
from .scenario import Scenario, changed_machine
from .step import Recordings, Simulation, simulate

FITTING = 4  # rounds; the rate is nearly proportional to the pace
Say = Callable[[str], None]


def scenario_of(run: PublishedRun) -> Scenario:
    """The run as it is simulated, its samples in the hosts' memory."""
    subject = network_subject(run.network, run.shape, run.arguments, run.mixed)
    machine = load_machine(run.machine)
    return Scenario(run.network, subject, machine, run.devices, run.local, levers=run.levers, input_bytes=0)


def fitted(scenario: Scenario, fit: Fit | None, recordings: Recordings | None = None) -> Scenario:
    """The scenario with devices at the pace at which the smallest published scale has its rate."""
    if fit is None:
        return scenario
    small = replace(scenario, devices=fit.devices, local=fit.local)
    for _ in range(FITTING):
        rate = simulate(small, fit.devices, recordings=recordings).rate
        small = replace(small, pace=small.pace * fit.rate / rate)
    return replace(scenario, pace=small.pace)


def validate(say: Say = lambda text: None, seed: int = 0) -> dict[str, Any]:
    """All published rows: ``rows``, ``rows_within``, ``worst`` (relative error), ``cases``; and what levers cost."""
    recordings, cases = Recordings(), []
    for run in RUNS:
        say(run.name)
        scenario = fitted(scenario_of(run), run.fit, recordings)
        cases.append(_case(run, simulate(scenario, run.base, seed, recordings=recordings)))
    for factors, steps in RING_STEPS.items():
        name = f"steps of a sum over {' x '.join(map(str, factors))}"
        cases.append(_plain_case(name, "steps", ring_steps(factors), steps, 0.0, "Cho et al. 2017"))
    say("coordination at 6,000")
    cases.append(_coordination_case(recordings))
    worst = max(cases, key=lambda case: abs(case["error"]))
    return {
        "rows": len(cases),
        "rows_within": sum(case["within"] for case in cases),
        "worst": abs(worst["error"]),
        "worst_case": worst["case"],
        "cases": cases,
        "trivial": trivial(cases),
        "ablations": ablations(recordings, say),
        "coordinator": MESSAGE_US.model_dump(exclude_none=True),
    }


def _case(run: PublishedRun, found: Simulation) -> dict[str, Any]:
    """A published run beside the simulated one. The tolerance of an efficiency is absolute, that of a rate relative."""
    simulated = found.efficiency if run.kind == "efficiency" else found.rate
    low, high = found.efficiency_band
    return {
        "case": run.name,
        "kind": run.kind,
        "machine": run.machine,
        "devices": run.devices,
        "published": run.value,
        "tolerance": run.tolerance,
        "simulated": simulated,
        "band": [low, high]
        if run.kind == "efficiency"
        else [found.rate * each / found.efficiency for each in (low, high)],
        "error": simulated / run.value - 1,
        "within": abs(simulated - run.value) <= run.tolerance * (1 if run.kind == "efficiency" else run.value),
        "source": run.source,
        "pace": found.scenario.pace,
        "step_s": found.seconds,
        "exposed_s": found.exposed,
        "sustained_flops": found.sustained_flops,
        "peak_flops": found.peak_flops,
    }


def _coordination_case(recordings: Recordings) -> dict[str, Any]:
    """How much longer a step with a coordinator takes than with bit vectors."""
    devices, ratio, tolerance = COORDINATION
    new = scenario_of(RUNS[0]).on(devices)
    steps = [simulate(each, devices, recordings=recordings) for each in (new.with_levers(control="coordinator"), new)]
    name = f"coordinator over bit vectors, {devices:,} of Summit"
    return _plain_case(name, "ratio", steps[0].seconds / steps[1].seconds, ratio, tolerance, "Romero et al. 2022")


def _plain_case(
    name: str, kind: str, simulated: float, published: float, tolerance: float, source: str
) -> dict[str, Any]:
    """A published figure that belongs to no run: a ratio or a count."""
    return {
        "case": name,
        "kind": kind,
        "published": published,
        "tolerance": tolerance,
        "simulated": simulated,
        "error": simulated / published - 1,
        "within": abs(simulated - published) <= tolerance * published,
        "source": source,
    }


def trivial(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How a predictor fares that answers the same efficiency always, and the simulator on the same rows."""
    rows = [case for case in cases if case["kind"] == "efficiency"]
    errors = [abs(ALWAYS - case["published"]) for case in rows]
    ours = [abs(case["simulated"] - case["published"]) for case in rows]
    return {
        "answer": ALWAYS,
        "rows": len(rows),
        "rows_within": sum(error <= case["tolerance"] for error, case in zip(errors, rows, strict=True)),
        "mean_error": sum(errors) / len(rows),
        "worst_error": max(errors),
        "simulator_mean_error": sum(ours) / len(rows),
        "simulator_worst_error": max(ours),
    }


def ablations(recordings: Recordings, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """What the run at 27,600 loses by one change at a time, and to which cause."""
    scenario = scenario_of(RUNS[0])
    plain = simulate(scenario, recordings=recordings)
    changes = {
        "coordinator": scenario.with_levers(control="coordinator"),
        "no grouping": scenario.with_levers(grouping=False),
        "half the bandwidth": replace(scenario, machine=changed_machine(scenario.machine, bandwidth=0.5)),
    }
    rows = []
    for name, changed in changes.items():
        say(name)
        found = simulate(changed, recordings=recordings)
        more = {
            cause: found.exposed.get(cause, 0.0) - plain.exposed.get(cause, 0.0)
            for cause in {*found.exposed, *plain.exposed}
        }
        cause = max(more, key=lambda name: more[name])
        rows.append(
            {
                "change": name,
                "efficiency": found.efficiency,
                "loss": plain.efficiency - found.efficiency,
                "cause": cause,
                "cause_s": more[cause],
                "messages": found.gradient_messages,
            }
        )
    return rows
