"""Sharded tensors: tiles that know their place."""

from .copy import CopyOf, plain, refuse_write, same_memory, whole_copy
from .fetch import Fetch, check_entering, entering, recut
from .foreign import node_of, trust
from .leaf import mean_over_whole_axes, watch_leaf
from .place import current_module, here, watch
from .sharded import ShardedTensor, simple_tiles, unwrap, wrap
from .sharding import Cut, Sharding, make_sharding
from .wide import from_rim, wrap_with_rim

__all__ = [
    "CopyOf",
    "Cut",
    "Fetch",
    "ShardedTensor",
    "Sharding",
    "check_entering",
    "current_module",
    "entering",
    "from_rim",
    "here",
    "make_sharding",
    "mean_over_whole_axes",
    "node_of",
    "plain",
    "recut",
    "refuse_write",
    "same_memory",
    "simple_tiles",
    "trust",
    "unwrap",
    "watch",
    "watch_leaf",
    "whole_copy",
    "wrap",
    "wrap_with_rim",
]
