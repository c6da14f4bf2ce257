"""Sharded tensors: this rank's tile together with how the whole tensor lies on the mesh."""

from ..world import OwnFunction
from .copy import CopyOf, counting_writes, family_of, note_write, plain, refuse_write, same_memory, whole_copy
from .fetch import (
    ArrivalMean,
    Fetch,
    arrival_of,
    enter,
    recut,
)
from .foreign import node_of, trust
from .guard import DATA
from .leaf import mean_over_whole_axes, watch_leaf
from .move import move
from .parameter import become_cut
from .place import current_module, here, watch
from .preloaded_halo import from_preloaded_halo, wrap_with_halo
from .sharded import ShardedTensor, dispatched_by, simple_tiles, unwrap, wrap
from .sharding import Cut, Sharding, make_sharding
from .strides import Strides, dense_strides, on_one_rank, one_rank_strides
from .undrawn import undrawn

__all__ = [
    "DATA",
    "ArrivalMean",
    "CopyOf",
    "Cut",
    "Fetch",
    "OwnFunction",
    "ShardedTensor",
    "Sharding",
    "Strides",
    "arrival_of",
    "become_cut",
    "counting_writes",
    "current_module",
    "dense_strides",
    "dispatched_by",
    "enter",
    "family_of",
    "from_preloaded_halo",
    "here",
    "make_sharding",
    "mean_over_whole_axes",
    "move",
    "node_of",
    "note_write",
    "on_one_rank",
    "one_rank_strides",
    "plain",
    "recut",
    "refuse_write",
    "same_memory",
    "simple_tiles",
    "trust",
    "undrawn",
    "unwrap",
    "watch",
    "watch_leaf",
    "whole_copy",
    "wrap",
    "wrap_with_halo",
]
