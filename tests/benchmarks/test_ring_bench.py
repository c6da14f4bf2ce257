"""``bench collectives``: what is made of times, what is said, and that every way gives the sum. No time is judged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import cluster, collectives, collectives_ranks
from benchmarks.collectives import PARTS, TARGETS, CollectiveCase, CollectivesPlan, judged, summary
from benchmarks.machine import describe
from halocline.cli.app import app
from halocline.errors import HaloclineError
from halocline.testing import shared_pool

WAYS = ["gloo", "levels", "leaders:1", "doubling", "auto", "torch reduce-scatter", "reduce-scatter", "world"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "collectives", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def found(levels_s: float) -> dict[str, Any]:
    cases = [
        CollectiveCase("block", 8, 1 << 24, way, [s, 2 * s, s / 2]) for way, s in (("gloo", 0.25), ("levels", levels_s))
    ]
    return {**summary(cases), "nodes": 4, "rounds": 3, "quick": True, "machine": describe(0.0)}


def test_speed_ups_are_over_gloo_and_targets_are_judged() -> None:
    result = found(0.2)
    assert [case["speedup"] for case in result["cases"]] == pytest.approx([1.0, 1.25])
    assert result["targets"] == [{"name": "block, 16 MB", "speedup": 1.25, "least": 1.08, "met": True}]
    assert not found(0.24)["targets"][0]["met"]
    assert judged(TARGETS[-1], result["cases"]) is None


@pytest.mark.parametrize(("seconds", "status"), [(0.2, 0), (0.24, 1)])
def test_a_missed_target_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, seconds: float, status: int) -> None:
    monkeypatch.setattr(collectives, "measure_collectives", lambda plan, say: found(seconds))
    code, out, _ = run()
    assert code == status and "levels" in out and ("missed" in out) == (status == 1)
    code, out, _ = run("--json")
    assert code == status and json.loads(out.splitlines()[-1])["targets"][0]["least"] == 1.08


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "missing", lambda: ["the rights of root"])
    assert run("--parts", "block") == (
        2,
        "",
        "halocline bench collectives: an emulated cluster needs the rights of root\n",
    )
    assert "there is no part 'blocks'" in run("--parts", "blocks")[2]
    CollectivesPlan(parts=("loopback",)).check()
    with pytest.raises(HaloclineError, match="two or more"):
        CollectivesPlan(parts=PARTS, nodes=1).check()


def test_help_teaches() -> None:
    out = run("--help")[1]
    assert all(word in out for word in ("cyclic", "leaders:k", "Exit status", "--quick"))


def every_way() -> list[bool]:
    collectives_ranks.prepare(WAYS)
    good = [collectives_ranks.check(way, 4 * 1000) for way in WAYS]
    good += [len(collectives_ranks.measure("auto", 1 << 10, 2)) == 2, collectives_ranks.stream("world", 1 << 10, 3) > 0]
    good.append(collectives_ranks.chosen(1 << 10) in [*WAYS, "flat"])
    collectives_ranks.drop()
    return good


def test_every_way_gives_the_sum() -> None:
    results = shared_pool(4).run(every_way)
    assert all(all(each) for each in results), results
