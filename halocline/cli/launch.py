"""``halocline launch``: writes the file that a batch system needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..train.batch_files import BatchJob, kubernetes_manifest, slurm_script
from .output import Debug, clear_errors

Config = Annotated[str, typer.Argument(help="A TOML file, or a workload's name.")]
Slurm = Annotated[bool, typer.Option("--slurm", help="For Slurm: a file for sbatch.")]
Kubernetes = Annotated[
    bool, typer.Option("--kubernetes", help="For Kubernetes with Kubeflow's training operator: a PyTorchJob.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
File = Annotated[Path | None, typer.Option("--file", help="File to write. Default: print it.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines.")]
PerNode = Annotated[int, typer.Option("--ranks-per-node", min=1, help="Ranks on each machine; usually one a GPU.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of each machine; 0 for none.")]
Cpus = Annotated[int, typer.Option("--cpus-per-rank", min=1, help="Cores for each rank.")]
Hours = Annotated[int, typer.Option("--hours", min=1, help="Time limit.")]
Environment = Annotated[
    list[str] | None,
    typer.Option("--environment", metavar="NAME=VALUE", help="A variable for all ranks; may be repeated."),
]
Partition = Annotated[str | None, typer.Option("--partition", help="Slurm: the partition to run in.")]
Account = Annotated[str | None, typer.Option("--account", help="Slurm: the account to charge.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="OPTION", help="Slurm: another option, such as constraint=gpu; may be repeated."),
]
Setup = Annotated[
    list[str] | None,
    typer.Option("--setup", metavar="LINE", help="Slurm: a line of shell that runs before the ranks; may be repeated."),
]
Image = Annotated[str | None, typer.Option("--image", help="Kubernetes: the container image of the ranks.")]
Claim = Annotated[
    str | None, typer.Option("--claim", help="Kubernetes: a PersistentVolumeClaim with data and runs, at /data.")
]


def launch(
    config: Config,
    slurm: Slurm = False,
    kubernetes: Kubernetes = False,
    out: Out = Path("runs/batch"),
    file: File = None,
    nodes: Nodes = 1,
    per_node: PerNode = 4,
    gpus: Gpus = 0,
    cpus: Cpus = 4,
    hours: Hours = 12,
    environment: Environment = None,
    partition: Partition = None,
    account: Account = None,
    options: Options = None,
    setup: Setup = None,
    image: Image = None,
    claim: Claim = None,
    debug: Debug = False,
) -> None:
    """Write the file that starts a run on a cluster.

    Two minutes before the time limit Slurm sends SIGUSR1, and SIGTERM when it takes the machines for another job; the
    run then ends its step, writes a checkpoint and exits with status 75, on which the script requeues the job. It
    resumes from that checkpoint, on any number of ranks.

    **Examples**

    - `halocline launch run.toml --slurm --nodes 16 --ranks-per-node 8 --gpus-per-node 8 --file run.sbatch`

    - `halocline launch run.toml --slurm --partition gpu --account abc123 --setup "source ~/env/bin/activate"`

    - `halocline launch /data/run.toml --kubernetes --image registry/halocline:1 --claim volumes --out /data/runs/a`:
      a PyTorchJob for `kubectl apply -f`.
    """
    with clear_errors("launch", debug):
        if slurm == kubernetes:
            raise ConfigError("for which batch system? Give --slurm or --kubernetes; torchrun needs no file")
        job = BatchJob(config, str(out), nodes, per_node, gpus, cpus, hours, parse_variables(environment or []))
        if slurm:
            refuse_unfit("--kubernetes", {"--image": image, "--claim": claim})
            text = slurm_script(job, partition, account, options or [], setup or [])
        else:
            refuse_unfit("--slurm", {"--partition": partition, "--account": account, "--sbatch": options,
                                     "--setup": setup})  # fmt: skip
            if image is None:
                raise ConfigError("--kubernetes needs --image: a container image with halocline and torch installed")
            text = kubernetes_manifest(job, image, claim)
        if file is None:  # plain text, which a shell can redirect
            typer.echo(text, nl=False)
        else:
            file.write_text(text)


def parse_variables(pairs: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` as a dict. Raises ConfigError."""
    for pair in pairs:
        if not pair.partition("=")[0].isidentifier() or "=" not in pair:
            raise ConfigError(f"--environment {pair}: give NAME=VALUE, such as NCCL_DEBUG=WARN")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def refuse_unfit(system: str, options: dict[str, object]) -> None:
    """ConfigError if an option was given that only the other batch system knows."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{', '.join(given)}: only {system} has this; leave it out")
