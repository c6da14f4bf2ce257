"""The page of a run: what it tells, what it leaves out and why, and that a browser is content with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from halocline.cli.report import report
from halocline.train.reporting.charts import ChartScale, log_ticks, smoothed, thinned, value_scale
from halocline.train.reporting.images import limits, overlaid, png, ramped
from halocline.train.reporting.mesh import mesh_figures
from halocline.train.reporting.report import NoRun, write_report
from halocline.train.reporting.run import read_run
from halocline.train.reporting.sections import median_split
from halocline.train.reporting.svg import short

ALL = ["loss", "validation", "examples", "time", "memory", "mesh", "settings"]
ALONE = {"meta", "img", "br"}  # that have no end
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ODD: list[dict[str, Any]] = [  # as a damaged log may tell
    {"kind": "step", "step": 0, "loss": "x", "seconds": float("inf"), "halo": 1e300, "lr": -1e300},
    {"kind": "step", "step": "x"},
    {"kind": "rank", "rank": 0, "tile": 3, "coordinates": None, "memory": float("nan")},
    {"kind": "choices", "values": {"at": {"head": 3}}},
]
app = typer.Typer()
app.command()(report)


class Page(HTMLParser):
    """Every element that is opened must be closed, in order; text and attributes are kept."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "

    def sections(self) -> list[str | None]:
        return [attrs.get("id") for tag, attrs in self.tags if tag == "section"]


def step(number: int, **changed: Any) -> dict[str, Any]:
    told = {"step": number, "loss": 2.0 / (number + 1), "lr": 1e-3, "seconds": 0.5, "data": 0.0625, "halo": 0.125}
    return {"kind": "step", **told, "gradients": 0.03125, "samples_per_second": 8.0, **changed}


def rank(number: int, shape: dict[str, int], tile: dict[str, list[int]], **coordinates: int) -> dict[str, Any]:
    whole = {letter: [0, size] for letter, size in shape.items()}
    where = {"coordinates": coordinates, "tile": {**whole, **tile}, "shape": list(shape.values())}
    return {"kind": "rank", "rank": number, "memory": (number + 1) * 2.0**30, **where}


def halves(shape: dict[str, int]) -> list[dict[str, Any]]:
    cut = 5
    return [
        rank(0, shape, {"H": [0, cut]}, height=0),
        rank(1, shape, {"H": [cut, shape["H"]]}, height=1),
    ]


def make_run(folder: Path, entries: list[dict[str, Any]], config: str = 'workload = "unet3d"\nsteps = 8\n') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(config)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def finish(folder: Path, examples: dict[str, Any], **result: Any) -> Path:
    told = {"run": "x", "steps": 8, "metrics": {"loss": 0.3, "mean_iou": 0.8125}, "stopped": False, "seconds": 75.0}
    (folder / "result.json").write_text(json.dumps({**told, **result}))
    np.savez_compressed(folder / "examples.npz", **examples)
    return folder


def slices() -> dict[str, Any]:
    truth = np.zeros((2, 12, 16))
    truth[:, 3:8, 4:9] = 1
    answer = np.roll(truth, 1, axis=1)
    return {"x": np.random.default_rng(0).normal(size=(2, 1, 12, 16)), "y": truth, "p": answer}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    entries = [step(number) for number in range(8)]
    for number in (4, 8):
        entries.append({"kind": "validation", "step": number, "loss": 0.5, "mean_iou": 0.1 * number})
    entries += halves({"C": 1, "D": 8, "H": 12, "W": 16})
    return finish(make_run(tmp_path / "unet3d-1", entries), slices())


def page_of(run: Path) -> Page:
    return Page(write_report(run).path)


def test_a_whole_run_has_every_part(run: Path) -> None:
    written = write_report(run)
    page = Page(written.path)
    assert written.sections == ALL == page.sections()
    assert written.bytes == len(written.path.read_bytes())
    assert "Not shown" not in page.text and "Written by" in page.text


def test_numbers_shown_are_those_of_the_log(run: Path) -> None:
    page = page_of(run)
    for number in range(8):
        assert f"step {number}: loss {short(2.0 / (number + 1))}" in page.text
    assert "step 8: validation loss 0.5" in page.text and "mean iou: 0.8" in page.text
    assert "0.8125" in page.text and "1 min 15 s" in page.text
    assert "rank 1: 2" in page.text and "Least 1, most 2 GiB" in page.text


