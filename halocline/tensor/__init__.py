"""Sharded tensors: tiles that know their place."""

from .fetch import Fetch, recut
from .place import current_module, here, watch
from .sharded import CopyOf, ShardedTensor, unwrap, wrap
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
    "recut",
    "unwrap",
    "watch",
    "wrap",
]
