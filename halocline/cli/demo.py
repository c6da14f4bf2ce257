"""``halocline demo``: a segmentation learnt on one rank and cut over two, which agree."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import track

from ..errors import ConfigError
from ..train.log import read_log
from .output import Debug, Json, clear_errors, fact_table, print_json, progress_console, say, stderr, stdout

if TYPE_CHECKING:  # which needs pydantic; the other commands do without
    from ..train.settings import Settings

SIZE, WIDTH, SAMPLES, HELD_OUT = 32, 4, 24, 4  # edge of a volume, channels, samples for training and validation
LOOKS = 6  # validations of a run; the report shows what was predicted at some of them
DATA = "scans.h5"
RANKS = 2  # of the second run
PROOF = 6  # steps in float64, which CPUs compute some ten times slower than float32
CLOSE = 1e-8  # largest relative difference of two losses in float64, which round in different orders

Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of both runs.")]
Out = Annotated[
    Path, typer.Option("--out", help="Folder for the data, the runs and the report; replaced if it exists.")
]


def demo(steps: Steps = 150, out: Out = Path("demo-output"), as_json: Json = False, debug: Debug = False) -> None:
    """Train a network on one rank, then on two ranks with every sample cut in half, and compare.

    The demo makes small CT-like scans with an organ and lesions in it, and writes them to an HDF5 file. A 3D U-Net
    learns to find both: once in one process that reads whole volumes, once in two processes that each read half of
    every volume. Then both repeat their first steps in float64, where the losses must agree to eight digits. A report
    shows predictions beside the truth, how they improve, and where the time went. The demo takes a minute or two on two
    cores.
    """
    began = time.monotonic()
    with clear_errors("demo", debug):
        result = play(steps, out)
    result["seconds"] = time.monotonic() - began
    show(result)
    if as_json:
        print_json(result)
    raise typer.Exit(0 if result["agree"] else 1)


def play(steps: int, out: Path) -> dict[str, Any]:
    """Make the data, train with and without cuts, compare; writes into ``out``, which is replaced."""
    import shutil

    from ..train.reporting import write_report

    check_ours(out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    make_data(out / DATA)
    curves = _train(out, steps, "fp32", "")
    proof = _train(out, min(steps, PROOF), "fp64", "-float64")
    folder = out / _folder(RANKS)
    report = write_report(folder)
    worst = _difference(proof)
    return {
        "agree": worst <= CLOSE,
        "loss_difference": worst,
        "loss_difference_float32": _difference(curves),
        "ranks": RANKS,
        "one_rank": curves[1],
        "cut": curves[RANKS],
        "dice": [entry["dice"] for entry in read_log(folder, "validation")],
        "memory": [entry["memory"] for entry in read_log(folder, "rank")],
        "report": str(report.path),
    }


def _folder(ranks: int) -> str:
    return "one-rank" if ranks == 1 else f"{ranks}-ranks"


def _train(out: Path, steps: int, precision: str, mark: str) -> dict[int, list[float]]:
    """Train on one rank and on several; returns the loss curves by number of ranks."""
    from ..train.elastic import RankCount
    from .attempts import on_this_machine

    curves = {}
    for ranks in (1, RANKS):
        folder = out / f"{_folder(ranks)}{mark}"
        how = "cut in two along depth" if ranks > 1 else "whole"
        words = f"{steps} steps in {precision} on {ranks} rank{'s' if ranks > 1 else ''}"
        say(progress_console(), f"[bold]{words}[/bold], every volume {how}")
        on_this_machine(settings_of(out / DATA, steps, precision), folder, RankCount(ranks, ranks), 0)
        curves[ranks] = [entry["loss"] for entry in read_log(folder, "step")]
    return curves


def _difference(curves: dict[int, list[float]]) -> float:
    """The largest relative difference of two loss curves."""
    return max(abs(a - b) / abs(a) for a, b in zip(curves[1], curves[RANKS], strict=True))


def check_ours(out: Path) -> None:
    """Raise ConfigError if ``out`` holds files that no earlier demo made: it will be removed."""
    if out.is_dir() and any(out.iterdir()) and not (out / DATA).is_file():
        raise ConfigError(f"--out {out}: this folder holds other files, and the demo would replace it; give a new one")


def make_data(path: Path) -> None:
    """Write datasets x (scans) and y (classes), chunked so that each half of a volume can be read by itself."""
    # Imported here, so that other commands do not need h5py.
    import h5py

    from ..workloads.volumes import volumes

    made = volumes(SAMPLES + HELD_OUT, 0, SIZE)
    scans, labels = made["x"].store, made["y"].store
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (len(scans), *scans.shape), "f4", chunks=(1, 1, SIZE // 2, SIZE, SIZE))
        y = file.create_dataset("y", (len(labels), *labels.shape), "u1", chunks=(1, SIZE // 2, SIZE, SIZE))
        for sample in track(range(len(scans)), "making scans", console=progress_console()):
            x[sample], y[sample] = scans.read_new(sample), labels.read_new(sample)


def settings_of(data: Path, steps: int, precision: str) -> Settings:
    """The settings of a run. Runs of another length or precision start from the same weights and see the same
    samples."""
    from ..train.config import make_settings
    from ..workloads.unet3d import MULTIPLE

    return make_settings(
        {
            "model": "halocline.workloads.unet3d:UNet3d",
            "loss": "halocline.workloads.unet3d:class_loss",
            "network": {"width": WIDTH},
            "class_names": ["background", "organ", "lesion"],
            "multiple": MULTIPLE,
            "validate_every": max(1, steps // LOOKS) if precision == "fp32" else 0,
            "data": {"path": str(data), "validation": HELD_OUT},
            "steps": steps,
            "batch": 2,
            "precision": precision,
            "optimizer": {"lr": 5e-3},
        }
    )


def show(result: dict[str, Any]) -> None:
    """Print the two runs side by side, and where the report is."""
    last = len(result["cut"])
    verdict = "they agree" if result["agree"] else "THEY DIFFER"
    facts = {
        f"float64, {min(last, PROOF)} steps": f"losses differ by {result['loss_difference']:.0e} of a loss at most",
        "loss in float32, whole": f"{result['one_rank'][0]:.6f}, after {last} steps {result['one_rank'][-1]:.6f}",
        "the same, cut": f"{result['cut'][0]:.6f}, after {last} steps {result['cut'][-1]:.6f}",
        "difference in float32": f"up to {result['loss_difference_float32']:.0e} of a step's loss: rounding grows over "
        f"{last} steps of training",
        "dice, first and last": f"{result['dice'][0]:.2f}, {result['dice'][-1]:.2f} (of unseen scans; 1 is perfect)",
        "seconds": f"{result['seconds']:.0f}",
        "report": escape(result["report"]),
    }
    stderr().print(fact_table(f"One rank and {result['ranks']}: {verdict}", facts))
    say(stdout() if not result["agree"] else stderr(), f"Open {escape(result['report'])} in a browser.")
