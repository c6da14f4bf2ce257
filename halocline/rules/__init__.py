"""Rules: for each torch function, what it needs and how it computes a box. One table, one executor."""

from . import (  # noqa: F401  each registers its rules when imported
    contract,
    direct,
    factory,
    grid,
    index,
    join,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    pool_indices,
    random,
    reduce,
    resample,
    reshape,
    view,
    whole_axis,
    window,
)
from .api import cut_like, from_tile, reshard, shard
from .executor import dispatch, planning
from .recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, follow, read_whole
from .table import composite, entries, forget_rule, rule
from .tree import gather, map_tensors, shard_inputs, tensors_in

__all__ = [
    "WHOLE",
    "Link",
    "Operand",
    "Output",
    "Read",
    "Recipe",
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
    "reshard",
    "rule",
    "shard",
    "shard_inputs",
    "tensors_in",
]
