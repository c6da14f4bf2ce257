"""Thousands of tiny steps on four ranks in each mode: does anything grow? Memory, descriptors and threads of each rank.

Modes are the ways in which gradients travel: after backward, while the next forward runs, a step late, over rings, and
over MPI. Numbers are taken once everything has been used (caches, buffers, pools), and again and again until the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halocline as hc
from halocline.testing.pool import RankPool

RANKS, SETTLED = 4, 1000  # steps before the first number
GROWTH = 8.0  # MB of a rank that count as flat: the allocator's rest
MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "next-forward": {"overlap": "next-forward"},
    "lag": {"lag": 1},
    "rings": {"rings": (2, 2)},
    "halos": {"halos": True},
}


@dataclass(frozen=True)
class Sample:
    """What one rank holds after a step."""

    step: int
    megabytes: float
    descriptors: int
    threads: int


def sample(step: int) -> Sample:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    counts = [sum(1 for _ in Path(f"/proc/self/{name}").iterdir()) for name in ("fd", "task")]
    return Sample(step, round(megabytes, 2), *counts)


class TinyNetwork(nn.Module):
    """A convolution that exchanges halos, a norm that sums, and a layer whose gradients travel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Conv1d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each point."""
        made: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return made


def train_long(mode: str, steps: int, every: int) -> list[dict[str, Any]]:
    """On each rank: so many steps, and what the rank holds after every ``every`` of them."""
    torch.manual_seed(1)
    told = dict(MODES.get(mode, {}))
    halos = bool(told.pop("halos", False))
    mesh = hc.Mesh(width=RANKS) if halos else hc.Mesh(data=RANKS)
    model = TinyNetwork()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if told.get("overlap") == "next-forward":
        told["optimizer"] = optimizer
    hc.distribute(model, mesh, **told)
    x, found = torch.randn(RANKS, 2, 16), []
    cut = hc.shard(x, mesh, {2: "width"} if halos else {0: "data"})
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(cut).square().mean().backward()
        optimizer.step()
        if step >= min(SETTLED, steps // 2) and step % every == 0:
            found.append(asdict(sample(step)))
    return found


def measure_long_run(modes: list[str], steps: int, deadline: float) -> dict[str, Any]:
    """Run each mode on ranks of its own; says for each by how much the worst rank grew after it had settled."""
    made = {}
    every = max(1, steps // 20)
    for mode in modes:
        ranks = _over_mpi(steps, every, deadline) if mode == "MPI" else _over_processes(mode, steps, every, deadline)
        growth = {
            key: max(each[-1][key] - each[0][key] for each in ranks) for key in ("megabytes", "descriptors", "threads")
        }
        flat = growth["megabytes"] <= GROWTH and growth["descriptors"] <= 0 and growth["threads"] <= 0
        made[mode] = {"steps": steps, "growth": growth, "flat": flat, "ranks": ranks}
    return {"modes": made, "flat": all(each["flat"] for each in made.values())}


def _over_processes(mode: str, steps: int, every: int, deadline: float) -> list[list[dict[str, Any]]]:
    with RankPool(RANKS) as pool:
        return pool.run(train_long, mode, steps, every, deadline=deadline)


def _over_mpi(steps: int, every: int, deadline: float) -> list[list[dict[str, Any]]]:
    """Ranks that mpiexec starts; each writes what it found to a file."""
    launcher = shutil.which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if launcher is None:
        raise hc.HaloclineError("no mpiexec here; `pip install mpich`")
    with tempfile.TemporaryDirectory(prefix="halocline-long-") as name:
        told = [name, str(steps), str(every)]
        command = [launcher, "-n", str(RANKS), sys.executable, "-m", "benchmarks.long_run", *told]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, check=True, timeout=deadline)
        return [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _mpi_rank() -> None:
    """A rank under mpiexec."""
    folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    hc.init()
    found = train_long("overlap", steps, every)
    (folder / f"{hc.Mesh(data=RANKS).rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _mpi_rank()
