"""A simulated step: what it is made of, and that each cause of waiting has its effect and no other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from halocline.errors import HaloclineError
from halocline.plan.api import mean_square
from halocline.plan.collectives import sum_seconds
from halocline.plan.cost import Prices
from halocline.plan.machine import Machine, load_machine
from halocline.plan.recording import Subject
from halocline.plan.replay import replay
from halocline.simulate import Levers, Scenario, ScenarioError, simulate
from halocline.simulate.levers import MESSAGE_US, agreement_seconds
from halocline.simulate.replaying import Rounds, hybrid_seconds, ring_steps
from halocline.simulate.scenario import OPTIMIZER, changed_machine, local_batch
from halocline.simulate.step import Recordings, rank_classes
from halocline.simulate.sweep import strong, usual_sizes, weak
from halocline.simulate.trace import chrome_trace
from halocline.simulate.what_if import to_reach, waterfall

SUMMIT = load_machine("summit")


def network() -> nn.Module:
    """Gradients of 28 MB, and as much work as hides them on a fast network."""
    layers = [nn.Conv2d(3, 256, 3, padding=1)]
    for _ in range(12):
        layers += [nn.Conv2d(256, 256, 3, padding=1)]
    return nn.Sequential(*layers)


SUBJECT = Subject(network, mean_square, ((1, 3, 128, 128),), torch.float32, OPTIMIZER)
SHARED = Recordings()


def scenario(devices: int = 96, machine: Machine = SUMMIT, **more: object) -> Scenario:
    return Scenario("network", SUBJECT, machine, devices, **{"input_bytes": 0, **more})  # type: ignore[arg-type]


simulated = partial(simulate, recordings=SHARED)
EQUAL = changed_machine(SUMMIT, spread=1e-3 / 0.015 + 1e-9)  # hardly any stragglers


def test_a_step_is_the_planners_replay_and_what_a_cluster_adds() -> None:
    found = simulated(scenario())
    slow = found.slowest_class
    prices = Prices(SUMMIT.device).on(SUMMIT, 96)
    planned = replay(slow.recorded.record.events, slow.rank, SUMMIT, prices)
    assert slow.timeline.compute == planned.compute
    begun = found.gradient_messages * MESSAGE_US.value * 1e-6
    assert planned.seconds <= found.quiet_seconds <= planned.seconds + begun + 1e-9
    parts = slow.timeline.compute + sum(found.exposed.values())
    assert parts == pytest.approx(found.seconds)


def test_sums_follow_the_planners_collectives() -> None:
    found = simulated(scenario())
    sums = found.slowest_class.recorded.record.sums
    expected = sum(sum_seconds(SUMMIT, each.bytes, each.ranks) for each in sums)
    assert found.slowest_class.timeline.communication["gradients"] == pytest.approx(expected)


def test_efficiency_is_the_rate_of_a_device_over_that_of_the_base() -> None:
    found = simulated(scenario(), 6)
    assert found.base is not None and found.base.scenario.devices == 6
    assert found.efficiency == pytest.approx(found.base.seconds / found.seconds)
    assert found.efficiency < 1
    low, high = found.efficiency_band
    assert low < found.efficiency < high
    assert simulated(scenario(), 96).efficiency == 1.0


def test_flops_are_those_of_the_layers() -> None:
    found = simulated(scenario())
    one = 2 * 128 * 128 * 9
    forward = one * (3 * 256 + 12 * 256 * 256)
    expected = 3 * forward - one * 3 * 256  # the first layer needs no gradient of its input
    assert found.flops == pytest.approx(expected)
    assert found.sustained_flops == pytest.approx(96 * expected / found.seconds)
    assert found.peak_flops > found.sustained_flops


def test_half_the_bandwidth_and_twice_the_latency_cost_time() -> None:
    quick = simulated(scenario(machine=EQUAL))
    for change in ({"bandwidth": 0.5}, {"latency": 4.0}):
        slower = simulate(scenario(machine=changed_machine(EQUAL, **change), levers=Levers(rings="levels")))
        same = simulate(scenario(machine=EQUAL, levers=Levers(rings="levels")))
        assert slower.seconds > same.seconds
    assert simulate(scenario(machine=changed_machine(EQUAL, bandwidth=0.2))).seconds > quick.seconds


def test_another_card_computes_at_its_own_speed() -> None:
    there = changed_machine(SUMMIT, card="perlmutter")
    assert there.device == load_machine("perlmutter").device and there.links == SUMMIT.links
    assert simulate(scenario(machine=there)).quiet_seconds < simulated(scenario()).quiet_seconds


def test_a_coordinator_costs_by_ranks_and_others_by_their_logarithm() -> None:
    costs = {
        control: [agreement_seconds(control, ranks, SUMMIT) for ranks in (1_000, 8_000)]  # type: ignore[arg-type]
        for control in ("planned", "bits", "tree", "coordinator")
    }
    assert costs["planned"] == [0.0, 0.0]
    assert costs["coordinator"][1] / costs["coordinator"][0] == pytest.approx(8, rel=0.02)
    assert 1 < costs["bits"][1] / costs["bits"][0] < 1.4
    assert 1 < costs["tree"][1] / costs["tree"][0] < 1.6
    assert costs["coordinator"][0] > 999 * MESSAGE_US.value * 1e-6


def test_rounds_of_agreement_follow_each_other() -> None:
    rounds = Rounds(1.0, 0.0)
    assert rounds.granted(0.5) == 1.5
    assert rounds.granted(0.7) == 2.5  # it came when the first round was under way
    assert rounds.granted(1.4) == 2.5  # with the one before
    assert rounds.granted(2.6) == 3.6
    assert Rounds(0.0, 0.002).granted(0.3) == 0.3
    assert Rounds(0.1, 0.5).granted(0.3) == pytest.approx(0.6)  # at the beginning of the next cycle


def test_agreement_is_exposed_under_its_own_name() -> None:
    plain = simulated(scenario(1_200))
    asked = simulated(scenario(1_200).with_levers(control="coordinator"))
    assert "agreement" not in plain.exposed
    longer = asked.quiet_seconds - plain.quiet_seconds
    assert asked.exposed["agreement"] == pytest.approx(longer)
    assert longer > 0.9 * agreement_seconds("coordinator", 1_200, SUMMIT)


def test_without_groups_each_gradient_goes_by_itself() -> None:
    found = simulated(scenario().with_levers(grouping=False))
    assert found.gradient_messages == len(list(network().parameters()))
    assert simulated(scenario()).gradient_messages < found.gradient_messages


def test_sixteen_bits_on_the_wire_halve_the_bytes() -> None:
    whole = sum(each.bytes for each in simulated(scenario()).slowest_class.recorded.record.sums)
    half = sum(each.bytes for each in simulated(scenario().with_levers(wire="fp16")).slowest_class.recorded.record.sums)
    assert half == whole / 2


def test_lag_hides_gradients_that_fit_into_a_step_and_no_more() -> None:
    slow = changed_machine(EQUAL, bandwidth=0.05)
    plain, late = (simulate(scenario(machine=slow).with_levers(lag=lag)) for lag in (False, True))
    busy = late.slowest_class.timeline.communication["gradients"]
    begun = late.gradient_messages * MESSAGE_US.value * 1e-6
    computing = late.slowest_class.timeline.compute + begun
    assert late.quiet_seconds == pytest.approx(max(busy, computing), rel=0.02)
    assert late.quiet_seconds < plain.quiet_seconds


def test_steps_of_rings() -> None:
    assert [ring_steps(factors) for factors in ((256,), (4, 64), (4, 8, 8))] == [510, 132, 34]


def test_a_hybrid_sum_is_a_ring_inside_nodes_and_nccl_between() -> None:
    ranks = tuple(range(96))
    size = 1 << 24
    inside = 2 * 5 * (10e-6 + size / 6 / 50e9)  # the slowest link of a node in latency and rate
    between = sum_seconds(SUMMIT, size, [6 * node for node in range(16)])
    assert hybrid_seconds(SUMMIT, size, ranks) == pytest.approx(inside + between, rel=0.05)


def test_classes_of_ranks_by_where_their_tile_lies() -> None:
    even, uneven = (
        Subject(lambda: nn.Conv3d(1, 1, 3, padding=1), mean_square, ((1, 1, 8, size, 8),)) for size in (8, 10)
    )
    cut = Scenario("volume", even, SUMMIT, 24, cut={"height": 4}, input_bytes=0)
    names = {name: count for name, _, count in rank_classes(cut)}
    assert names == {"height inner": 12, "height first": 6, "height last": 6}
    sizes = {name: count for name, _, count in rank_classes(replace(cut, subject=uneven))}
    assert sizes == {"height inner of 3": 6, "height first of 3": 6, "height inner of 2": 6, "height last of 2": 6}
    found = simulate(cut)
    sends = {each.name: len(each.recorded.record.exchanges[0].sends) for each in found.classes}
    assert sends == {"height inner": 2, "height first": 1, "height last": 1}


def test_a_trace_has_a_row_for_each_class_and_stream() -> None:
    found = simulate(scenario(12).with_levers(control="bits"), trace=True)
    events = json.loads(chrome_trace(found))["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"compute", "gradients", "waiting"} <= rows
    spans = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    total = sum(event["dur"] for event in spans) * 1e-6
    assert total == pytest.approx(found.slowest_class.timeline.compute, rel=1e-3)
    ends = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert ends * 1e-6 == pytest.approx(found.seconds, rel=1e-3)


def test_sweeps_keep_what_they_promise() -> None:
    points = weak(scenario(), [1, 6, 24])
    assert [each.scenario.samples for each in points] == [1, 6, 24]
    assert points[0].efficiency == 1.0 > points[-1].efficiency
    fixed = strong(replace(scenario(24), local=1), [6, 7, 24])
    assert [(each.scenario.devices, each.scenario.samples) for each in fixed] == [(6, 24), (24, 24)]
    assert fixed[1].efficiency == pytest.approx(fixed[0].seconds * 6 / (fixed[1].seconds * 24))
    assert usual_sizes(SUMMIT, 100, 1) == [1, 6, 24, 100]
    with pytest.raises(ScenarioError, match="divides a batch of 24"):
        strong(scenario(24), [7])


def test_what_would_reach_an_efficiency() -> None:
    found = {each.what.split(" ")[0]: each for each in to_reach(scenario(96), 0.98)}
    delays = found["delays"]
    assert delays.factor is not None and delays.factor > 1
    better = changed_machine(SUMMIT, spread=1 / delays.factor)
    assert simulate(scenario(96, better)).efficiency >= 0.98
    assert found["latency"].factor is None and found["latency"].best < 0.98


def test_every_lever_of_the_waterfall_is_added_to_those_before() -> None:
    stages = waterfall(scenario(600))
    assert stages[0].found.scenario.levers.control == "coordinator"
    assert stages[-1].found.scenario.levers == Levers(lag=True, wire="fp16", rings="hybrid")
    assert stages[-1].found.efficiency > stages[0].found.efficiency


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: scenario(30_000), "27,648 devices"),
        (lambda: scenario(0), "one device or more"),
        (lambda: scenario(cut={"depth": 2}), "no axis 'depth'"),
        (lambda: scenario(cut={"height": 5}), "do not divide into replicas of 5"),
        (lambda: scenario(cut={"height": 1_000}), "the input has 128"),
        (lambda: scenario(local=0), "one sample or more"),
        (lambda: scenario(levers=Levers(control="rumour")), "no control 'rumour'"),  # type: ignore[arg-type]
        (lambda: local_batch(100, 96), "does not divide over 96 ranks"),
        (lambda: changed_machine(SUMMIT, bandwidth=0), "factor above zero"),
        (lambda: changed_machine(SUMMIT, card="abacus"), "no machine 'abacus'"),
        (lambda: to_reach(scenario(6), 1.2), "between 0 and 1"),
    ],
)
def test_nonsense_is_refused_in_words(make: object, words: str) -> None:
    with pytest.raises(HaloclineError, match=words):
        make()  # type: ignore[operator]


def test_cost_does_not_grow_with_the_number_of_devices() -> None:
    """The record of one class, and as many events, for any number of devices."""
    few, many = (simulated(scenario(devices)) for devices in (1_000, 27_600))
    counts = [len(each.slowest_class.recorded.record.events) for each in (few, many)]
    assert counts[1] <= 1.1 * counts[0]
    assert len(few.classes) == len(many.classes) == 1
    assert math.isfinite(many.seconds) and np.isfinite(many.delays.samples).all()
