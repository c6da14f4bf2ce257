"""What a plan says of itself: ranges, input, the term that lost, the difference of two plans, a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from small_unet import SIDE, SmallUNet, subject
from typer.testing import CliRunner

import halocline as hc
from halocline.arrangement import Arrangement
from halocline.cli.app import app
from halocline.plan.candidate import price, reading_seconds, sample_bytes
from halocline.plan.cost import Prices
from halocline.plan.explain import as_plan, difference, difference_text, lost_by, prediction, terms
from halocline.plan.front import memory_curve, over_devices, pareto
from halocline.plan.machine import Machine, load_machine, quantities
from halocline.plan.ranges import at_end
from halocline.plan.recording import TargetShape
from halocline.plan.search import search
from halocline.train.reporting.plan_picture import draw_plan

CUT = Arrangement({"data": 1, "depth": 2, "height": 1, "width": 1})


def test_assumed_constants_move_to_their_ends() -> None:
    machine = load_machine("perlmutter")
    better, worse = (dict(quantities(at_end(machine, end))) for end in (True, False))
    for path, quantity in quantities(machine):
        ends = better[path].value, worse[path].value
        if quantity.source != "assumed":
            assert ends == (quantity.value, quantity.value)
        elif path.endswith(("_us", "_gflop", "_spread", "restart_s", ".shared")):
            assert ends == (quantity.low, quantity.high), path
        else:
            assert ends == (quantity.high, quantity.low), path


def test_a_prediction_has_the_range_of_what_is_assumed() -> None:
    machine = load_machine("perlmutter")
    candidate = price(subject(), machine, CUT, 1, Prices(machine.device))
    assert candidate.low_seconds < candidate.seconds < candidate.high_seconds
    settled = Machine.model_validate_json(machine.model_dump_json().replace('"assumed"', '"measured"'))
    same = price(subject(), settled, CUT, 1, Prices(settled.device))
    assert same.low_seconds == same.high_seconds == pytest.approx(candidate.timeline.seconds)


# ---- input ----


def test_a_node_reads_what_its_ranks_need() -> None:
    machine = load_machine("perlmutter")  # four devices a node, 2 GB/s
    target = TargetShape((1, SIDE, SIDE, SIDE), "NDHW", torch.int64)
    assert sample_bytes(subject(targets=(target,))) == SIDE**3 * (4 + 8)
    plain, cut = Arrangement({"data": 8, "depth": 1}), Arrangement({"data": 2, "depth": 4})
    assert reading_seconds(subject(), machine, plain, 1, 10**9) == pytest.approx(4 / 2)
    assert reading_seconds(subject(), machine, cut, 1, 10**9) == pytest.approx(1 / 2)
    assert reading_seconds(subject(), machine, cut, 3, 10**9) == pytest.approx(3 / 2)


def test_a_step_that_waits_for_its_samples_is_input_bound() -> None:
    machine = load_machine("perlmutter")
    candidate = price(subject(), machine, CUT, 1, Prices(machine.device), input_bytes=10**12)
    assert candidate.binds == "input" and candidate.seconds == candidate.input_seconds == pytest.approx(500)
    assert terms(prediction(candidate), 1)["waiting for input"] == pytest.approx(500, rel=1e-3)
    free = price(subject(), machine, CUT, 1, Prices(machine.device), input_bytes=0)
    assert free.binds != "input" and free.seconds == free.timeline.seconds


# ---- why not, and the difference of two plans ----


def test_the_second_best_names_the_term_that_lost() -> None:
    machine = load_machine("summit")
    best, second, *_ = search(subject(), machine, 8, 1)
    ours, theirs = (terms(prediction(each), each.samples) for each in (best, second))
    lost = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
    assert theirs[lost] > ours[lost] and f"most of it by {lost} (+" in lost_by(best, second)
    assert sum(ours.values()) == pytest.approx(best.seconds_per_sample)


def slow_links(machine: Machine) -> Machine:
    slow = {"gb_per_s": machine.links[0].gb_per_s.model_copy(update={"value": 1e-3})}
    return machine.model_copy(update={"links": tuple(link.model_copy(update=slow) for link in machine.links)})


def test_links_are_named_where_they_cost_most() -> None:
    machine = slow_links(load_machine("summit"))
    plain = Arrangement({"data": 2, "depth": 1, "height": 1, "width": 1})
    alone, cut = (price(subject(), machine, each, 2, Prices(machine.device)) for each in (plain, CUT))
    assert "most of it by waiting for halo" in lost_by(alone, cut)


def test_two_plans_differ_term_by_term() -> None:
    machine = load_machine("summit")
    candidates = [
        price(subject(), machine, replace(CUT, gather=gather), 1, Prices(machine.device)) for gather in ((), ("norm",))
    ]
    first, second = (as_plan("net", subject(), machine, each, []) for each in candidates)
    rows = {each.term: each for each in difference(first, second)}
    times = [each.second - each.first for name, each in rows.items() if name == "compute" or name.startswith("waiting")]
    whole = rows["seconds a sample"]
    assert sum(times) == pytest.approx(whole.second - whole.first)
    assert rows["bytes of a device"].first == first.predicted.memory_bytes
    assert f"{first} takes" in difference_text(first, second) and "most by" in difference_text(first, second)
    assert "the same time" in difference_text(first, first)


# ---- the picture ----


def test_the_front_holds_what_nothing_beats() -> None:
    assert pareto([(1, 9), (2, 5), (3, 6), (4, 5), (5, 1)]) == [(1, 9), (2, 5), (5, 1)]


def test_a_picture_shows_candidates_devices_and_memory() -> None:
    machine = load_machine("summit")
    candidates = search(subject(), machine, 4, 4)
    points = over_devices(subject(), machine, candidates[0], Prices(machine.device), 4)
    assert {each.devices for each in points} >= {1, 2, 4, 8}
    curve = memory_curve(subject(), candidates[0])
    assert max(curve) <= candidates[0].recorded.memory and len(curve) > 20
    drawn = ElementTree.fromstring(draw_plan("a net", machine, candidates[0], candidates, points, curve))
    told = " ".join(text for text in drawn.itertext())
    assert "Memory of a rank over a step" in told and "devices" in told and "var(" not in told


def test_points_of_a_picture_wait_for_input_too() -> None:
    """Reading does not scale with computation: it follows from the storage alone."""
    machine = load_machine("summit")
    best = price(subject(), machine, CUT, 1, Prices(machine.device), input_bytes=10**12)
    points = over_devices(subject(), machine, best, Prices(machine.device), 1, 10**12)
    own = next(each for each in points if each.arrangement == str(CUT))
    assert own.seconds == pytest.approx(best.seconds_per_sample) == pytest.approx(best.input_seconds)
    free = over_devices(subject(), machine, best, Prices(machine.device), 1, 0)
    assert next(e.seconds for e in free if e.arrangement == str(CUT)) == pytest.approx(best.timeline.seconds)


def run(*arguments: str, columns: int = 80) -> str:
    words = ["plan", "unet3d", "--shape", "1,1,16,16,16", "--gpus", "2", "--machine", "perlmutter", *arguments]
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.long
def test_the_command_compares_and_draws_in_80_columns(tmp_path: Path) -> None:
    run("--out", str(tmp_path / "first.json"), "--batch", "1")
    shown = run("--compare", str(tmp_path / "first.json"), "--picture", str(tmp_path / "plan.svg"), "--batch", "2")
    assert all(len(line) <= 80 for line in shown.splitlines() if "\u2500" in line or (" ms " in line and "=" in line))
    assert "Difference" in shown and "waiting for halo" in shown and "a sample" in shown
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")


@pytest.mark.long
def test_input_bytes_and_ranges_are_in_the_json() -> None:
    told = json.loads(run("--input-bytes", "1000000000000", "--json", columns=200).splitlines()[-1])
    assert told["predicted"]["binds"] == "input" and told["predicted"]["seconds"] == told["predicted"]["input"]
    plan = hc.plan(SmallUNet, (1, 1, SIDE, SIDE, SIDE), machine="perlmutter", devices=2, input_bytes=0)
    assert plan.predicted.low_seconds < plan.predicted.seconds < plan.predicted.high_seconds
