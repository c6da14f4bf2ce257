"""The demo's picture: two loss curves, and a slice of a volume that was cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from numpy.typing import NDArray

mpl.use("Agg")

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ONE, CUT = "#7a8ca5", "#d1495b"  # the two runs
COLOURS = ListedColormap(["#16202c", "#edae49", "#30a5bf"])  # a class each


def draw(
    path: Path,
    one_rank: Sequence[float],
    cut: Sequence[float],
    volumes: Sequence[NDArray[Any]],
    classes: Sequence[str],
    ranks: int,
) -> None:
    """``volumes``: the sample, true classes, predicted classes, [depth, height, width]; the fullest slice is shown."""
    volume, labels, predicted = volumes
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    curves, *images = figure.subplots(1, 4, width_ratios=[1.35, 1, 1, 1])
    _draw_curves(curves, one_rank, cut, ranks)
    at = int((labels > 0).sum(axis=(0, 1)).argmax())
    images[0].imshow(volume[:, :, at], cmap="gray")
    for axes, classified in zip(images[1:], (labels, predicted), strict=True):
        axes.imshow(classified[:, :, at], cmap=COLOURS, vmin=0, vmax=len(classes) - 1, interpolation="nearest")
    titles = ("a volume not trained on (one slice)", "true classes", "predicted by the cut run")
    for axes, title in zip(images, titles, strict=True):
        _finish_image(axes, title, volume.shape[0], ranks)
    patches = [Patch(color=COLOURS(index), label=name) for index, name in enumerate(classes)]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(classes), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_curves(axes: Any, one_rank: Sequence[float], cut: Sequence[float], ranks: int) -> None:
    steps = range(1, len(cut) + 1)
    axes.plot(steps, one_rank, color=ONE, linewidth=5, alpha=0.6, label="one rank")
    axes.plot(steps, cut, color=CUT, linewidth=1.5, marker="o", markersize=3, label=f"cut over {ranks} ranks")
    axes.set(title="the same training, twice", xlabel="step", ylabel="cross entropy", yscale="log")
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)


def _finish_image(axes: Any, title: str, depth: int, ranks: int) -> None:
    """Title, and the lines where the volume is cut."""
    axes.set(title=title, xticks=[], yticks=[], xlabel="height", ylabel="depth")
    for rank in range(ranks):
        top = depth * rank / ranks - 0.5
        if rank:
            axes.axhline(top, color=CUT, linewidth=2, linestyle="--")
        box = {"facecolor": "black", "alpha": 0.6, "edgecolor": "none", "pad": 2}
        axes.text(0.2, top + 0.9, f"rank {rank}", color="white", fontsize=8, va="top", bbox=box)
