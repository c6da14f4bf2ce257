"""Halocline: an unchanged PyTorch network on samples cut over a mesh of ranks, with the answer of one rank."""

from importlib import import_module
from types import ModuleType

from . import random
from .distribute import average_gradients, distribute, no_sync
from .errors import HaloclineError, MeshError, NoRule, RankFailure, Refused, ShardingError
from .geometry import Partition
from .rules import (
    WHOLE,
    Link,
    Operand,
    Output,
    Read,
    Recipe,
    composite,
    follow,
    from_tile,
    gather,
    read_whole,
    reshard,
    rule,
    shard,
    shard_inputs,
)
from .tensor import ShardedTensor, Sharding, unwrap
from .world import Mesh, init

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """``hc.testing`` on first use: training runs need none of it."""
    if name == "testing":
        return import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "WHOLE",
    "HaloclineError",
    "Link",
    "Mesh",
    "MeshError",
    "NoRule",
    "Operand",
    "Output",
    "Partition",
    "RankFailure",
    "Read",
    "Recipe",
    "Refused",
    "ShardedTensor",
    "Sharding",
    "ShardingError",
    "average_gradients",
    "composite",
    "distribute",
    "follow",
    "from_tile",
    "gather",
    "init",
    "no_sync",
    "random",
    "read_whole",
    "reshard",
    "rule",
    "shard",
    "shard_inputs",
    "unwrap",
]
