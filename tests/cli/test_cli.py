"""The commands as a user meets them: what they print where, and their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_check import KEYS
from typer.testing import CliRunner

from halocline.cli import check as check_command
from halocline.cli import demo as demo_command
from halocline.cli.app import app
from halocline.cli.bench import add_benchmarks
from halocline.cli.output import add_command, new_app, size_text
from halocline.cli.train_rank import run_rank
from halocline.testing.check import NetworkReport, check_network
from halocline.testing.pool import Outcome, RankError, shared_pool
from halocline.train.elastic import RankCount
from halocline.train.settings import Settings

SMALL = ["--shape", "1,2,8,8,8"]


@pytest.fixture(autouse=True)
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ranks that are there already."""
    monkeypatch.setattr(check_command, "check_network", partial(check_network, pool=shared_pool(2)))
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the check find a given thing; what it finds by itself is tested elsewhere."""

    def set_report(verdict: str, **found: Any) -> None:
        report = NetworkReport(
            "net", verdict, 0.0, 0.0, "weight", cut={"depth": 2}, ranks=2, tolerance=1e-8, buffer_error=0.0
        )
        monkeypatch.setattr(check_command, "check_network", lambda target, **_: replace(report, **found))

    return set_report


@pytest.mark.parametrize(("verdict", "status"), [("exact", 0), ("gathered", 0), ("wrong", 1), ("refused", 3)])
def test_each_verdict_has_its_exit_status(canned: Callable[..., None], verdict: str, status: int) -> None:
    canned(verdict)
    code, out, _ = run("check", "net", "--json")
    found = json.loads(out.splitlines()[-1])
    assert (code, found["verdict"]) == (status, verdict)
    assert set(found) > KEYS
    code, out, _ = run("check", "net")
    assert code == status
    assert f"{verdict}: " in out


def test_the_table_has_what_was_measured() -> None:
    code, out, _ = run("check", "cosmoflow", "--args", '{"width": 1}', "--shape", "1,1,12,12,12", "--cut", "height=2")
    assert code == 0
    for fact in (
        "output error",
        "worst gradient error",
        "peak activations",
        "moved",
        "gathered",
        "operations with no rule",
    ):
        assert fact in out
    assert "exact: the cut run gives the answer of one rank" in out


def test_the_table_of_a_refusal_says_why_and_what_to_do(canned: Callable[..., None]) -> None:
    refusal = {"operation": "sort", "place": "head[0]", "why": "it needs all", "remedy": "gather first"}
    canned("refused", refusals=[refusal], without_rule=["sort", "topk"])
    _, out, _ = run("check", "net")
    for text in (*refusal.values(), "sort, topk"):
        assert text in out


def test_a_gradient_of_zero_is_said(canned: Callable[..., None]) -> None:
    canned("exact", gradient_zero=True)
    assert "says little" in run("check", "net")[1]


def test_a_failed_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankError([Outcome(0, "hung"), Outcome(1, "error", error=ValueError("no"), text="Traceback ...")])

    monkeypatch.setattr(check_command, "check_network", fail)
    assert run("check", "net") == (
        2,
        "",
        "halocline check: rank 1 raised ValueError: no (--debug shows the traceback)\n",
    )


BAD = [
    (
        ["unet"],
        "no network 'unet' (did you mean unet3d?); it is unet3d, cosmoflow, mlperf_cosmoflow, tiramisu, deeplab",
    ),
    (["unet3d", "--args", "{width: 8}"], "this is no JSON"),
    (["unet3d", "--args", "[8]"], "a JSON object"),
    (["unet3d", "--shape", "1,1,x"], "a shape is a row of sizes, such as 1,1,32,32,32"),
    (["unet3d", "--shape", "1,1,32"], "takes one input of 5 dims"),
    (["unet3d", "--cut", "depth"], "such as depth=2,height=2"),
    (["unet3d", "--cut", "depth=2,depth=2"], "named twice"),
    (["unet3d", "--cut", "time=2"], "its axes are data, depth, height, width"),
    (["unet3d", "--cut", "D=2"], "(write depth: D is the letter of files)"),
    (["unet3d", "--cut", "depth=2,height=2", "--ranks", "2"], "makes 4 ranks, not 2"),
    (["unet3d", "--dtype", "int8"], "float64 or float32"),
    (["no_such:thing", *SMALL], "cannot find no_such:thing"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_usage_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    code, out, err = run("check", *arguments, "--json")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="no network"):
        run("check", "unet", "--debug")


@pytest.mark.parametrize("command", [[], ["check"], ["demo"]])
def test_help_teaches(command: list[str]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "one rank" in out
    assert "--json" in out
    assert ("halocline check " in out) == (command != ["demo"])
    assert "<bool>" not in out


def on_pooled_ranks(settings: Settings, folder: Path, counts: RankCount, restarts: int) -> dict[str, Any]:
    ranks = counts.most
    return (
        shared_pool(ranks).run(run_rank, settings, folder, deadline=60)[0] if ranks > 1 else run_rank(settings, folder)
    )


def test_the_demo_agrees_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.cli.attempts.on_this_machine", on_pooled_ranks)
    for name, value in {"SIZE": 16, "WIDTH": 2, "SAMPLES": 4, "HELD_OUT": 2}.items():
        monkeypatch.setattr(demo_command, name, value)
    code, out, err = run("demo", "--steps", "2", "--out", str(tmp_path / "new"), "--json")
    assert not code, err
    found = json.loads(out)
    assert (code, found["agree"], found["ranks"], len(found["cut"])) == (0, True, 2, 2)
    assert found["loss_difference"] <= 1e-8
    assert "</html>" in Path(found["report"]).read_text()
    assert "One rank and 2: they agree" in err
    assert err.index("float64, 2 steps") < err.index("loss in float32")  # the proof comes first


def test_bytes_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


NO_EXTRAS = """
import sys
import halocline.testing.check
assert not {"typer", "rich", "click"} & set(sys.modules)
sys.modules["typer"] = None  # as if it were not installed
from halocline.cli import main
main()
"""


def test_without_a_checkout_bench_says_where_to_find_it(tmp_path: Path) -> None:
    installed = new_app()
    add_command(installed, check_command.check)
    add_benchmarks(installed, tmp_path)
    found = CliRunner().invoke(installed, ["bench", "gradients", "--quick"])
    assert found.exit_code == 2 and "part of the repository" in found.output
    assert "gradients" in run("bench", "--help")[1]


@pytest.mark.long
def test_the_library_needs_none_of_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-c", NO_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "halocline: the commands need typer; install them with: pip install 'halocline[cli]'\n"


@pytest.mark.long
def test_commands_load_without_pydantic() -> None:
    """Benchmarks and kernels are run on machines that lack it; only trainings and plans check settings."""
    load = "import halocline.cli.app, sys; assert not {'pydantic', 'annotated_types'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_the_real_command_in_processes_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef net(k=3): return torch.nn.Conv2d(1, 2, k, padding='same')\n")
    call = "from halocline.cli import main; main()"
    arguments = ["check", "mine:net", "--args", '{"k": 5}', "--shape", "1,1,12,9", "--ranks", "2", "--json"]
    done = subprocess.run([sys.executable, "-c", call, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["verdict"], found["cut"], found["arguments"]) == ("exact", {"height": 2}, {"k": 5})
