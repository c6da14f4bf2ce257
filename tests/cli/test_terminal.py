"""Tables at 80 columns, rates of progress, and what differs where the output is no terminal."""

import io
import re

import pytest
from rich.table import Table
from typer.testing import CliRunner

from halocline.cli import output
from halocline.cli.app import app
from halocline.cli.output import RateColumn, fact_table, number_table, progress_bar, rate_text
from halocline.cli.plan_table import say_assumed, time_text
from halocline.cli.train_rank import progress_line, step_facts
from halocline.cli.whole_tables import TableConsole, fits, in_parts


def shown(table, width=80):
    out = io.StringIO()
    TableConsole(file=out, width=width, highlight=False).print(table)
    return out.getvalue()


def wide(columns=14, rows=3):
    names = ["run", *(f"figure {k} in ms" for k in range(columns))]
    cells = [[f"a-long-name-of-run-{r}", *(f"{1234567.891 * (r + 1) * (k + 1):,.3f}" for k in range(columns))]
             for r in range(rows)]  # fmt: skip
    return number_table("Wide", names, cells), cells


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_cell_is_cut(width):
    table, cells = wide()
    text = shown(table, width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for cell in {each for row in cells for each in row}:
        assert cell in text  # on one line, not folded
    assert text.count("Wide") == 1


def test_a_table_that_fits_is_left_alone():
    table = number_table("Small", ["a", "b"], [["x", "1"], ["y", "2"]])
    assert list(in_parts(table, 80)) == [table]


def test_a_table_that_is_split_does_not_fit():
    table, _ = wide()
    assert not fits(table, 80) and fits(table, 400)


def test_constants_are_grouped_by_the_part_of_the_machine(capsys):
    say_assumed([("device.a", 1), ("device.b", 2), ("links.0.c", 3)])
    assert capsys.readouterr().out == "Assumed, not measured: device: a, b; links.0: c.\n"
    assert [time_text(seconds) for seconds in (0, 2e-9, 2e-6)] == ["0 s", "< 1 us", "2 us"]


def test_a_step_without_a_terminal_says_what_each_share_is_of():
    values = {"seconds": 2.0, "data": 0.2, "halo": 0.4, "gradients": 0.3, "loss": 1.0, "samples_per_second": 3.0}
    assert step_facts(values) == "loss 1, 3 samples/s, waits: data 10%, ranks 35%"
    assert progress_line("checkpoint", {"step": 40, "waited": 0.0706}) == "checkpoint at step 40: waited 0.0706 s"


def test_long_words_fold_in_place():
    path = "/somewhere/" + "very-long-folder/" * 9
    text = shown(fact_table("Facts", {"file": path, "other": "short"}))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert path in re.sub(r"[\s│]", "", text)


def test_rows_keep_their_order_and_sections():
    table = Table("name", *("a wide heading" for _ in range(9)))
    for row in range(3):
        table.add_row(f"row {row}", *(f"{row}-{k}-long-value" for k in range(9)), end_section=row == 0)
    parts = list(in_parts(table, 60))
    assert len(parts) > 1 and all(list(part.columns[0].cells) == ["row 0", "row 1", "row 2"] for part in parts)
    assert all(part.rows[0].end_section for part in parts)
    assert sum(len(part.columns) - 1 for part in parts) == 9


def test_rates():
    assert [rate_text(speed) for speed in (None, 0.0, 0.08, 4.23, 123.4, 2512.6)] == [
        "", "", "12.5 s each", "4.2/s", "123/s", "2,513/s",
    ]  # fmt: skip


def test_progress_has_a_rate_and_the_time_left(monkeypatch):
    out = io.StringIO()
    console = TableConsole(file=out, width=80, force_terminal=True, highlight=False)
    monkeypatch.setattr(output, "progress_console", lambda: console)
    with progress_bar() as bar:
        clock = iter(range(100))
        bar.get_time = lambda: float(next(clock))
        task = bar.add_task("samples", total=10)
        for _ in range(4):
            bar.advance(task)
        (column,) = (each for each in bar.columns if isinstance(each, RateColumn))
        assert re.fullmatch(r"[\d.]+(/s| s each)", column.render(bar.tasks[0]).plain)
        assert bar.tasks[0].time_remaining is not None
        bar.refresh()
    assert "samples" in out.getvalue() and "4/10" in out.getvalue()


def test_no_colours_in_a_pipe():
    table = number_table("[bold]Title[/bold]", ["a"], [["[red]x[/red]"]])
    assert "\x1b" not in shown(table)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("trainn", "Did you mean 'train'"),
        ("data inof x", "Did you mean 'info'"),
        ("bench overhed", "Did you mean 'overhead'"),
        ("check unet3d --cutt depth=2", "Possible options: --cut"),
        ("check unet3", "did you mean unet3d?"),
        ("check unet3d --cut dpeth=2", "did you mean depth?"),
        ("check unet3d --dtype flaot64", "did you mean float64?"),
        ("check --zoo mona", "did you mean monai?"),
        ("train unet3d --set optimiser.lr=1", "did you mean optimizer.lr?"),
        ("train unet3d --set optimizer.name=adm", "optimizer.name = 'adm' (did you mean adam?)"),
        ("train unet3d --set precision=fp23", "did you mean fp32?"),
        ("train unet3d --set guard.nan=rase", "did you mean raise?"),
        (
            "train unet3d --set gradients.rings=levles",
            "--set gradients.rings=levles: gradients.rings = 'levles' (did you mean levels?)",
        ),
        ("train unet3d --set metrics=dise", "did you mean dice?"),
        ("train unet3d --set mesh.X=2", "mesh.X is unknown: the key should be 'N'"),
        ("train unet3d --set mesh.depth=2", "mesh.depth is unknown (write mesh.D: depth is D)"),
        ("train unet3d --set optimizr.lr=1", "--set optimizr.lr=1: optimizr is unknown; did you mean optimizer"),
        ("train unet3d --ranks 2 --set mesh.D=3", "mesh: D = 3 are 3 ranks, and there are 2"),
        ("plan unet3d --machine sumit --gpus 2", "did you mean summit?"),
        ("plan unet3d --machine summit --gpus 2 --why-not dpeth=2", "did you mean depth?"),
        ("plan unet3d --machine summit --gpus 2 --why-not D=2", "write depth: D is the letter of files"),
        ("simulate stemdl --wire bf61", "did you mean bf16?"),
        ("simulate stemdl --precision mixd", "did you mean mixed?"),
        ("taskbench --pattern stencil1d", "did you mean stencil_1d?"),
        ("taskbench --runtime wrld", "did you mean world?"),
        ("taskbench --kernel empt", "did you mean empty?"),
        ("calibrate --dtypes float46", "did you mean float64?"),
    ],
)
def test_an_error_names_the_nearest_right_spelling(words, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words.split())
    told = " ".join(re.sub("[│─╭╮╰╯]", " ", done.stderr).split())
    assert done.exit_code == 2 and meant in told, told
    assert not list(tmp_path.iterdir())
