"""Sharded tensors: tiles that know their place."""

from .copy import CopyOf, plain, refuse_write, same_memory, whole_copy
from .fetch import Fetch, recut
from .place import current_module, here, watch
from .sharded import ShardedTensor, unwrap, wrap
from .sharding import Cut, Sharding, make_sharding

__all__ = [
    "CopyOf",
    "Cut",
    "Fetch",
    "ShardedTensor",
    "Sharding",
    "current_module",
    "here",
    "make_sharding",
    "plain",
    "recut",
    "refuse_write",
    "same_memory",
    "unwrap",
    "watch",
    "whole_copy",
    "wrap",
]
