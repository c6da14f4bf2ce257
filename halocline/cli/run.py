"""``halocline run``: runs an ordinary single-device script on many ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..errors import ConfigError
from ..train.launch import REQUEST, LocalRanks
from .local_ranks import rank_command, started_by_launcher
from .output import Debug, clear_errors, say, stderr
from .parsing import parse_cut
from .run_rank import run_here
from .stopping import Stop

Script = Annotated[Path, typer.Argument(help="The script, as you would give it to python.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="The script's own arguments.", show_default=False)
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Processes to start on this machine.")]
Cut = Annotated[
    str | None,
    typer.Option("--cut", metavar="AXIS=N,...", help="Cut samples, too: ranks along depth, height, width."),
]
Numbers = Annotated[
    str, typer.Option("--random", help="torch: the numbers of plain Python; indexed: by place, with less memory.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed for scripts that set none.")]
Deadline = Annotated[float | None, typer.Option("--deadline", help="Seconds that a rank may wait for another one.")]


def run(
    script: Script,
    arguments: Arguments = None,
    ranks: Ranks = 1,
    cut: Cut = None,
    numbers: Numbers = "torch",
    seed: Seed = 0,
    deadline: Deadline = None,
    debug: Debug = False,
) -> None:
    """Run an ordinary single-device PyTorch script on many ranks, unmodified.

    Each batch of a DataLoader is cut over the ranks: every rank loads its share, and the batch stays as large as it is.
    A model is distributed when an optimizer takes its parameters. Losses, statistics of batch norm, metrics and
    gradients are those of the whole batch, so the script ends with the parameters of one device, to rounding.
    Rank 0 prints and writes files; all ranks see them.

    **Examples**

    - `halocline run train.py --ranks 4 -- --epochs 10 --lr 0.1`: what follows `--` is for the script.

    - `halocline run segment.py --ranks 8 --cut depth=2,height=2`: two batches' shares, each sample cut in four.

    - `torchrun --nproc-per-node 8 -m halocline.cli run train.py -- --epochs 10`: torchrun starts the ranks.

    **Random numbers.** With `--random torch`, the default, dropout and noise have the numbers of plain Python: each
    rank draws them for the whole batch and keeps its own. With `--random indexed` every rank draws its own only;
    results are equal for any number of ranks, and differ from plain Python. Attention and recurrent dropout need it.

    **Refused**, by name: scripts that ask for their rank or join ranks themselves (torch.distributed,
    DistributedSampler, os.environ["RANK"]), data that differ between ranks, and operations without an exact cut.
    docs/scripts.md lists what is and what is not covered.

    **Exit status**: that of the script; 2 if it could not run as asked.
    """
    with clear_errors("run", debug):
        request = _request(script, arguments or [], cut, numbers, seed, deadline, debug)
        here = started_by_launcher(ranks) or ranks == 1
        status = run_here(request) if here else _on_this_machine(request, ranks)
    raise typer.Exit(status)


def _request(
    script: Path, arguments: list[str], cut: str | None, numbers: str, seed: int, deadline: float | None, debug: bool
) -> dict[str, Any]:
    """The request that each rank reads. Raises ConfigError."""
    if not script.is_file():
        raise ConfigError(f"there is no script {script}; give a Python file, then -- and its own arguments")
    if numbers not in ("torch", "indexed"):
        raise ConfigError(f"--random {numbers}: choose torch or indexed")
    return {
        "script": str(script),
        "arguments": arguments,
        "cut": parse_cut(cut) if cut else {},
        "numbers": numbers,
        "seed": seed,
        "deadline": deadline,
        "debug": debug,
    }


def _on_this_machine(request: dict[str, Any], ranks: int) -> int:
    """Start the ranks, and wait for them. Returns the status to exit with."""
    with tempfile.TemporaryDirectory(prefix="halocline-run-") as place, Stop() as stop:
        folder = Path(place)
        (folder / REQUEST).write_text(json.dumps(request))
        command = rank_command("run_rank", place)
        ending = stop.follow(
            lambda: LocalRanks(command, ranks, folder, request["deadline"], output=sys.stdout.fileno())
        )
    if ending is None:
        return 0
    if ending.rank != 0 or ending.status < 0:  # rank 0 has said on the terminal what happened
        say(stderr(), f"[red]halocline run: rank {ending.rank}: {escape(ending.words)}[/red]")
    return ending.status if ending.status > 0 else 128 - ending.status
