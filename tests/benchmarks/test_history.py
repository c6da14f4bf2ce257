"""`halocline bench history`: lines from results, the run to compare with, figures that got worse, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.commands.app import bench
from benchmarks.commands.gradients import AIMS
from benchmarks.history import HISTORY, at_least, compare_runs, make_run, parse_result, read_history, worsened
from halocline.cli.app import app
from halocline.errors import HaloclineError

MACHINE = {"cores": 2, "torch": "2.13.0+cpu", "others_share": 0.0, "disturbed": False}
RESULT: dict[str, Any] = {
    "halo_over_raw": 1.5,
    "speedup": 2.0,
    "rounds": 30,
    "quick": True,
    "rate": "1gbit",
    "missing": None,
    "cases": [{"case": 1.0}],
    "targets": {"halo_over_raw": 2, "speedup": 1.8, "missing": 1.0},
    "machine": MACHINE,
}


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bench", "history", *arguments], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def written(folder: Path, **changes: Any) -> str:
    path = folder / "result.json"
    path.write_text("progress\n" + json.dumps({**RESULT, **changes}) + "\n")
    return str(path)


def added(folder: Path, date: str = "2026-11-18", **changes: Any) -> list[str]:
    file = ["--file", str(folder / "history.jsonl")]
    facts = [
        "--name",
        "overhead",
        "--command",
        "halocline bench overhead --json",
        "--date",
        date,
        "--commit",
        date[-2:],
    ]
    status, _, error = run("add", written(folder, **changes), *facts, *file)
    assert status == 0, error
    return file


def test_a_line_has_the_scalar_figures_and_their_targets(tmp_path: Path) -> None:
    file = added(tmp_path)
    assert json.loads((tmp_path / "history.jsonl").read_text()) == {
        "date": "2026-11-18",
        "commit": "18",
        "bench": "overhead",
        "machine": {"cores": 2, "torch": "2.13.0+cpu", "device": "cpu"},
        "command": "halocline bench overhead --json",
        "figures": {"halo_over_raw": 1.5, "speedup": 2.0, "rounds": 30},
        "targets": {"halo_over_raw": 2, "speedup": 1.8},
    }
    _, overview, _ = run("show", *file)
    assert "2 of 2" in overview and max(map(len, overview.splitlines())) <= 80


def test_the_commit_is_that_of_the_checkout_and_stdin_is_read(tmp_path: Path) -> None:
    options = ("--name", "overhead", "--command", "x", "--file", str(tmp_path / "new.jsonl"), "--json")
    status, out, error = run("add", "-", *options, stdin=json.dumps(RESULT))
    assert status == 0, error
    assert len(json.loads(out.splitlines()[-1])["commit"]) >= 7


def test_compare_takes_the_newest_run_of_the_same_kind_of_machine(tmp_path: Path) -> None:
    added(tmp_path, "2026-11-18", halo_over_raw=1.0)
    added(tmp_path, "2026-11-16", halo_over_raw=5.0)  # added later, measured earlier
    file = added(tmp_path, "2026-11-19", halo_over_raw=9.0, machine={**MACHINE, "cores": 16})
    status, out, _ = run("compare", "overhead", written(tmp_path, halo_over_raw=2.5), *file, "--json")
    found = json.loads(out.splitlines()[-1])
    expected = {"figure": "halo_over_raw", "before": 1.0, "now": 2.5, "ratio": 2.5, "target": 2, "met": False}
    assert status == 0 and found["same_machine"] and found["figures"][0] == expected


def test_another_kind_of_machine_is_named_and_never_judged(tmp_path: Path) -> None:
    file, other = added(tmp_path), written(tmp_path, machine={**MACHINE, "torch": "2.14.0"})
    status, out, _ = run("compare", "overhead", other, *file)
    assert status == 0 and "another kind of machine: before 2 cores, torch 2.13.0+cpu, cpu, now" in out
    status, _, error = run("compare", "overhead", other, *file, "--fail-above", "1.2")
    assert status == 2 and "2 cores, torch 2.14.0" in error


@pytest.mark.parametrize(
    ("changes", "worse"),
    [
        ({"halo_over_raw": 1.79, "speedup": 1.67, "rounds": 90}, []),
        ({"halo_over_raw": 1.81}, ["halo_over_raw"]),
        ({"speedup": 1.66}, ["speedup"]),
        ({"halo_over_raw": 0.1, "speedup": 20.0}, []),
        ({"halo_over_raw": None}, ["halo_over_raw"]),
    ],
)
def test_fail_above_judges_figures_with_targets(tmp_path: Path, changes: dict[str, Any], worse: list[str]) -> None:
    file, now = added(tmp_path), written(tmp_path, **changes)
    status, out, _ = run("compare", "overhead", now, *file, "--fail-above", "1.2", "--json")
    assert (status, json.loads(out.splitlines()[-1])["worse"]) == (int(bool(worse)), worse)
    assert run("compare", "overhead", now, *file)[0] == 0


def test_zero_and_negative_figures_are_judged_without_a_ratio() -> None:
    def judged(before: float, now: float) -> list[str]:
        pair = [make_run({"a": each, "targets": {"a": 1}}, "x", "", "", "") for each in (before, now)]
        return worsened(compare_runs(*pair), 1.2)

    assert judged(0, 0.1) == ["a"] and judged(0, 0) == [] and judged(-1.0, -1.1) == [] and judged(-1.0, 0.0) == ["a"]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    file, result = added(tmp_path), written(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for arguments, words in (
        (("compare", "overhed", result, *file), "did you mean overhead?"),
        (("add", result, "--name", "overhed", "--command", "x", *file), "did you mean overhead?"),
        (("compare", "halo", result, *file), "the history has no run of 'halo'"),
        (("show", "overhed", *file), "did you mean overhead?"),
        (("compare", "overhead", str(tmp_path / "none.json"), *file), "No such file"),
        (("compare", "overhead", "-", *file), "stdin: the last line is not JSON"),
        (("show", "--file", str(tmp_path / "bad.jsonl")), "bad.jsonl, line 1"),
    ):
        status, _, error = run(*arguments)
        assert status == 2 and words in error and len(error.splitlines()) == 1, error
    for text, words in (("[1]", "no figure"), ('{"a": NaN}', "no figure"), ('{"cases": []}', "no figure")):
        with pytest.raises(HaloclineError, match=words):
            parse_result(text, "text")
    strange = written(tmp_path, halo_over_raw=None, speedup=None, rounds=None, width=1)
    assert "nothing to compare" in run("compare", "overhead", strange, *file)[2]
    disturbed = written(tmp_path, machine={**MACHINE, "disturbed": True})
    assert "quiet machine" in run("add", disturbed, "--name", "overhead", "--command", "x", *file)[2]


def test_sides_of_targets_are_those_of_the_gradients_bench() -> None:
    assert {name: at_least(name) for name in AIMS} == {name: side == "at least" for name, (_, side) in AIMS.items()}


def test_the_history_of_the_repository_is_readable_in_80_columns() -> None:
    names = {each.name for each in bench.registered_commands}
    runs = read_history(HISTORY)
    assert runs and all(each.bench in names and each.bench in each.command for each in runs)
    for arguments in ((), *((each.bench,) for each in runs)):
        status, out, _ = run("show", *arguments)
        table = [line for line in out.splitlines() if not line.startswith("newest run")]
        assert status == 0 and max(map(len, table)) <= 80 and "…" not in out
