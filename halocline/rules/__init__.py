"""Rules: for each torch function, what it needs and how it computes a box. One table, one executor."""

from . import direct, loss, norm, pad, pointwise, pool, reduce, window
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
    "cut_like",
    "direct",
    "dispatch",
    "entries",
    "follow",
    "forget_rule",
    "from_tile",
    "gather",
    "pad",
    "pointwise",
    "pool",
    "read_whole",
    "reshard",
    "rule",
    "shard",
    "window",
]
