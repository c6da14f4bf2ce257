"""What the benchmarks make of their measurements, and that every contender computes the same. No timing is judged."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import halocline as hc
from benchmarks import cluster, halo, overhead, overhead_ranks
from benchmarks.halo import HaloCase, LinkDemand
from benchmarks.halo_ranks import StillWorld
from benchmarks.machine import Others, describe
from benchmarks.overhead import Figure
from benchmarks.topology import Topology
from halocline.cli.app import app
from halocline.testing.pool import shared_pool
from halocline.world import as_world

CASE = HaloCase(2, "1gbit", 0.9, 1.0, 1.25, 1.6, 0.4, 10**6, 50, 950.0, 30.0, False, 0.05)
FACTS = describe(0.2)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_what_others_take_is_told_from_what_we_take() -> None:
    others = Others(lambda function: [function()] * 0)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    share = others.share()
    assert share is None or 0 <= share <= 1
    assert [describe(some)["disturbed"] for some in (None, 0.05, 0.5)] == [False, False, True]


# ---- overhead ----


def contenders_on_rank() -> tuple[dict[str, set[str]], dict[str, str]]:
    kept = overhead_ranks.make_subjects()
    return {subject.name: set(subject.forward) for subject in kept.subjects}, kept.notes


@pytest.mark.long
def test_every_contender_gives_the_one_rank_answer_or_is_left_out() -> None:
    first, second = shared_pool(2).run(contenders_on_rank)
    assert first == second
    contenders, notes = first
    assert {"plain", "halocline", "raw isend/irecv", "by hand"} < contenders["halo"]
    for name, who in contenders.items():
        assert ("dtensor" in who) != (name in notes)


def figures() -> dict[tuple[str, str, str], Figure]:
    ours, plain, raw = Figure(30, 31, 25, 40), Figure(10, 11, 9, 12), Figure(5, 6, 4, 7)
    found = {}
    for subject in ("relu", "add", "window", "window function", "halo", "norm"):
        for kind in ("forward", "both"):
            found |= {(subject, kind, "plain"): plain, (subject, kind, "halocline"): ours}
    found["add", "forward", "halocline"] = replace(ours, median=20)
    for subject in ("halo", "norm"):
        found |= {(subject, "forward", "raw slow"): replace(raw, median=8), (subject, "forward", "raw"): raw}
        found[subject, "forward", "by hand"] = replace(raw, median=15)
    return found


def test_what_is_added_follows_from_the_medians() -> None:
    result = overhead.summary(figures(), {"window": "wrong value"}, 3, FACTS)
    assert (result["relu_added_us"], result["add_added_us"], result["pointwise_added_us"]) == (20, 10, 20)
    assert (result["halo_over_raw"], result["halo_over_raw_quiet"], result["halo_over_by_hand"]) == (4, 4, 2)
    assert (result["norm_added_us"], result["norm_added_less_sum_us"]) == (20, 15)
    assert (result["dtensor"]["relu"], result["dtensor"]["window"]) == ("right", "wrong value")
    assert result["details"]["halo"]["forward"]["dtensor"] is None
    assert json.loads(json.dumps(result)) == result


def test_a_figure_takes_rank_0_and_the_slowest() -> None:
    figure = Figure.of([[1e-6, 2e-6, 3e-6], [2e-6, 4e-6, 6e-6]])
    assert (figure.median, figure.slowest_rank, figure.mean) == pytest.approx((2, 4, 2))


def test_the_overhead_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(repeat: int, tick: object) -> dict[str, Any]:
        return overhead.summary(figures(), {"halo": "wrong value"}, repeat, FACTS)

    monkeypatch.setattr(overhead, "measure_overhead", measure)
    code, out, _ = run("overhead")
    assert code == 0
    for words in (
        "plain",
        "halocline",
        "DTensor",
        "raw",
        "nn.Conv3d 3x3x3: wrong value",
        "4.0 (aim: 2)",
        "20% of the cores",
    ):
        assert words in out
    assert json.loads(run("overhead", "--repeat", "7", "--json")[1])["rounds"] == 7


# ---- halo ----


def test_exposed_and_bound() -> None:
    shown = CASE.as_json()
    assert (shown["exposed_share"], shown["bound_s"], shown["over_bound"]) == (0.2, 1.0, 1.25)
    assert shown["exposed_share_without_overlap"] == pytest.approx(0.375)
    assert replace(CASE, step_without_overlap_s=None).as_json()["exposed_share_without_overlap"] is None
    assert LinkDemand(1e6, 1e-3, 500_000, 100).seconds == pytest.approx(0.6)


def test_only_a_wire_that_can_be_hidden_counts() -> None:
    slow = replace(CASE, step_s=2.0, wire_s=0.9)
    assert halo.summary([CASE, slow])["exposed_share"] == 0.2
    assert halo.summary([slow])["exposed_share"] is None


@pytest.mark.parametrize(
    ("nodes", "rate", "size"), [(1, "1gbit", 64), (2, "quick", 64), (2, "1gbit", 60), (4, "1gbit", 24)]
)
def test_cases_that_make_no_sense_are_refused(nodes: int, rate: str, size: int) -> None:
    with pytest.raises(hc.HaloclineError):
        halo.check_sizes([nodes], [rate], size)


def test_in_a_still_world_nothing_comes_and_all_is_computed() -> None:
    torch.manual_seed(0)
    x, kernel = torch.randn(1, 2, 9, 6), torch.randn(3, 2, 3, 3, requires_grad=True)
    with as_world(StillWorld(1, 3)):
        mesh = hc.Mesh(height=3)
        tile = hc.unwrap(F.conv2d(hc.shard(x, mesh, {2: "height"}), kernel.detach(), padding=1))
    lonely = F.conv2d(F.pad(x[:, :, 3:6], (1, 1, 1, 1)), kernel)
    assert torch.allclose(tile, lonely, atol=1e-5)


class Loopback:
    """In place of the cluster: ranks of this machine, and a counter that goes on."""

    def __init__(self, nodes: int, **_: Any) -> None:
        self.topology, self.size, self.rates, self.count = Here(nodes), nodes, [], 0
        self.run = shared_pool(nodes).run

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_rate(self, rate: str) -> None:
        self.rates.append(rate)

    def sent_bytes(self) -> list[list[int]]:
        self.count += 1000
        return [[self.count]] * self.size

    received_bytes = sent_bytes


class Here(Topology):
    def address(self, node: int, rail: int = 0) -> str:
        return "127.0.0.1"


def test_every_way_of_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halo, "Cluster", Loopback)
    said: list[str] = []
    result = halo.measure_halo([2], ["8mbit", "16mbit"], 16, 1, 1, said.append)
    assert [case["rate"] for case in result["cases"]] == ["8mbit", "16mbit"]
    for case in result["cases"]:
        assert case["messages"] > 10
        assert min(case[key] for key in ("plain_s", "compute_s", "step_s", "step_without_overlap_s", "wire_s")) > 0
    assert "2 nodes, 16mbit: round 1 of 1" in said


def test_the_halo_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {**halo.summary([CASE]), "size": 64, "width": 8, "machine": FACTS}
    asked: list[Any] = []
    monkeypatch.setattr(halo, "measure_halo", lambda *arguments: asked.append(arguments) or result)
    code, out, _ = run("halo", "--nodes", "2, 3", "--rates", "1gbit, 2gbit")
    assert (code, asked[0][:5]) == (0, ([2, 3], ["1gbit", "2gbit"], 64, 16, 5))
    assert "20.0% (aim: 10%)" in out
    assert json.loads(run("halo", "--json")[1])["exposed_share"] == 0.2
    assert run("halo", "--nodes", "two")[0] == 2


def test_without_root_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "missing", lambda: ["the rights of root: run it with sudo"])
    code, out, err = run("halo", "--json")
    assert (code, out) == (2, "")
    assert err.strip().splitlines()[-1] == (
        "halocline bench halo: an emulated cluster needs the rights of root: run it with sudo"
    )


@pytest.mark.parametrize("command", ["dry", "overhead", "halo"])
def test_help_teaches(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--json" in out
