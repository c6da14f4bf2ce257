"""``halocline export``: the weights of a checkpoint as one plain file"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..errors import HaloclineError
from .output import Debug, Json, clear_errors, print_json, say, size_text, stdout

Source = Annotated[Path, typer.Argument(help="Folder of a run, or of checkpoints.", metavar="RUN")]
Out = Annotated[Path, typer.Argument(help="File to write; .safetensors chooses that format, any other is torch's.")]
Step = Annotated[int | None, typer.Option("--step", help="The checkpoint of this step. Default: the newest good one.")]
Key = Annotated[str, typer.Option("--key", help="Which part of the saved tensors holds the weights.")]


def export(
    source: Source, out: Out, step: Step = None, key: Key = "model", as_json: Json = False, debug: Debug = False
) -> None:
    """Write the weights of a checkpoint to one file that needs nothing of this library to be read.

    One process reads the checkpoint, whatever mesh and layout saved it: cut weights are put together.

    **Examples**

    - `halocline export runs/transformer-1 weights.pt`: then `model.load_state_dict(torch.load("weights.pt"))`.

    - `halocline export my-checkpoints weights.safetensors --step 2000`: of a loop of your own.

    **Exit status**: 0 written; 2 not written, with one line that says why.
    """
    with clear_errors("export", debug):
        written, weights = _export(source, out, step, key)
    if as_json:
        print_json({"file": str(out), "step": written, "tensors": len(weights), "bytes": out.stat().st_size})
        return
    say(stdout(), escape(f"{out}: {len(weights)} tensors of step {written}, {size_text(out.stat().st_size)}"))


def _export(source: Path, out: Path, step: int | None, key: str) -> tuple[int, dict[str, Any]]:
    """Read and write; returns the step and the weights."""
    from ..train import Checkpoints, export_weights
    from ..train.checkpoints.files import CHECKPOINTS

    folder = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    if not folder.is_dir():
        raise HaloclineError(f"there is no folder {source}; name that of a run, or of its checkpoints")
    with Checkpoints(folder, None) as checkpoints:
        loaded = checkpoints.load_latest() if step is None else checkpoints.load(step)
    if loaded is None:
        raise HaloclineError(f"{folder} has no checkpoint")
    weights = loaded.tensors.get(key)
    if not isinstance(weights, dict):
        raise HaloclineError(f"{folder}: the checkpoint has no {key!r}; it has {', '.join(loaded.tensors)}")
    export_weights(weights, out)
    return loaded.step, weights
