"""``halocline tune``: measures the chunk sizes that suit this GPU."""

from __future__ import annotations

import typer

from ..errors import HaloclineError
from .output import Debug, Json, clear_errors, number_table, print_json, progress_bar, say, stderr, stdout


def tune(as_json: Json = False, debug: Debug = False) -> None:
    """Measure on this GPU from which size on tensors need chunks, and how large the chunks should be.

    This is optional: the defaults suit an H200 (no chunks up to 2^31 elements, then chunks of 2^27 to 2^30). The
    command saves its figures by card, torch and cuDNN in `~/.cache/halocline/chunks.json` (or below
    `XDG_CACHE_HOME`); every later run on such a card uses them. It takes about a minute and 20 GiB of GPU memory.

    **Examples**

    - `halocline tune`: once on every kind of card.

    - `XDG_CACHE_HOME=$PWD/caches halocline tune`: into a folder that travels with the project.
    """
    # Imported here, so that help and other commands start without them.
    import torch

    from ..kernels.sizes import DEFAULTS, describe, table_path, write_table
    from ..kernels.tune import gpu_seconds
    from ..kernels.tune import tune as measure

    if not torch.cuda.is_available():  # with --json the reason is the result
        message = "halocline tune measures a CUDA GPU, and there is none here"
        print_json({"error": message}) if as_json else say(stderr(), message)
        raise typer.Exit(2)
    with clear_errors("tune", debug):
        device, measured = torch.device("cuda", torch.cuda.current_device()), {}
        with progress_bar() as bar:
            task = bar.add_task("measuring", total=len(DEFAULTS))
            for family, sizes in measure(device, gpu_seconds):
                measured[family] = sizes
                bar.advance(task)
        path, card = table_path(), describe(device)
        try:
            write_table(path, card, measured)
        except OSError as error:
            raise HaloclineError(f"could not write {path}: {error}; name another folder in XDG_CACHE_HOME") from error
    if as_json:
        print_json({"card": card, "file": str(path), "sizes": {name: list(sizes) for name, sizes in measured.items()}})
        return
    rows = [[name, *(f"{n:,}" for n in (*sizes, DEFAULTS[name].whole))] for name, sizes in measured.items()]
    headings = ("", "whole up to", "chunks of", "without measuring")
    stdout().print(number_table(f"Elements: {card}", headings, rows, texts=("",)))
    say(stdout(), f"kept in {path}")
