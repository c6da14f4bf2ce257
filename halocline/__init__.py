"""Halocline: an unchanged PyTorch network on samples cut over a mesh of ranks, with the answer of one rank."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import random
from ._torch_private import run_eagerly
from .choices import Choices
from .distribute import average_gradients, distribute, flush, lagged_gradients, load_lagged_gradients, no_sync
from .errors import HaloclineError, MeshError, NoRule, RankFailure, Refused, ShardingError
from .geometry import Partition
from .kernels import chunked
from .parts import PipelinedModel, pipeline, place
from .program.streaming import stream
from .reduction import all_reduce, register_comm_hook
from .rules import (
    PARTIAL,
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
    remedy,
    reshard,
    rule,
    shard,
    shard_inputs,
)
from .rules.annotate import annotate
from .rules.checkpoint_halos import keep_halos
from .rules.dtensor import from_dtensor, to_dtensor
from .tensor import ShardedTensor, Sharding, move, trust, unwrap
from .world import Mesh, init, place_parameter

if TYPE_CHECKING:  # found on first use at run time: not every program needs them
    from . import data as data
    from . import testing as testing
    from . import train as train
    from .plan.api import load_plan as load_plan
    from .plan.api import plan as plan

__version__ = "0.1.0"


_ON_FIRST_USE = ("data", "plan", "testing", "train")

for _entrance in (
    ShardedTensor.__torch_function__,
    shard,
    shard_inputs,
    from_tile,
    gather,
    move,
    reshard,
    annotate,
    unwrap,
):
    run_eagerly(_entrance)


def __getattr__(name: str) -> ModuleType:
    """``hc.data``, ``hc.plan``, ``hc.testing`` and ``hc.train`` on first use; ``hc.load_plan`` beside them."""
    if name == "load_plan":
        return getattr(import_module(".plan.api", __name__), name)
    if name in _ON_FIRST_USE:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE, "load_plan"})


__all__ = [
    "PARTIAL",
    "WHOLE",
    "Choices",
    "HaloclineError",
    "Link",
    "Mesh",
    "MeshError",
    "NoRule",
    "Operand",
    "Output",
    "Partition",
    "PipelinedModel",
    "RankFailure",
    "Read",
    "Recipe",
    "Refused",
    "ShardedTensor",
    "Sharding",
    "ShardingError",
    "all_reduce",
    "annotate",
    "average_gradients",
    "chunked",
    "composite",
    "distribute",
    "flush",
    "follow",
    "from_dtensor",
    "from_tile",
    "gather",
    "init",
    "keep_halos",
    "lagged_gradients",
    "load_lagged_gradients",
    "move",
    "no_sync",
    "pipeline",
    "place",
    "place_parameter",
    "random",
    "read_whole",
    "register_comm_hook",
    "remedy",
    "reshard",
    "rule",
    "shard",
    "shard_inputs",
    "stream",
    "to_dtensor",
    "trust",
    "unwrap",
]