def test_the_median_step_is_the_sum_of_its_parts(run: Path) -> None:
    parts = median_split(read_run(run))
    assert parts == {"compute": 0.28125, "halo": 0.125, "gradients": 0.03125, "data": 0.0625}
    text = page_of(run).text
    assert "The median step: 500 ms" in text and "281 ms" in text and "25.0 %" in text


def test_the_page_holds_all_it_needs(run: Path) -> None:
    page = page_of(run)
    assert "http://" not in page.source and "https://" not in page.source and "@import" not in page.source
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object", "base")]
    sources = [attrs["src"] or "" for _, attrs in page.tags if "src" in attrs]
    assert len(sources) == 8 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "default-src 'none'" in page.source
    assert "url(" not in page.source


def test_dark_screens_narrow_ones_and_paper_have_rules(run: Path) -> None:
    source = page_of(run).source
    assert "@media (prefers-color-scheme:dark)" in source and "@media print" in source and "max-width:40rem" in source
    style = source[source.index("<style>") : source.index("</style>")]
    used, defined = set(re.findall(r"var\((--\w+)\)", style)), set(re.findall(r"(--\w+):", style))
    assert used <= defined


def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    first = write_report(run).path.read_bytes()
    second = write_report(run, tmp_path / "elsewhere" / "page.html")
    assert second.path == tmp_path / "elsewhere" / "page.html" and second.path.read_bytes() == first


def test_whatever_the_settings_say_is_escaped(tmp_path: Path) -> None:
    words = "<script>alert('x')</script>"
    config = f'model = "{words}"\nloss = "</pre><img src=x onerror=alert(1)>"\n'
    entries = [step(0), {"kind": "validation", "step": 1, "<b>iou": 0.5}]
    page = page_of(make_run(tmp_path / "a & b", entries, config))
    assert words in page.text and "</pre><img src=x onerror=alert(1)>" in page.text  # as words
    assert not [tag for tag, attrs in page.tags if tag == "script" or "onerror" in attrs or attrs.get("src") == "x"]


def test_an_interrupted_run_says_what_is_missing(tmp_path: Path) -> None:
    written = write_report(make_run(tmp_path / "run", [step(number) for number in range(3)]))
    page = Page(written.path)
    assert written.sections == ["loss", "time", "settings"]
    assert page.sections() == [*written.sections, "missing"]
    for words in (
        "not finished",
        "the run ended before it",
        "there is no examples.npz",
        "3 of 8",
        "and this one is not",
    ):
        assert words in page.text


