"""Files that start a run on a cluster: a batch script for Slurm, a PyTorchJob for Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .signals import PREEMPTED


@dataclass(frozen=True)
class BatchJob:
    """What a batch system must know of a run."""

    config: str  # a TOML file, or a workload's name
    folder: str  # of the run
    nodes: int = 1
    ranks_per_node: int = 4
    gpus_per_node: int = 0
    cpus_per_rank: int = 4
    hours: int = 12
    variables: Mapping[str, str] = field(default_factory=dict)  # environment of the ranks

    @property
    def name(self) -> str:
        """The job's name: that of the settings' file, in characters that batch systems allow."""
        return re.sub(r"[^\w.-]", "-", Path(self.config).stem)

    @property
    def command(self) -> list[str]:
        """The command that each rank runs."""
        return ["train", self.config, "--out", self.folder]


SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks}
#SBATCH --cpus-per-task={cpus}
{more}#SBATCH --time={hours}:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

{setup}# Ranks believe only those who know this, which reaches them in their environment.
HALOCLINE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export HALOCLINE_SECRET
export SRUN_CPUS_PER_TASK={cpus} # srun does not take it from the lines above
trap : TERM USR1                 # the ranks save when they are asked to leave; this script waits for them
newest() {{ ls -d {folder}/checkpoints/step-* 2>/dev/null | tail -n 1; }}
before=$(newest)
srun halocline {command}
status=$?

# {preempted}: the ranks were asked to leave, and saved; 138 and 143: before they could. The run goes on from its last
# checkpoint, on any number of ranks. After another failure, such as that of a node, it does if it had got further.
case $status in
  0) ;;
  {preempted} | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
  *) [ "$(newest)" = "$before" ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $status
"""


def slurm_script(
    job: BatchJob,
    partition: str | None = None,
    account: str | None = None,
    options: Sequence[str] = (),
    setup: Sequence[str] = (),
) -> str:
    """A batch script for Slurm that starts the run, and resumes it when submitted again.

    ``options`` are further options of sbatch, such as ``--constraint=gpu``; ``setup`` are lines of shell, such as the
    activation of an environment, that run before the ranks start.
    """
    told = {"gpus-per-node": job.gpus_per_node or None, "partition": partition, "account": account}
    more = [f"--{name}={value}" for name, value in told.items() if value is not None]
    more += [each if each.startswith("-") else f"--{each}" for each in options]
    lines = [*setup, *(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items())]
    return SLURM.format(
        name=job.name,
        nodes=job.nodes,
        ranks=job.ranks_per_node,
        cpus=job.cpus_per_rank,
        hours=job.hours,
        more="".join(f"#SBATCH {each}\n" for each in more),
        setup="".join(f"{line}\n" for line in lines) + ("\n" if lines else ""),
        command=shlex.join(job.command),
        folder=shlex.quote(job.folder),
        preempted=PREEMPTED,
    )


def kubernetes_manifest(job: BatchJob, image: str, claim: str | None = None) -> str:
    """A PyTorchJob of Kubeflow's training operator, as YAML.

    ``image`` has Halocline and torch installed. ``claim`` names a PersistentVolumeClaim that all pods can write to; it
    is mounted at ``/data``, which should hold the run's folder and the data. The operator tells torchrun how many nodes
    there are and where they meet.
    """
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    spec = {
        "nprocPerNode": str(job.ranks_per_node),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 3, "activeDeadlineSeconds": 3600 * job.hours},
        "pytorchReplicaSpecs": {
            kind: {"replicas": count, "restartPolicy": "OnFailure", "template": _pod(job, image, claim)}
            for kind, count in replicas.items()
            if count
        },
    }
    name = re.sub(r"[^a-z0-9-]", "-", job.name.lower()).strip("-")
    manifest = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": spec}
    head = "# kubectl apply -f FILE. The run resumes from its last checkpoint if a pod is restarted.\n"
    return head + "\n".join(_yaml(manifest)) + "\n"


def _pod(job: BatchJob, image: str, claim: str | None) -> dict[str, object]:
    """The template of a pod: one node of the run."""
    limits: dict[str, object] = {"cpu": str(job.ranks_per_node * job.cpus_per_rank)}
    if job.gpus_per_node:
        limits["nvidia.com/gpu"] = job.gpus_per_node
    container: dict[str, object] = {
        "name": "pytorch",  # the name that the operator looks for
        "image": image,
        "command": ["torchrun", "-m", "halocline.cli", *job.command],
        "env": [{"name": name, "value": value} for name, value in job.variables.items()],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    # Ranks of one pod exchange messages through shared memory, of which a pod has 64 MiB by default.
    volumes: list[object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if claim is not None:
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}, *container["volumeMounts"]]  # type: ignore[misc]
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    return {"spec": {"containers": [{k: v for k, v in container.items() if v != []}], "volumes": volumes}}


def _yaml(value: object, indent: str = "") -> list[str]:
    """Lines of YAML in block style; strings are quoted as JSON does it, which YAML reads alike."""
    lines: list[str] = []
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, (dict, list)) and each:
                deeper = indent + ("" if isinstance(each, list) else "  ")
                lines += [f"{indent}{key}:", *_yaml(each, deeper)]
            else:
                lines.append(f"{indent}{key}: {json.dumps(each)}")
    elif isinstance(value, list):
        for each in value:
            first, *rest = _yaml(each, indent + "  ") if isinstance(each, dict) else [f"{indent}  {json.dumps(each)}"]
            lines += [f"{indent}- {first.lstrip()}", *rest]
    return lines
