"""Draw docs/pictures/cut.svg: a sample cut over four ranks, what the network predicts, and both loss curves.

    python tools/cut_picture.py [--steps 120]    # trains twice, in float64: ten minutes on two cores
    python tools/cut_picture.py FOLDER           # draws the runs that an earlier call left in FOLDER

The picture is drawn from the logs and examples of two real runs of ``halocline train``: one on one rank, one on four.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from halocline.cli.demo import DATA, make_data, settings_of
from halocline.train.config import write_settings
from halocline.train.log import read_log
from halocline.train.reporting.charts import HEIGHT, LEFT, RIGHT, WIDTH, Series, frame, step_scale, value_scale
from halocline.train.reporting.images import grey, overlaid, png
from halocline.train.reporting.picture import moved, picture
from halocline.train.reporting.svg import element, path_of, text

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "cut.svg"
EDGE, GAP, TOP = 210.0, 22.0, 44.0  # of the square pictures, between them, and above them
HUES = ("#3b76c4", "#c2662d", "#2c8f74", "#8a5cc0")
STYLE = """
.one{fill:none;stroke:#f0b055;stroke-width:7;stroke-linejoin:round;opacity:.75}
.four{fill:none;stroke:#1c2430;stroke-width:1.6;stroke-linejoin:round}
.rank{font-size:13px;font-weight:600;fill:#fff}
image{image-rendering:pixelated}
"""


def train(folder: Path, steps: int) -> None:
    """Two runs on the demo's scans: whole on one rank, and cut over four along height and width."""
    make_data(folder / DATA)
    for name, ranks in (("one", 1), ("four", 4)):
        write_settings(settings_of(folder / DATA, steps, "fp64"), folder / f"{name}.toml")
        cut = ["--set", "mesh.H=2", "--set", "mesh.W=2"] if ranks > 1 else []
        words = ["train", str(folder / f"{name}.toml"), "--out", str(folder / name), "--ranks", str(ranks), *cut]
        subprocess.run([sys.executable, "-m", "halocline.cli", *words], check=True)


def shown(plane: np.ndarray, x: float, heading: str) -> str:
    """A picture of a slice, with its heading."""
    source = "data:image/png;base64," + base64.b64encode(png(plane)).decode()
    drawn = element("image", href=source, x=x, y=TOP, width=EDGE, height=EDGE)
    return element("text", text(heading), x=x, y=TOP - 14, class_="heading") + drawn


def tiles(x: float, ranks: list[dict], size: int) -> str:
    """The boxes of the ranks over a slice, each with its number."""
    parts = []
    for entry in ranks:
        (top, bottom), (left, right) = entry["tile"]["H"], entry["tile"]["W"]
        hue, unit = HUES[entry["rank"] % len(HUES)], EDGE / size
        box = {"x": x + left * unit + 1.5, "y": TOP + top * unit + 1.5}
        sides = {"width": (right - left) * unit - 3, "height": (bottom - top) * unit - 3}
        parts.append(element("rect", **box, **sides, fill=hue, fill_opacity=0.16, stroke=hue, stroke_width=3))
        parts.append(element("rect", x=box["x"], y=box["y"], width=54, height=20, fill=hue))
        parts.append(element("text", f"rank {entry['rank']}", x=box["x"] + 6, y=box["y"] + 15, class_="rank"))
    return "".join(parts)


def curves(one: list[dict], four: list[dict]) -> str:
    """Both losses over the steps."""
    series = {name: Series(name, _column(entries, "step"), _column(entries, "loss"), "loss")
              for name, entries in (("one", one), ("four", four))}  # fmt: skip
    across, up = step_scale(series["one"].steps), value_scale(series["one"].values)
    parts = [frame(across, up, "step")]
    for name, each in series.items():
        points = zip(each.steps.tolist(), each.values.tolist(), strict=True)
        parts.append(element("path", d=path_of((across(a), up(b)) for a, b in points), class_=name))
    for row, (name, words) in enumerate((("one", "one rank, whole"), ("four", "four ranks, cut"))):
        y = 34 + 22 * row
        parts.append(element("path", d=f"M{WIDTH - RIGHT - 150},{y}h34", class_=name))
        parts.append(element("text", words, x=WIDTH - RIGHT - 108, y=y + 4, class_="label"))
    return "".join(parts)


def _column(entries: list[dict], name: str) -> np.ndarray:
    return np.array([float(entry[name]) for entry in entries])


def draw(folder: Path) -> str:
    """The picture of two runs."""
    with np.load(folder / "four" / "examples.npz") as stored:
        x, y, p = stored["x"][0, 0], stored["y"][0], stored["p"][0]
    one, four = ([*read_log(folder / name, "step")] for name in ("one", "four"))
    base, ranks = grey(x), [*read_log(folder / "four", "rank")]
    worst = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(one, four, strict=True))
    columns = [GAP + index * (EDGE + GAP) for index in range(3)]
    parts = [
        shown(base, columns[0], "A scan, cut over four ranks"),
        tiles(columns[0], ranks, x.shape[0]),
        shown(overlaid(base, y), columns[1], "True: organ and lesions"),
        shown(overlaid(base, p), columns[2], "Predicted, on four ranks"),
        moved(curves(one, four), columns[2] + EDGE + GAP - 10, TOP, f"Loss: at most {worst:.0e} apart"),
    ]
    width = columns[2] + EDGE + GAP + WIDTH - LEFT + 48
    return picture("A sample cut over four ranks", parts, width, TOP + HEIGHT + 8, STYLE)


def main() -> None:
    """Train if no folder is named, then draw."""
    words = sys.argv[1:]
    steps = int(words.pop(words.index("--steps") + 1)) if "--steps" in words else 120
    named = [word for word in words if not word.startswith("-")]
    folder = Path(named[0]) if named else Path(tempfile.mkdtemp(prefix="cut-picture-"))
    if not named or not (folder / "four").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train(folder, steps)
    OUT.write_text(draw(folder) + "\n")
    print(f"wrote {OUT}; the runs are in {folder}")


if __name__ == "__main__":
    main()
