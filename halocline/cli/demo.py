"""``halocline demo``: a small 3D U-Net trained on one rank and cut over two, side by side."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..testing.compare import EXACT, relative_error
from ..testing.memory import peak_bytes
from ..testing.pool import RankPool
from . import demo_run as run
from .output import Debug, Json, clear_errors, print_json, say, size_text, stderr, stdout

#: Float32 runs round each in its own way, and every step of training carries the difference on.
CLOSE = 1e-3
DEADLINE = 300.0  # seconds for a call on the ranks

Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of both runs.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the picture.")]


@dataclass
class Result:
    """What the demo found."""

    one_rank: list[float]
    cut: list[float]
    gradient_error: float
    held: list[run.Held]
    held_by_one: run.Held
    accuracy: float
    picture: Path
    seconds: float = 0.0

    @property
    def loss_difference(self) -> float:
        """Between the two curves, by the library's one definition of an error."""
        return relative_error(torch.tensor(self.cut), torch.tensor(self.one_rank))

    @property
    def agree(self) -> bool:
        return self.gradient_error <= EXACT and self.loss_difference <= CLOSE

    def as_json(self) -> dict[str, Any]:
        shown = {**asdict(self), "picture": str(self.picture)}
        return {"agree": self.agree, "ranks": run.RANKS, "loss_difference": self.loss_difference, **shown}


def demo(steps: Steps = 30, out: Out = Path("demo-output"), as_json: Json = False, debug: Debug = False) -> None:
    """See it work: train a small 3D U-Net on one rank and cut over two, side by side.

    Synthetic volumes of balls and shells are segmented. The second run has each volume cut in two along depth, and
    every half lives in a process of its own. The two runs must agree; a picture shows both loss curves, the cut and
    what the network learned. It takes about a minute on two cores.
    """
    console, progress = (stderr() if as_json else stdout()), stderr()
    with clear_errors("demo", debug):
        started = time.monotonic()
        result = play(steps, out, console, progress)
        result.seconds = time.monotonic() - started
    show(result, console)
    if as_json:
        print_json(result.as_json())
    raise typer.Exit(0 if result.agree else 1)


def play(steps: int, out: Path, console: Console, progress: Console) -> Result:
    peak_bytes(lambda: None)  # counting starts before the first tensor that is counted
    with RankPool(run.RANKS) as pool:
        say(console, f"[bold]A 3D U-Net on volumes of {run.SIZE} cubed, cut in depth over {run.RANKS} ranks[/bold]")
        with progress.status("starting two ranks, and comparing gradients in float64"):
            error, name = compare_gradients(pool)
        say(console, f"gradients in float64: at most {error:.0e} apart, of {EXACT:.0e} allowed (furthest: {name})")
        one, losses, cut = train(pool, steps, console, progress)
        with progress.status("measuring what each rank holds and moves"):
            held_by_one, held = run.measure(one, steps), pool.run(run.measure_on_rank, steps, deadline=DEADLINE)
            predicted = pool.run(run.predict_on_rank, deadline=DEADLINE)[0]
    with progress.status("drawing"):
        picture = draw_picture(out, losses, cut, predicted)
    right = (predicted == run.make_volume(run.UNSEEN, run.SIZE)[1]).double().mean().item()
    return Result(losses, cut, error, held, held_by_one, right, picture)


def compare_gradients(pool: RankPool) -> tuple[float, str]:
    """The largest error of a parameter's gradient in the demo's own network and loss, and the parameter."""
    pool.run(run.start_on_rank, run.SIZE, run.WIDTH, torch.float64, deadline=DEADLINE)
    true = run.Training(run.SIZE, run.WIDTH, torch.float64).gradients()
    found = pool.run(run.gradients_on_rank, deadline=DEADLINE)
    scale = max(gradient.abs().max().item() for gradient in true.values())
    errors = {name: max(relative_error(f[name], true[name], scale) for f in found) for name in true}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def train(
    pool: RankPool, steps: int, console: Console, progress: Console
) -> tuple[run.Training, list[float], list[float]]:
    """Both runs, step by step; the one-rank training is returned for more."""
    pool.run(run.start_on_rank, run.SIZE, run.WIDTH, torch.float32, deadline=DEADLINE)
    one, losses, cut = run.Training(run.SIZE, run.WIDTH, torch.float32), [], []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress, transient=True) as bar:
        for number in bar.track(range(steps)):
            losses.append(one.step(number))
            cut.append(pool.run(run.step_on_rank, number, deadline=DEADLINE)[0])
            if number % 4 == 0 or number == steps - 1:
                say(console, f"step {number + 1:3}: loss {losses[-1]:.6f} on one rank, {cut[-1]:.6f} cut")
    return one, losses, cut


def draw_picture(out: Path, losses: list[float], cut: list[float], predicted: Tensor) -> Path:
    from .picture import draw  # matplotlib takes a second to import

    volume, labels = run.make_volume(run.UNSEEN, run.SIZE)
    path = out / "demo.png"
    volumes = [tensor.squeeze().numpy() for tensor in (volume, labels, predicted)]
    draw(path, losses, cut, volumes, run.CLASSES, run.RANKS)
    return path


def show(result: Result, console: Console) -> None:
    table = Table(title="What each rank held and moved in a step", title_style="bold", title_justify="left")
    for heading in ("", "one rank", *(f"rank {rank} of {run.RANKS}" for rank in range(run.RANKS))):
        table.add_column(heading, justify="left" if not heading else "right")
    everyone = [result.held_by_one, *result.held]
    table.add_row("its part of the volume", *(size_text(one.tile_bytes) for one in everyone))
    table.add_row("peak activations", *(size_text(one.peak_bytes) for one in everyone))
    table.add_row("received from its neighbour", *(size_text(one.moved_bytes) for one in everyone))
    table.add_row("summed over ranks", *(size_text(one.summed_bytes) for one in everyone))
    table.add_row("messages", *(str(one.messages) for one in everyone))
    console.print(table)
    for line in closing_lines(result):
        say(console, line)


def closing_lines(result: Result) -> list[str]:
    last, difference = (result.one_rank[-1], result.cut[-1]), result.loss_difference
    verdict = "[green]The two runs agree[/green]" if result.agree else "[red]The two runs do not agree[/red]"
    return [
        f"loss at step {len(result.cut)}: {last[0]:.6f} on one rank, {last[1]:.6f} cut",
        f"largest difference of the curves: {difference:.0e} (float32 rounding, which training carries on)",
        f"voxels right in a volume not trained on: {result.accuracy:.1%}",
        f"{verdict} ({result.seconds:.0f} s). Picture: {result.picture}",
        "Next: [cyan]halocline check unet3d[/cyan] compares every gradient; README.md shows how to cut your own.",
    ]
