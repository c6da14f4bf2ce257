"""On the ranks of ``bench limit-line``: the exchanges of a U-Net's step with its compute slept, and METG."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halocline.distribute import distribute, no_sync
from halocline.program import Record, record
from halocline.program import dry as dry_ranks
from halocline.rules import shard
from halocline.taskbench.exchanges import over_world
from halocline.taskbench.execute import MessageRun, run_graphs
from halocline.taskbench.graph import PAIR, TaskGraph
from halocline.taskbench.kernels import make_kernel
from halocline.workloads.unet3d import UNet3d
from halocline.world import Begun, Computed, Label, Mesh, PendingExchange, Waited, this_world

CLASSES = 3
LABEL = Label("replay", "limit-line", "control")


@dataclass(frozen=True)
class UNetCase:
    """A U-Net on a volume of depth x side x side, cut along depth, on ranks that compute so many FLOP a second."""

    depth: int
    side: int
    width: int
    flops_per_second: float


@dataclass
class StepFigures:
    """One rank's step: seconds by round, what of it was slept, and its exchanges."""

    seconds: list[float]
    compute: float
    exchanges: int
    message_bytes: float


_records: dict[UNetCase, Record] = {}


def replay(case: UNetCase, rounds: int) -> StepFigures:
    """Run the step's exchanges as this rank would, with real messages, and sleep where it would compute."""
    step = _records.setdefault(case, _recorded(case))
    begun = [event for event in step.exchanges if event.sends or event.receives]
    sizes = [size for event in begun for _, size in (*event.sends, *event.receives)]
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        _play(step, case)
        seconds.append(time.perf_counter() - began)
    return StepFigures(seconds[1:], step.flops / case.flops_per_second, len(begun), fmean(sizes) if sizes else 0.0)


def _recorded(case: UNetCase) -> Record:
    """The forward and backward of this rank, without gradient averages, on meta tensors."""
    with dry_ranks(dist.get_rank(), dist.get_world_size()):
        mesh = Mesh(depth=dist.get_world_size())
        with torch.device("meta"):
            model = distribute(UNet3d(case.width, 1, CLASSES), mesh)
            volume = torch.empty(1, 1, case.depth, case.side, case.side)
            target = torch.empty(1, case.depth, case.side, case.side, dtype=torch.long)
        x, y = shard(volume, mesh, {2: "depth"}), shard(target, mesh, {1: "depth"})

        def step() -> None:
            with no_sync(model):
                F.cross_entropy(model(x), y).backward()

        return record(step, mesh)


def _play(step: Record, case: UNetCase) -> None:
    """Every event in its turn: compute is slept, exchanges begin and are waited for where the step does."""
    world, sleep, pending, tag = this_world(), make_kernel("sleep"), dict[int, PendingExchange](), 0
    for event in step.events:
        if isinstance(event, Computed):
            sleep(round(event.flops / case.flops_per_second * 1e6))
        elif isinstance(event, Begun):
            tag += 1
            outgoing = [(peer, torch.empty(size, dtype=torch.uint8), tag) for peer, size in event.sends]
            incoming = [(peer, torch.empty(size, dtype=torch.uint8), tag) for peer, size in event.receives]
            pending[event.number] = world.begin_tagged(outgoing, incoming, LABEL)
        elif isinstance(event, Waited) and event.event in pending:
            pending.pop(event.event).wait()
    for exchange in pending.values():
        exchange.wait()


def granularity_seconds(message_bytes: float, steps: int, sizes: list[int]) -> list[float]:
    """Of a stencil whose faces have so many bytes, for each number of microseconds that a task sleeps."""
    world = this_world()
    output = max(PAIR, round(message_bytes / PAIR) * PAIR)
    graph = TaskGraph("stencil_1d", steps, world.size, output_bytes=output, kernel="sleep")
    run = MessageRun(graph, world.size, world.rank, over_world(world))
    found = []
    for size in [sizes[-1], *sizes]:
        dist.barrier()
        found.append(run_graphs([run], size))
    return found[1:]
