"""Rules: for each torch function, what it needs and how it computes a box. One table, one executor."""

from ..tree import map_tensors, tensors_in
from . import direct, families, sparse_rows  # noqa: F401  each registers its rules when imported
from .api import cut_like, from_tile, gather, reshard, shard, shard_inputs
from .asking_torch import planning
from .executor import dispatch
from .partial import PARTIAL
from .recipe import (
    WHOLE,
    Link,
    Local,
    Moments,
    Operand,
    Output,
    Read,
    Recipe,
    Reduced,
    Reduction,
    RingSteps,
    RingWork,
    Tracking,
    Work,
    follow,
    read_whole,
)
from .remedy import remedy
from .table import composite, entries, forget_rule, rule

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Link",
    "Local",
    "Moments",
    "Operand",
    "Output",
    "Read",
    "Recipe",
    "Reduced",
    "Reduction",
    "RingSteps",
    "RingWork",
    "Tracking",
    "Work",
    "composite",
    "cut_like",
    "dispatch",
    "entries",
    "follow",
    "forget_rule",
    "from_tile",
    "gather",
    "map_tensors",
    "planning",
    "read_whole",
    "remedy",
    "reshard",
    "rule",
    "shard",
    "shard_inputs",
    "tensors_in",
]
