"""The runtimes that can be measured, and where their ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ..errors import did_you_mean
from .graph import TaskBenchError


@dataclass(frozen=True)
class TaskRuntime:
    """``place`` says which processes run it; ``needs`` are packages, ``extra`` what installs them."""

    name: str
    about: str
    place: str = "loopback"
    needs: tuple[str, ...] = ()
    extra: str = ""

    def absent(self) -> str:
        """What to install; empty if everything is there."""
        missing = [name for name in self.needs if find_spec(name) is None]
        return f"{' and '.join(missing)} not installed: pip install 'halocline[{self.extra}]'" if missing else ""


_MPI = {"place": "mpi", "needs": ("mpi4py",), "extra": "mpi"}
RUNTIMES = {
    each.name: each
    for each in (
        TaskRuntime("world", "a World: small messages on our own sockets"),
        TaskRuntime("tensor", "a convolution on a sharded tensor, over that world"),
        TaskRuntime("world-gloo", "a World that leaves all messages to gloo"),
        TaskRuntime("tensor-gloo", "a convolution on a sharded tensor, over that world"),
        TaskRuntime("torch", "bare torch.distributed over gloo: isend and irecv"),
        TaskRuntime("torch-batch", "bare torch.distributed over gloo: batch_isend_irecv"),
        TaskRuntime("world-mpi", "a World over MPI", **_MPI),  # type: ignore[arg-type]
        TaskRuntime("tensor-mpi", "a convolution on a sharded tensor, over that world", **_MPI),  # type: ignore[arg-type]
        TaskRuntime("mpi", "bare mpi4py: Isend, Irecv, Waitall", **_MPI),  # type: ignore[arg-type]
        TaskRuntime("dask", "dask.distributed, a process a rank", "dask", ("dask", "distributed"), "taskbench"),
        TaskRuntime("ray", "ray, a process a rank", "ray", ("ray",), "taskbench"),
    )
}
#: Short names that stand for several.
FAMILIES = {
    "all": tuple(RUNTIMES),
    "ours": ("world", "tensor", "world-gloo", "tensor-gloo", "world-mpi", "tensor-mpi"),
    "bare": ("torch", "torch-batch", "mpi"),
}


def chosen_runtimes(names: Sequence[str]) -> list[TaskRuntime]:
    """By names or families, each once. Raises TaskBenchError for unknown ones."""
    wanted = [each for name in names for each in FAMILIES.get(name, (name,))]
    if unknown := [name for name in wanted if name not in RUNTIMES]:
        known = [*RUNTIMES, *FAMILIES]
        raise TaskBenchError(f"no runtime {unknown[0]!r}{did_you_mean(unknown[0], known)}; it is {', '.join(known)}")
    return [RUNTIMES[name] for name in dict.fromkeys(wanted)]
