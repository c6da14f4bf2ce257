"""Draw the pictures of the tutorials, docs/pictures/tutorial-*.svg, from what their own commands leave behind.

    python tools/tutorial_pictures.py                 # all: follows five tutorials, some ten minutes on two cores
    python tools/tutorial_pictures.py own-data        # one; --keep FOLDER uses what an earlier call left there

Pictures come from logs, traces, tables and volumes that the blocks of a tutorial have written, so they show what a
reader should see.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tutorials import Reader, available, blocks

from halocline.geometry import Interval, Window
from halocline.train.log import read_log
from halocline.train.reporting.charts import (
    HEIGHT,
    WIDTH,
    ChartScale,
    frame,
    step_scale,
    value_scale,
)  # fmt: skip
from halocline.train.reporting.images import grey, overlaid, png
from halocline.train.reporting.picture import moved, picture
from halocline.train.reporting.svg import element, path_of, short, text

ROOT = Path(__file__).resolve().parent.parent
PAGES, OUT = ROOT / "docs" / "tutorials", ROOT / "docs" / "pictures"
HUES = ("#f0b055", "#3b76c4", "#2c8f74", "#8a5cc0")
EDGE, GAP, TOP = 190.0, 22.0, 44.0
STYLE = """
.line{fill:none;stroke-linejoin:round}
.cell{font-size:12px;fill:#1c2430}
.white{font-size:12px;font-weight:600;fill:#ffffff!important}
image{image-rendering:pixelated}
"""


def lines(
    curves: dict[str, Sequence[tuple[float, float]]], label: str = "step", log: bool | None = None, legend: float = 26
) -> str:
    """Curves on top of each other, the first the widest, with their names from the height ``legend`` on."""
    points = [point for curve in curves.values() for point in curve]
    across = step_scale(np.array([x for x, _ in points]))
    up = value_scale(np.array([y for _, y in points]), log=log)
    parts = [frame(across, up, label)]
    widths = np.linspace(9, 1.6, len(curves)) if len(curves) > 1 else [2.4]
    for row, ((name, curve), width) in enumerate(zip(curves.items(), widths, strict=True)):
        hue, y = HUES[row % len(HUES)], legend + 19 * row
        dots = [element("circle", cx=across(x), cy=up(y), r=3.5, fill=hue) for x, y in curve] if len(curve) < 12 else []
        parts.append(element("path", d=path_of((across(x), up(v)) for x, v in curve), class_="line", stroke=hue,
                             stroke_width=float(width)))  # fmt: skip
        parts += dots
        parts.append(element("path", d=f"M{WIDTH - 190},{y}h30", class_="line", stroke=hue, stroke_width=float(width)))
        parts.append(element("text", text(name), x=WIDTH - 152, y=y + 4, class_="label"))
    return "".join(parts)


def slice_of(plane: np.ndarray, x: float, heading: str) -> str:
    """A picture of a plane, below its heading."""
    source = "data:image/png;base64," + base64.b64encode(png(plane)).decode()
    height = EDGE * plane.shape[0] / plane.shape[1]
    drawn = element("image", href=source, x=x, y=TOP, width=EDGE, height=height)
    return element("text", text(heading), x=x, y=TOP - 14, class_="heading") + drawn


def bars(rows: Sequence[tuple[str, float, float]], names: tuple[str, str], unit: str) -> tuple[str, float]:
    """Two horizontal bars a row, on a logarithmic scale; and the height of the drawing."""
    most = max(max(a, b) for _, a, b in rows)
    least = min(min(a, b) for _, a, b in rows)
    scale = ChartScale(least / 3, most * 1.4, 220, 640, True)
    parts = []
    for row, (name, *values) in enumerate(rows):
        y = 54 + 46 * row
        parts.append(element("text", text(name), x=208, y=y + 20, class_="cell end"))
        for k, value in enumerate(values):
            parts.append(element("rect", x=220, y=y + 16 * k, width=scale(value) - 220, height=14, rx=2, fill=HUES[k]))
            told = f"{value:,.0f} {unit}"
            parts.append(element("text", text(told), x=scale(value) + 6, y=y + 12 + 16 * k, class_="tick"))
    for k, name in enumerate(names):
        parts.append(element("rect", x=220 + 150 * k, y=22, width=14, height=14, rx=2, fill=HUES[k]))
        parts.append(element("text", text(name), x=240 + 150 * k, y=34, class_="label"))
    parts.append(element("text", "lengths are logarithmic", x=520, y=34, class_="label"))
    return "".join(parts), 54 + 46 * len(rows)


def losses(folder: Path) -> list[tuple[float, float]]:
    """The loss of each step of a run."""
    return [(entry["step"], entry["loss"]) for entry in read_log(folder, "step")]


def from_ddp(folder: Path) -> str:
    """Four curves that the scripts have printed."""

    def printed(name: str) -> list[tuple[int, float]]:
        return [(k, float(line.split()[-1])) for k, line in enumerate((folder / name).read_text().splitlines())]

    names = {"ddp.txt": "DDP, 2 ranks", "one.txt": "one rank", "two.txt": "cut over 2", "three.txt": "cut over 3"}
    curves = {words: printed(name) for name, words in names.items()}
    one = curves["one rank"]
    worst = max(abs(a - b) / a for curve in curves.values() for (_, a), (_, b) in zip(one, curve, strict=True))
    chart = moved(lines(curves), 10, TOP, f"Loss of four runs: at most {worst:.0e} apart")
    return picture("Four loss curves on top of each other", [chart], WIDTH + 20, TOP + HEIGHT + 8, STYLE)


def own_data(folder: Path) -> str:
    """A scan that was not trained on, its label, the prediction; and the Dice score during the training."""
    import nibabel

    def plane(name: str) -> np.ndarray:
        volume = nibabel.load(folder / name / "case_012.nii.gz").get_fdata()
        return volume[:, :, volume.shape[2] // 2]

    base = grey(plane("imagesTs"))
    planes = {
        "A new scan": base,
        "True": overlaid(base, plane("labelsTs")),
        "Predicted": overlaid(base, plane("segmentations")),
    }
    parts = [slice_of(each, GAP + k * (EDGE + GAP), name) for k, (name, each) in enumerate(planes.items())]
    run = folder / "runs" / "nifti"
    dice = {
        name: [(entry["step"], entry[f"dice/{name}"]) for entry in read_log(run, "validation")]
        for name in ("organ", "lesion")
    }
    right = GAP + 3 * (EDGE + GAP) - 10
    parts.append(moved(lines(dice, log=False, legend=HEIGHT - 80), right, TOP, "Dice of volumes that were held out"))
    return picture("A scan, its label and the prediction", parts, right + WIDTH + 10, TOP + HEIGHT + 8, STYLE)


def own_rule(folder: Path) -> str:
    """Which inputs each rank needs for its outputs, by the rule's own window."""
    ranks, length = 3, 18
    window, unit = Window(kernel=3), 30.0
    outputs = [Interval(*ends) for ends in _parts(length - 2, ranks)]
    inputs = _parts(length, ranks)
    parts = [element("text", "Inputs, and the rank that has them", x=110, y=30, class_="heading")]
    parts += [_cells(range(*ends), 110, 44, unit, HUES[rank + 1]) for rank, ends in enumerate(inputs)]
    for rank, interval in enumerate(outputs):
        y = 110 + 74 * rank
        (need,) = window.need(interval)
        halo = [k for k in range(need.lo, need.hi) if not inputs[rank][0] <= k < inputs[rank][1]]
        own = [k for k in range(need.lo, need.hi) if k not in halo]
        parts.append(element("text", f"rank {rank} reads", x=100, y=y + 18, class_="cell end"))
        parts.append(_cells(own, 110, y, unit, HUES[rank + 1]))
        parts.append(_cells(halo, 110, y, unit, HUES[0]))
        parts.append(element("text", "computes", x=100, y=y + 48, class_="cell end"))
        parts.append(_cells(range(interval.lo, interval.hi), 110 + unit, y + 30, unit, HUES[rank + 1]))
    parts.append(element("rect", x=110, y=336, width=14, height=14, fill=HUES[0]))
    parts.append(element("text", "the halo: fetched from a neighbour", x=132, y=348, class_="label"))
    return picture("What each rank reads for a window of three", parts, 110 + unit * length + 24, 364, STYLE)


def _parts(length: int, ranks: int) -> list[tuple[int, int]]:
    """A length in equal parts, as ends."""
    ends = [length * rank // ranks for rank in range(ranks + 1)]
    return list(pairwise(ends))


def _cells(places: Sequence[int], x: float, y: float, unit: float, hue: str) -> str:
    """A square for each place, with its number."""
    parts = []
    for k in places:
        parts.append(element("rect", x=x + k * unit + 1, y=y, width=unit - 2, height=26, rx=3, fill=hue))
        parts.append(element("text", str(k), x=x + (k + 0.5) * unit, y=y + 17, class_="white mid"))
    return "".join(parts)


def slurm(folder: Path) -> str:
    """The losses of the run that was stopped and went on."""
    curve, marks = losses(folder / "runs" / "limit"), folder / "stopped-at"
    stop = int(marks.read_text())
    first = [point for point in curve if point[0] < stop]
    second = [point for point in curve if point[0] >= stop - 1]
    curves = {"until the signal, 2 ranks": first, "after it, 1 rank": second}
    chart = moved(lines(curves), 10, TOP, "Loss of a run that was stopped and resumed")
    return picture("A loss curve over two jobs", [chart], WIDTH + 20, TOP + HEIGHT + 8, STYLE)


def report_and_trace(folder: Path) -> str:
    """One step of both ranks in the trace: what each thread did."""
    trace = json.loads((folder / "runs" / "look" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in trace if event.get("ph") == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e.get("name") == "thread_name"}
    step = next(event for event in spans if event["name"] == "step 3")
    first, last = step["ts"], step["ts"] + step["dur"]
    inside = [e for e in spans if e["ts"] < last and e["ts"] + e["dur"] > first and _kind(e)]
    rows = sorted({(e["pid"], names[e["pid"], e["tid"]]) for e in inside})
    rows = [(pid, name) for pid, name in rows if name in ("main", "autograd", "prefetcher")]
    scale = ChartScale(0, step["dur"] / 1000, 150, 880)
    parts = [element("text", "One step of two ranks", x=16, y=28, class_="heading")]
    for row, (pid, name) in enumerate(rows):
        y = 46 + 34 * row
        parts.append(element("text", text(f"rank {pid}, {name}"), x=140, y=y + 16, class_="cell end"))
        parts.append(element("rect", x=150, y=y, width=730, height=26, fill="#f1f3f6"))
        mine = [event for event in inside if (event["pid"], names[event["pid"], event["tid"]]) == (pid, name)]
        for event in sorted(mine, key=lambda event: -event["dur"]):  # waits lie on the pass that they are a part of
            left = scale((max(event["ts"], first) - first) / 1000)
            right = scale((min(event["ts"] + event["dur"], last) - first) / 1000)
            parts.append(
                element("rect", x=left, y=y, width=max(0.6, right - left), height=26, fill=KINDS[_kind(event)])
            )
    y = 62 + 34 * len(rows)
    for k, (words, hue) in enumerate(KINDS.items()):
        parts.append(element("rect", x=150 + 150 * (k % 5), y=y + 22 * (k // 5), width=14, height=14, fill=hue))
        parts.append(element("text", words, x=170 + 150 * (k % 5), y=y + 12 + 22 * (k // 5), class_="label"))
    parts.append(element("text", f"{short(step['dur'] / 1000)} ms", x=880, y=28, class_="label end"))
    return picture("A trace of one step", parts, 900, y + 52, STYLE)


KINDS = {
    "forward": "#3b7dd8",
    "backward": "#8a5cc0",
    "optimizer": "#2aa38b",
    "waiting for a halo": "#e0942f",
    "waiting for a sum": "#b3426a",
    "other waits": "#6b7280",
}
WAITS = {"halo wait": "waiting for a halo", "sum wait": "waiting for a sum"}


def _kind(event: dict[str, Any]) -> str:
    """What a span of the trace is; "" for one that is a part of another."""
    name = str(event["name"]).partition(":")[0]
    if name.endswith(" wait"):
        return WAITS.get(name, "other waits")
    if name in ("forward", "backward"):
        return name
    return "optimizer" if name.startswith("Optimizer.step") else ""


def one_gpu(folder: Path) -> str:
    """The table of whole networks, as bars."""
    row = re.compile(r"^\| ([^|]+) \| ([\d, ]+) \| ([\d,]+) ms[^|]*\| ([\d,]+) ms \|$", re.M)
    page = (PAGES / "one-gpu.md").read_text()
    rows = [
        (f"{name}, {cube.strip()} cubed", float(plain.replace(",", "")), float(ours.replace(",", "")))
        for name, cube, plain, ours in row.findall(page)
    ]
    drawn, height = bars(rows, ("plain PyTorch", "Halocline"), "ms")
    return picture("Time of a training step", [drawn], 740, height + 12, STYLE)


PICTURES: dict[str, tuple[bool, Callable[[Path], str]]] = {  # whether the tutorial must be followed first
    "from-ddp": (True, from_ddp),
    "own-data": (True, own_data),
    "own-rule": (False, own_rule),
    "slurm": (True, slurm),
    "report-and-trace": (True, report_and_trace),
    "one-gpu": (False, one_gpu),
}


def follow(name: str, folder: Path) -> None:
    """Follow a tutorial in a folder, as its reader does."""
    reader = Reader(folder)
    for block in blocks((PAGES / f"{name}.md").read_text()):
        if block.does and available(block.needs):
            reader.follow(block)
            if name == "slurm" and "kill -USR1" in block.text:
                (folder / "stopped-at").write_text(str(len(losses(folder / "runs" / "limit"))))


def main() -> None:
    """Draw the pictures that are named, or all."""
    words = sys.argv[1:]
    keep = Path(words.pop(words.index("--keep") + 1)) if "--keep" in words else None
    named = [word for word in words if not word.startswith("-")] or list(PICTURES)
    for name in named:
        followed, draw = PICTURES[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = (keep or Path(temporary)) / name
            if followed and not folder.exists():
                folder.mkdir(parents=True)
                follow(name, folder)
            (OUT / f"tutorial-{name}.svg").write_text(draw(folder) + "\n")
        print(f"drew {name}", flush=True)


if __name__ == "__main__":
    main()
