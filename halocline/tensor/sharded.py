"""The sharded tensor: this rank's tile, which shows the global shape and runs torch functions by rules.

Two nets hang below each other. ``__torch_function__`` sends every torch function to its rule, or refuses it.
``__torch_dispatch__`` raises for whatever slipped past the first (TorchScript, vmap, code under a disabled torch
function): on the bare tile it would give a wrong number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .._torch_private import autograd_state, no_torch_function
from ..errors import Refused
from .copy import CopyOf
from .leaf import watch_leaf
from .place import here
from .sharding import Sharding

_OURS = ("AliasBackward0", "AsStridedBackward0")


class ShardedTensor(Tensor):
    """Made by :func:`wrap`. ``sharding`` says how it lies on the mesh; :func:`unwrap` gives this rank's tile."""

    sharding: Sharding
    _tile: Tensor
    _copy_of: CopyOf | None = None
    #: ``__torch_function__`` is set by the rules' executor.

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Refused(
            str(function),
            here(),
            "it reached a sharded tensor behind torch's function protocol (TorchScript, vmap, torch.tensor, "
            "a disabled torch function), where only this rank's tile is seen",
            "call it on hc.gather(x), or write it with ordinary torch functions",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(tile {list(self._tile.shape)} of {self.sharding}, dtype={self._tile.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("pickle", here(), "a tile without its mesh means nothing elsewhere", "save hc.gather(x) instead")

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        return wrap(self._tile.detach().clone().requires_grad_(self._tile.requires_grad), self.sharding)


def simple_tiles(tensors: list[Tensor]) -> list[Tensor] | None:
    """:func:`unwrap` for all operands of a call at once; None if one of them is a marked copy or of a foreign class."""
    tiles = []
    with no_torch_function():
        for tensor in tensors:
            kind: Any = type(tensor)
            if isinstance(tensor, ShardedTensor):
                node, tile = tensor.grad_fn, tensor._tile
                if tensor._copy_of is not None:
                    return None
                if node.name() not in _OURS if node is not None else tensor.requires_grad and not tile.requires_grad:
                    unwrap(tensor)  # says what is wrong
                tiles.append(tile)
            elif kind is Tensor or kind is Parameter:
                tiles.append(tensor)
            else:
                return None
    return tiles


def wrap(tile: Tensor, sharding: Sharding) -> ShardedTensor:
    """The tile as a sharded tensor; the tile itself stays the node of the autograd graph."""
    if tile.shape != sharding.tile_shape:
        raise AssertionError(f"a tile of {tuple(tile.shape)} was made where {sharding} owns {sharding.tile_shape}")
    if tile.requires_grad and tile.is_leaf:
        watch_leaf(tile, sharding)
    shell = tile.as_subclass(ShardedTensor)
    shell.sharding, shell._tile = sharding, tile
    return shell


def unwrap(tensor: Tensor) -> Tensor:
    """The plain tile; a plain tensor is its own.

    A shell that somebody else's autograd Function made has lost touch with its tile, and is refused.
    """
    if not isinstance(tensor, ShardedTensor):
        return tensor
    node, requires_grad = autograd_state(tensor)
    if node is not None and node.name() not in _OURS:  # type: ignore[attr-defined]
        raise Refused(
            node.name().removesuffix("Backward"),  # type: ignore[attr-defined]
            here(),
            "an autograd Function made this tensor, and its backward would see this rank's tile alone",
            "write it with torch functions, or give it a rule with @hc.rule",
        )
    tile = tensor._tile
    if tensor._copy_of is not None:
        tensor._copy_of.check()
    if requires_grad and not tile.requires_grad:
        raise Refused(
            "requires_grad", here(), "the shell asks for a gradient and its tile does not", "use hc.from_tile"
        )
    return tile
