"""Weeks of training: nodes that fail, checkpoints that take time, and data that must reach the nodes first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..plan.machine import FileSystem, Machine, Quantity, Reliability
from .scenario import ScenarioError

USUAL = Reliability(
    node_mtbf_hours=Quantity(value=40_000, source="assumed", low=10_000, high=150_000),
    restart_s=Quantity(value=300, source="assumed", low=60, high=1200),
)
USUAL_FILES = FileSystem(
    name="shared file system",
    gb_per_s=Quantity(value=200, source="assumed", low=50, high=800),
    gb_per_s_per_node=Quantity(value=5, source="assumed", low=1, high=10),
)


@dataclass(frozen=True)
class LongRun:
    """What of the time of a long run is useful, if checkpoints are written as often as is best."""

    nodes: int
    mtbf_s: float  # of all nodes together
    checkpoint_s: float
    restart_s: float
    interval_s: float  # between checkpoints
    useful: float  # share of the time

    @property
    def lost(self) -> dict[str, float]:
        """Shares of the time by what they go into."""
        writing = self.checkpoint_s / (self.interval_s + self.checkpoint_s)
        return {"checkpoints": writing, "failures": max(0.0, 1 - writing - self.useful)}


def long_run(machine: Machine, devices: int, checkpoint_bytes: int, interval_s: float | None = None) -> LongRun:
    """Daly's model: the best interval is about sqrt(2 x checkpoint x mean time between failures).

    One replica writes, through the ports of its node; the state is equal on all.
    """
    reliability, files = machine.reliability or USUAL, machine.file_system or USUAL_FILES
    nodes = math.ceil(devices / machine.devices_per_node)
    mtbf = reliability.node_mtbf_hours.value * 3600 / nodes
    writing = checkpoint_bytes / (min(files.gb_per_s_per_node.value, files.gb_per_s.value) * 1e9)
    best = daly_interval(writing, mtbf)
    if interval_s is not None and not interval_s > 0:
        raise ScenarioError(f"checkpoints every {interval_s:g} s: the time between two is above zero")
    interval = best if interval_s is None else interval_s
    return LongRun(
        nodes,
        mtbf,
        writing,
        reliability.restart_s.value,
        interval,
        useful_share(interval, writing, mtbf, reliability.restart_s.value),
    )


def daly_interval(checkpoint: float, mtbf: float) -> float:
    """Daly 2006, to the third order; half the mean time between failures is not exceeded by much.

    >>> round(daly_interval(60.0, 86400.0))
    3180
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def useful_share(interval: float, checkpoint: float, mtbf: float, restart: float) -> float:
    """Daly's complete model: failures hit computing, writing and restarting alike, as a Poisson process."""
    wall = mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf)
    return interval / wall


@dataclass(frozen=True)
class StagingTime:
    """How long samples take to reach the nodes, in seconds."""

    naive_s: float  # every node copies what it wants from the file system
    shared_s: float  # each byte is read once, then nodes exchange
    first_epoch_s: float  # no copy at all: the samples of an epoch, read by all nodes
    bytes_per_node: float


def staging(machine: Machine, devices: int, dataset_bytes: float, per_node_bytes: float | None = None) -> StagingTime:
    """Each node wants ``per_node_bytes`` of the dataset, by default its share."""
    if not dataset_bytes > 0:
        raise ScenarioError(f"a dataset of {dataset_bytes:g} bytes: give its size, such as 500e12 for half a petabyte")
    files, nodes = machine.file_system or USUAL_FILES, math.ceil(devices / machine.devices_per_node)
    wanted = dataset_bytes / nodes if per_node_bytes is None else min(per_node_bytes, dataset_bytes)
    together = min(files.gb_per_s.value, nodes * files.gb_per_s_per_node.value) * 1e9
    port = machine.links[-1].gb_per_s.value * 1e9
    once = min(dataset_bytes, wanted * nodes)
    return StagingTime(wanted * nodes / together, once / together + wanted / port, dataset_bytes / together, wanted)
