"""How ``halocline simulate`` shows a step, a sweep, a waterfall and the published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .output import fact_table, number_table, number_text, say, size_text, stdout
from .plan_table import range_text, say_assumed, time_text

if TYPE_CHECKING:
    from ..simulate.long_run import LongRun, StagingTime
    from ..simulate.step import Simulation
    from ..simulate.what_if import Improvement, Stage


def flops_text(value: float) -> str:
    """Such as "1.54 EFLOP/s"."""
    from ..train.reporting.svg import scaled

    return f"{scaled(value)}FLOP/s"


def as_json(found: Simulation) -> dict[str, Any]:
    """What a simulation says, in plain numbers: seconds, shares, FLOP/s."""
    scenario, slow = found.scenario, found.slowest_class
    low, high = found.band
    return {
        "network": scenario.name,
        "machine": scenario.machine.name,
        "devices": scenario.devices,
        "mesh": dict(scenario.arrangement.sizes),
        "samples": scenario.samples,
        "local": scenario.local,
        "levers": vars(scenario.levers),
        "step_s": found.seconds,
        "step_band_s": [low, high],
        "efficiency": found.efficiency,
        "efficiency_band": list(found.efficiency_band),
        "base_devices": found.base.scenario.devices if found.base else scenario.devices,
        "samples_per_s": found.rate * scenario.devices,
        "samples_per_s_per_device": found.rate,
        "compute_s": slow.timeline.compute,
        "exposed_s": found.exposed,
        "communication_s": dict(slow.timeline.communication),
        "input_s": found.input_seconds,
        "sustained_flops": found.sustained_flops,
        "peak_flops": found.peak_flops,
        "gradient_sums": found.gradient_messages,
        "algorithm": found.algorithm,
        "memory_bytes": slow.recorded.memory,
        "classes": [
            {"name": each.name, "rank": each.rank, "ranks": each.count, "step_s": each.timeline.seconds}
            for each in found.classes
        ],
        "assumed": [path for path, _ in scenario.machine.assumed(simulated=True)],
    }


def all_as_json(
    found: Simulation,
    points: Sequence[Simulation] | None,
    stages: Sequence[Stage] | None,
    improvements: Sequence[Improvement] | None,
    run: LongRun,
    staged: StagingTime | None,
) -> dict[str, Any]:
    """A simulation, and what else was asked for."""
    report = as_json(found)
    if points is not None:
        report["sweep"] = [as_json(each) for each in points]
    if stages is not None:
        report["waterfall"] = [{"lever": each.name, **as_json(each.found)} for each in stages]
    if improvements is not None:
        report["reach"] = [vars(each) for each in improvements]
    return {**report, "long_run": vars(run), "staging": staged and vars(staged)}


def show_step(target: str, found: Simulation, run: LongRun, staged: StagingTime | None) -> None:
    """One step of the whole run."""
    scenario = found.scenario
    base = found.base.scenario.devices if found.base else scenario.devices
    low, high = found.efficiency_band
    waits = ", ".join(f"{cause} {time_text(seconds)}" for cause, seconds in found.exposed.items()) or "nothing"
    facts = {
        "mesh": str(scenario.arrangement),
        "samples of a step": f"{scenario.samples:,}",
        "step": f"{time_text(found.seconds)}, nine of ten {range_text(*found.band)}",
        "computing": time_text(found.slowest_class.timeline.compute),
        "exposed": waits,
        "efficiency": f"{found.efficiency:.3f} of {base:,} device{'s' if base > 1 else ''} ({low:.3f} to {high:.3f})",
        "rate": f"{number_text(found.rate * scenario.devices)} samples/s, {number_text(found.rate)} a device",
        "sustained": flops_text(found.sustained_flops),
        "peak": flops_text(found.peak_flops),
        "gradients": f"{found.gradient_messages} sums, the largest by {found.algorithm}",
        "memory of a device": size_text(found.slowest_class.recorded.memory),
        "long run": f"{run.useful:.1%} useful: a failure every {number_text(run.mtbf_s / 3600)} h, a checkpoint of "
        f"{time_text(run.checkpoint_s)} every {number_text(run.interval_s / 60)} min",
    }
    if staged is not None:
        facts["staging"] = (
            f"{number_text(staged.shared_s / 60)} min if each byte is read once, "
            f"{number_text(staged.naive_s / 60)} min if every node reads its own; "
            f"{size_text(int(staged.bytes_per_node))} a node"
        )
    stdout().print(fact_table(f"{target} on {scenario.devices:,} devices of {scenario.machine.name}", facts))
    if len(found.classes) > 1:
        rows = [(each.name, f"{each.count:,}", time_text(each.timeline.seconds)) for each in found.classes]
        stdout().print(number_table("Classes of ranks", ("where", "ranks", "step"), rows))
    room = scenario.machine.device.memory_gb.value * 1e9
    if found.slowest_class.recorded.memory > room:
        say(stdout(), f"It does not fit: a device has {size_text(int(room))}. See `halocline plan`.")
    say_assumed(scenario.machine.assumed(simulated=True))


def show_sweep(points: Sequence[Simulation], strong: bool) -> None:
    """A row a size."""
    rows = [
        (
            f"{each.scenario.devices:,}",
            f"{each.scenario.samples:,}",
            time_text(each.seconds),
            range_text(*each.band),
            f"{each.efficiency:.3f}",
            max(each.exposed, key=lambda cause: each.exposed[cause], default="-"),
            flops_text(each.sustained_flops),
        )
        for each in points
    ]
    headings = ("devices", "samples", "step", "nine of ten", "efficiency", "largest wait", "sustained")
    stdout().print(number_table("Strong scaling" if strong else "Weak scaling", headings, rows))


def show_waterfall(stages: Sequence[Stage]) -> None:
    """A row a lever, each on top of those before."""
    rows, before = [], None
    for each in stages:
        gain = "" if before is None else f"{each.found.efficiency - before:+.3f}"
        before = each.found.efficiency
        rows.append((each.name, time_text(each.found.seconds), f"{before:.3f}", gain))
    stdout().print(number_table("One lever after another", ("lever", "step", "efficiency", "gain"), rows))


def show_improvements(reach: float, found: Simulation, improvements: Sequence[Improvement]) -> None:
    """What would have to improve, each by itself."""
    if found.efficiency >= reach:
        say(stdout(), f"The efficiency is {found.efficiency:.3f} already.")
        return
    rows = [
        (each.what, "out of reach" if each.factor is None else f"{each.factor:.3g}", f"{each.best:.3f}")
        for each in improvements
    ]
    stdout().print(number_table(f"For an efficiency of {reach:g}, one of", ("change", "factor", "at its limit"), rows))


def show_validation(result: Mapping[str, Any]) -> None:
    """A row a published figure."""
    rows = [
        (
            case["case"],
            f"{case['published']:g}",
            number_text(case["simulated"]),
            f"{case['error']:+.1%}",
            "within" if case["within"] else "MISSED",
        )
        for case in result["cases"]
    ]
    stdout().print(number_table("Published and simulated", ("run", "published", "simulated", "error", ""), rows))
    same = result["trivial"]
    say(
        stdout(),
        f"{result['rows_within']} of {result['rows']} within their tolerance; the worst error is {result['worst']:.1%} "
        f"({result['worst_case']}). Always answering {same['answer']:g} is within for {same['rows_within']} of "
        f"{same['rows']} efficiencies, with a mean error of {same['mean_error']:.3f}; the simulator's is "
        f"{same['simulator_mean_error']:.3f}.",
    )
    changed = [
        (
            each["change"],
            f"{each['efficiency']:.3f}",
            f"{-each['loss']:+.3f}",
            f"{each['cause']} {time_text(each['cause_s'])}",
        )
        for each in result["ablations"]
    ]
    headings = ("27,600 of Summit with", "efficiency", "change", "by more")
    stdout().print(number_table("What each change costs", headings, changed))
