"""``halocline launch``: writes the file that a batch system needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..train.launch import slurm_script
from .output import Debug, clear_errors

Config = Annotated[str, typer.Argument(help="A TOML file, or a workload's name.")]
Slurm = Annotated[bool, typer.Option("--slurm", help="For Slurm: a file for sbatch.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
File = Annotated[Path | None, typer.Option("--file", help="File to write. Default: print it.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines.")]
PerNode = Annotated[int, typer.Option("--ranks-per-node", min=1, help="Ranks on each machine; usually one a GPU.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of each machine; 0 for none.")]
Cpus = Annotated[int, typer.Option("--cpus-per-rank", min=1, help="Cores for each rank.")]
Hours = Annotated[int, typer.Option("--hours", min=1, help="Time limit.")]


def launch(
    config: Config,
    slurm: Slurm = False,
    out: Out = Path("runs/batch"),
    file: File = None,
    nodes: Nodes = 1,
    per_node: PerNode = 4,
    gpus: Gpus = 0,
    cpus: Cpus = 4,
    hours: Hours = 12,
    debug: Debug = False,
) -> None:
    """Write the file that starts a run on a cluster.

    Two minutes before the time limit Slurm sends SIGUSR1, and SIGTERM when it takes the machines for another job; the
    run then ends its step, writes a checkpoint and exits with status 75, on which the script requeues the job. It
    resumes from that checkpoint, on any number of ranks.

    **Example**: `halocline launch run.toml --slurm --nodes 16 --ranks-per-node 8 --gpus-per-node 8 --file run.sbatch`
    """
    with clear_errors("launch", debug):
        if not slurm:
            raise ConfigError("for which batch system? Give --slurm; torchrun needs no file")
        text = slurm_script(config, str(out), nodes, per_node, gpus, cpus, hours)
        if file is None:  # plain text, which a shell can redirect
            typer.echo(text, nl=False)
        else:
            file.write_text(text)
