"""Rules: for each torch function, what it needs and how it computes a box. One table, one executor."""

from . import (
    contract,
    direct,
    index,
    join,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    reduce,
    reshape,
    view,
    whole_axis,
    window,
)
from .api import cut_like, from_tile, gather, reshard, shard
from .executor import dispatch
from .recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work, follow, read_whole
from .table import composite, entries, forget_rule, rule

__all__ = [
    "WHOLE",
    "Link",
    "Operand",
    "Output",
    "Read",
    "Recipe",
    "Work",
    "composite",
    "contract",
    "cut_like",
    "direct",
    "dispatch",
    "entries",
    "follow",
    "forget_rule",
    "from_tile",
    "gather",
    "index",
    "join",
    "pad",
    "pointwise",
    "pool",
    "read_whole",
    "reshape",
    "reshard",
    "rule",
    "shard",
    "view",
    "whole_axis",
    "window",
]
