"""What copies of the state in memory cost, and how soon a run is back when one of four emulated nodes is lost.

Each rank stands for a node: what its node keeps goes with a process of its own, which is killed. Steps with and without
copies alternate in blocks of ``every`` steps; each block makes its copy after its first step, so that what goes on in
the background ends in the same block.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import halocline as hc
from halocline.testing.pool import RankPool
from halocline.train.memory.copies import StateCopies
from halocline.train.optimizers import load_optimizer
from halocline.workloads.unet3d import UNet3d
from halocline.world import Label

NODES = 4
LIMIT = 1 << 30  # bytes of copies on a node
DEADLINE = 60.0
COST, RESTORE = 0.03, 2.0  # targets: share of a step, and steps that coming back may take
_BUSY = Label("busy", "bench copies", "control")
Case = tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, hc.Mesh]


def whole_weights() -> Case:
    """A 3D U-Net on four ranks along ``data``: weights and moments are the same on all nodes."""
    mesh = hc.Mesh(data=NODES)
    model = hc.distribute(UNet3d(8), mesh, deterministic=True)
    x = torch.randn(NODES, 1, 32, 32, 32, generator=torch.Generator().manual_seed(0))
    return model, torch.optim.AdamW(model.parameters(), 1e-4), hc.shard(x, mesh, {0: "data"}), mesh


def cut_weights() -> Case:
    """Two layers whose weights are cut over four ranks: each node's part is sent to the next node as well."""
    mesh = hc.Mesh(model=NODES)
    layout = {"0.weight": {0: "model"}, "0.bias": {0: "model"}, "2.weight": {1: "model"}}
    network = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512))
    model = hc.distribute(network, mesh, layout=layout)
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    return model, torch.optim.AdamW(model.parameters(), 1e-4), x, mesh


CASES = {"whole weights": whole_weights, "cut weights": cut_weights}


def begun(case: str) -> Case:
    """The same on every rank and in every call."""
    torch.manual_seed(4)
    return CASES[case]()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One step of training."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained(case: str, folder: Path, every: int, rounds: int, parents: list[int]) -> dict[str, Any]:
    """On each rank: seconds of blocks without and with copies, then steps until just before the next copy."""
    model, optimizer, x, mesh = begun(case)
    everyone, copies = tuple(range(mesh.size)), StateCopies(folder, mesh, LIMIT, DEADLINE, parents[mesh.rank])
    made, copied, hashed, sizes = 0, 0, "", 0
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        step(model, optimizer, x)
        made += 1
    for number in range(2 * rounds + 1):
        with_copies = number == 2 * rounds or (number % 2 == 0) == (number // 2 % 2 == 0)  # each is first in turn
        began = time.perf_counter()
        for place in range(every):
            step(model, optimizer, x)
            made += 1
            busy = mesh.world.maximum(torch.tensor([float(copies.busy)]), everyone, _BUSY)
            if with_copies and place == 0 and not busy.item():
                tensors = state(model, optimizer)
                copies.copy(made, tensors, {"step": made})
                copied = made
                if number == 2 * rounds:
                    hashed, sizes = hash_of(model, optimizer)
        if number < 2 * rounds:
            seconds[with_copies].append((time.perf_counter() - began) / every)
    end = time.monotonic() + DEADLINE
    while copies.busy and time.monotonic() < end:
        time.sleep(0.002)
    mesh.world.maximum(torch.zeros(1), everyone, _BUSY)  # all have copied before any node is lost
    copies.close(end=False)
    return {"without": seconds[False], "with": seconds[True], "steps": made, "copied": copied, "hash": hashed,
            "bytes": sizes}  # fmt: skip


def restored(case: str, folder: Path, parents: list[int]) -> dict[str, Any]:
    """On each rank, one of them on a new node: seconds until the state of the others' memory is in model and
    optimizer."""
    model, optimizer, _, mesh = begun(case)
    copies = StateCopies(folder, mesh, LIMIT, DEADLINE, parents[mesh.rank])
    began = time.perf_counter()
    found = copies.load_latest(state(model, optimizer), -1)
    if found is None:
        return {"step": -1, "seconds": time.perf_counter() - began, "hash": ""}
    model.load_state_dict(found.tensors["model"])
    load_optimizer(optimizer, found.tensors["optimizer"])
    seconds = time.perf_counter() - began
    told = {"step": found.step, "seconds": seconds, "hash": hash_of(model, optimizer)[0]}
    copies.close(end=True)
    return told


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is copied."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def hash_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, int]:
    """A hash of weights and moments, and their bytes. By all ranks together."""
    words, size = hashlib.sha256(), 0
    moments = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    for tensor in (*model.parameters(), *model.buffers(), *moments):
        whole = hc.gather(tensor.detach())
        words.update(whole.contiguous().numpy().tobytes())
        size += whole.nbytes
    return words.hexdigest(), size


@contextlib.contextmanager
def nodes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that stand for the launchers of nodes: with each goes what its node has in memory."""
    started = [subprocess.Popen(["sleep", "3600"]) for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


def measure_copies(names: list[str], every: int, rounds: int, deadline: float) -> dict[str, Any]:
    """For each case: what copies cost, and what coming back takes when the last node is lost and a new one comes."""
    made = {name: _measured(name, every, rounds, deadline) for name in names}
    met = all(each["met"] for each in made.values())
    return {
        "every": every,
        "cost": max(each["cost"] for each in made.values()),
        "restore_steps": max(each["restore_steps"] for each in made.values()),
        "repeated": max(each["repeated"] for each in made.values()),
        "targets": {"cost": COST, "restore_steps": RESTORE, "repeated": every},
        "cases": made,
        "met": met,
    }


def _measured(case: str, every: int, rounds: int, deadline: float) -> dict[str, Any]:
    with nodes(NODES + 1) as there, tempfile.TemporaryDirectory(prefix="halocline-copies-") as name:
        pids, folder = [each.pid for each in there], Path(name)
        with RankPool(NODES, collective_timeout=DEADLINE) as pool:
            told = pool.run(trained, case, folder, every, rounds, pids[:NODES], deadline=deadline)
        there[NODES - 1].kill()
        there[NODES - 1].wait()
        with RankPool(NODES, collective_timeout=DEADLINE) as pool:
            back = pool.run(restored, case, folder, [*pids[: NODES - 1], pids[NODES]], deadline=deadline)
    without, with_copies = (told[0][key] for key in ("without", "with"))
    usual = median(without)
    # Neighbours are compared, so that what the machine does meanwhile counts for both alike.
    more = [late - early for late, early in zip(with_copies, without, strict=True)]
    cost, seconds = median(more) / usual, max(each["seconds"] for each in back)
    repeated = told[0]["steps"] - back[0]["step"]
    same = {each["hash"] for each in back} == {told[0]["hash"]} and back[0]["step"] == told[0]["copied"]
    return {
        "step": usual,
        "step_with_copies": median(with_copies),
        "cost": cost,
        "bytes": told[0]["bytes"],
        "restore": seconds,
        "restore_steps": seconds / usual,
        "repeated": repeated,
        "same_bits": same,
        "met": same and cost < COST and seconds <= RESTORE * usual and repeated <= every,
    }