def test_a_run_without_validation_samples_says_so(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", [step(0)], "[data]\nvalidation = 0\n"))
    assert "data.validation = 0" in page.text


@pytest.mark.parametrize("entries", [[], [step(0)], [step(0, loss=float("nan"))], [{"kind": "step", "step": 0}], ODD])
def test_a_run_of_few_or_odd_steps_has_a_page(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    written = write_report(make_run(tmp_path / "run", entries))
    assert Page(written.path) and "nan," not in written.path.read_text()


def test_losses_that_are_not_finite_are_told(tmp_path: Path) -> None:
    bad = {3: float("nan"), 7: float("inf")}
    page = page_of(make_run(tmp_path / "run", [step(n, **({"loss": bad[n]} if n in bad else {})) for n in range(40)]))
    assert "2 of 40 steps have a loss that is not finite: 3, 7" in page.text
    assert sum(attrs.get("class") == "cross" for _, attrs in page.tags) == 2


def test_thousands_of_steps_make_no_large_page(tmp_path: Path) -> None:
    spike = {"loss": 777.0}
    entries = [step(number, **(spike if number == 4321 else {})) for number in range(20000)]
    written = write_report(make_run(tmp_path / "run", entries))
    assert written.bytes < 300_000
    steps, values = thinned(np.arange(20000.0), read_run(tmp_path / "run").column("loss"))
    assert len(steps) <= 600 and values.max() == 777.0


@pytest.mark.parametrize("broken", ["log.jsonl", "config.toml", "result.json", "examples.npz"])
def test_a_broken_file_costs_its_part_only(run: Path, broken: str) -> None:
    (run / broken).write_bytes(b"\x00\xff{{{ no such thing")
    written = write_report(run)
    assert Page(written.path) and len(written.sections) >= 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match=r"holds neither config\.toml nor log\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(NoRun, match="is no folder"):
        write_report(tmp_path / "absent")


def test_a_trace_beside_the_page_is_told_of(run: Path) -> None:
    assert "trace.json" not in page_of(run).text
    (run / "trace.json").write_text("{}")
    assert "trace.json beside this page" in page_of(run).text


def test_validations_that_tell_a_loss_alone_are_a_table(tmp_path: Path) -> None:
    entries = [step(0), *({"kind": "validation", "step": n, "loss": n / 7} for n in (1, 2))]
    assert "0.2857" in page_of(make_run(tmp_path / "run", entries)).text


# -- answers


def test_numbers_are_drawn_against_the_truth_with_their_correlation(run: Path) -> None:
    truth = np.linspace(0, 1, 30)[:, None].repeat(3, 1)
    np.savez(run / "examples.npz", y=truth, p=truth * [1, -1, 0])
    page = page_of(run)
    assert "number 1: correlation 1.000" in page.text and "number 2: correlation -1.000" in page.text
    assert "number 3: correlation" not in page.text  # of a constant there is none
    assert sum(attrs.get("class") == "point" for _, attrs in page.tags) == 90


def test_classes_of_samples_are_counted(run: Path) -> None:
    np.savez(run / "examples.npz", y=np.array([0, 1, 2, 2]), p=np.eye(3)[[0, 1, 2, 0]])
    text = page_of(run).text
    assert "3 are right" in text and "true 2, predicted 0: 1" in text


def test_wrong_pixels_are_counted_and_unknown_ones_are_not(run: Path) -> None:
    truth = np.zeros((1, 10, 10))
    truth[0, 0], truth[0, 1] = 1, -100
    np.savez(run / "examples.npz", x=truth[:, None], y=truth, p=np.zeros((1, 10, 10)))
    assert "wrong: 11 %" in page_of(run).text  # 10 of 90


def test_real_slices_share_a_colour_scale(run: Path) -> None:
    truth = np.linspace(-1, 3, 96).reshape(1, 1, 8, 12)
    np.savez(run / "examples.npz", x=truth, y=truth, p=truth + 0.5)
    text = page_of(run).text
    assert "difference: rms 0.5" in text and "one colour scale" in text


def test_examples_of_another_kind_are_left_out(run: Path) -> None:
    np.savez(run / "examples.npz", y=np.zeros((2, 3, 4, 5, 6)), p=np.zeros((2, 3, 4, 5, 6)))
    page = page_of(run)
    assert "examples" not in page.sections() and "neither numbers nor slices" in page.text


def test_pictures_are_right_to_the_pixel(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = overlaid(ramped(np.array([[0.0, 1.0], [np.nan, 2.0]]), 0, 2), np.array([[0, 0], [0, 1]]))
    (tmp_path / "a.png").write_bytes(png(picture))
    assert (np.asarray(image.open(tmp_path / "a.png")) == picture).all()
    assert tuple(picture[0, 0]) == (0x44, 0x01, 0x54) == tuple(picture[1, 0])
    assert limits(np.full((2, 2), np.nan)) == (0.0, 1.0)


# -- charts and the mesh


def test_scales_are_logarithmic_where_values_span_decades() -> None:
    assert value_scale(np.array([1e-4, 1.0, np.nan])).log
    assert not value_scale(np.array([0.5, 1.0])).log and not value_scale(np.array([0.0, 1e4])).log
    assert log_ticks(1e-4, 1.0) == [0.0001, 0.001, 0.01, 0.1, 1.0]
    assert ChartScale(0.01, 1, 0, 100, log=True)(0.1) == pytest.approx(50)


def test_smoothing_passes_over_what_is_not_finite() -> None:
    assert smoothed(np.array([1.0, np.nan, 3.0]), 3).tolist() == [1.0, 2.0, 3.0]


def rectangles(figures: list[str]) -> list[tuple[float, float]]:
    found = [
        re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="([\d.]+)" class="face"', each)
        for each in figures
    ]
    return [(float(width), float(height)) for each in found for width, height in each]


def test_uneven_tiles_are_drawn_to_scale() -> None:
    (_, first), (_, second) = rectangles(mesh_figures(halves({"C": 1, "H": 12, "W": 16})))
    assert first / second == pytest.approx(5 / 7, rel=1e-3)


def test_ranks_with_the_same_tile_of_other_samples_are_copies() -> None:
    shape = {"C": 1, "D": 8, "H": 8, "W": 8}
    boxes = [(n, d, h, w) for n in range(2) for d in range(2) for h in range(2) for w in range(2)]
    ranks = [
        rank(
            number,
            shape,
            {letter: [4 * at, 4 * at + 4] for letter, at in zip("DHW", where[1:], strict=True)},
            **dict(zip(("data", "depth", "height", "width"), where, strict=True)),
        )
        for number, where in enumerate(boxes)
    ]
    figures = mesh_figures(ranks)
    assert len(figures) == 2 and "samples of group 1" in figures[1] and "rank 15: " in figures[1]
    assert len(rectangles(figures)) == 16 and figures[0].count("<svg") == 2  # one for each half of the depth


def test_lines_and_single_ranks_are_drawn_too() -> None:
    line = [rank(n, {"C": 1, "W": 9}, {"W": [3 * n, 3 * n + 3]}, width=n) for n in range(3)]
    assert len(rectangles(mesh_figures(line))) == 3
    assert len(rectangles(mesh_figures([rank(0, {"C": 1, "D": 8, "H": 8, "W": 8}, {}, data=0)]))) == 1


def test_of_a_run_that_went_on_with_another_mesh_the_last_counts(run: Path) -> None:
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps(rank(0, {"C": 1, "D": 8, "H": 12, "W": 16}, {}, data=0)) + "\n")
    assert "whole on one rank" in page_of(run).text


def test_the_command_tells_where_the_page_is(run: Path) -> None:
    told = CliRunner().invoke(app, [str(run)])
    assert told.exit_code == 0 and told.stdout.strip() == str(run / "report.html")
    found = json.loads(CliRunner().invoke(app, [str(run), "--json"]).stdout)
    assert found == {"report": str(run / "report.html"), "bytes": (run / "report.html").stat().st_size, "sections": ALL}


def test_the_command_refuses_with_one_line(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, [str(tmp_path)])
    assert told.exit_code == 2 and not told.stdout
    assert told.stderr.startswith("halocline report: ") and len(told.stderr.splitlines()) == 1


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Headless, with what the page says to the console on stderr."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    own = [f"--user-data-dir={page.parent / 'browser'}", "--enable-logging=stderr"]
    return subprocess.run(
        [CHROMIUM or "", *quiet, *own, *options, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_a_complaint(run: Path) -> None:
    """The page forbids itself the network; a browser tells the console of every breach, as the second page shows."""
    path = write_report(run).path
    shown = browse(path, "--dump-dom")
    assert "CONSOLE" not in shown.stderr and "How samples are cut" in shown.stdout
    other = path.with_name("other.html")
    other.write_text(path.read_text().replace("<main>", '<main><img src="http://localhost:1/a.png">'))
    assert "CONSOLE" in browse(other, "--dump-dom").stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_that_likes_it_dark_gets_it_dark(run: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path, means = write_report(run).path, []
    for scheme in (0, 1):  # dark, light
        picture = run / f"{scheme}.png"
        browse(path, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}")
        means.append(np.asarray(image.open(picture).convert("L")).mean())
    assert means[0] < 80 and means[1] > 180


def test_metrics_by_class_are_a_table_and_the_split_is_told(tmp_path: Path) -> None:
    metrics = {"kind": "validation", "step": 1, "dice": 0.7, "dice/tumour": 0.5, "iou/tumour": 0.8}
    page = page_of(make_run(tmp_path / "run", [step(0), {"kind": "data", "text": "the first 7"}, metrics]))
    assert all(words in page.text for words in ("By class, at step 1", "tumour", "the first 7"))
