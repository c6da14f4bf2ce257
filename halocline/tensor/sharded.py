"""The sharded tensor: this rank's tile, which shows the global shape and runs torch functions by rules.

Two nets hang below each other. ``__torch_function__`` sends every torch function to its rule, or refuses it.
``__torch_dispatch__`` raises for whatever slipped past the first (TorchScript, vmap, code under a disabled torch
function): on the bare tile it would give a wrong number.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch_private import TENSOR_MODULE, autograd_state, no_torch_function
from ..errors import Refused
from ..kernels.layout import memory_format_of
from .copy import CopyOf, Family, Loose
from .leaf import watch_leaf
from .place import here
from .sharding import Sharding

Dispatcher = TypeVar("Dispatcher", bound=Callable[..., Any])


def _alias_nodes() -> tuple[type, ...]:
    """The classes of the nodes that torch gives a shell over its tile: an alias, or a view where one was written to."""
    leaf = torch.zeros(1, requires_grad=True)
    return type(torch.ops.aten.alias(leaf).grad_fn), type(leaf.as_strided((1,), (1,)).grad_fn)


_ALIAS_NODES = _alias_nodes()


_dispatchers: list[Callable[..., Any]] = []


def dispatched_by(run: Dispatcher) -> Dispatcher:
    """Register what runs torch functions on sharded tensors."""
    _dispatchers.append(run)
    return run


class _TensorKind(type(Tensor)):  # type: ignore[misc]
    """The class of the class below, whose ``__module__`` does not say where to find it: pickle asks here."""


class ShardedTensor(Tensor, metaclass=_TensorKind):
    """Made by :func:`wrap`. ``sharding`` says how it lies on the mesh; :func:`unwrap` gives this rank's tile."""

    __module__ = TENSOR_MODULE
    sharding: Sharding
    _tile: Tensor
    _copy_of: CopyOf | None = None
    _strides: tuple[int, ...] | None = None  # on one rank, where it is not dense there (strides.py)
    _family: Family | None = None  # all sharded tensors on its memory, where it matters (copy.py)
    _takes_shells: bool = False  # does a hook make tiles of gradients that are sharded tensors?
    _preloaded_halo: object | None = None  # where the tile came with its rim (preloaded_halo.py)
    _is_param: bool = False  # is it a parameter of a module? torch's own mark

    @staticmethod
    def __torch_function__(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every torch function with a sharded tensor among its arguments comes here, and is run by its rule.

        That is ``dispatch`` in ``rules/executor.py``, which stands above this room and registers itself.
        """
        return _dispatchers[-1](function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:  # asked for by torch where it saves a tensor
            return _detached(*args)
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
        tile = unwrap(self)
        if not tile.is_leaf:
            raise RuntimeError("Only leaves of the graph can be copied deeply, cut or plain; detach this tensor first")
        twin = tile.detach().clone().requires_grad_(tile.requires_grad)
        twin.grad = None if tile.grad is None else tile.grad.clone()
        with torch.enable_grad():
            shell = wrap(twin, self.sharding)
        shell._is_param = self._is_param
        return shell


def _find_class(name: str) -> Any:
    return globals()[name]


copyreg.pickle(_TensorKind, lambda kind: (_find_class, (kind.__qualname__,)))


def take_shells(shell: ShardedTensor) -> None:
    """Let a sharded gradient of ``shell`` go on as a tile.

    Under ``no_grad`` an autograd Function may be at work that recomputes in its backward (a reentrant checkpoint).
    It hands out the gradients of its inputs as sharded tensors, while the graph of the tiles is plain.
    """
    if not shell._takes_shells:
        shell._takes_shells = True
        Tensor.register_hook(shell, _as_tile)


def _as_tile(gradient: Tensor) -> Tensor | None:
    return unwrap(gradient) if isinstance(gradient, ShardedTensor) else None


def simple_tiles(tensors: list[Tensor]) -> list[Tensor] | None:
    """:func:`unwrap` for all operands of a call at once; None if one of them is a marked copy or of a foreign class."""
    tiles = []
    differentiable = torch.is_grad_enabled()
    with no_torch_function():
        for tensor in tensors:
            kind: Any = type(tensor)
            if isinstance(tensor, ShardedTensor):
                node, tile = tensor.grad_fn, tensor._tile
                # Marked copies take the long way, where their marks are checked.
                if tensor._copy_of is not None or tensor._strides is not None:
                    return None
                if (
                    not isinstance(node, _ALIAS_NODES)
                    if node is not None
                    else tensor.requires_grad and not tile.requires_grad
                ):
                    tile = unwrap(tensor)  # or says what is wrong
                if node is not None and not differentiable:
                    take_shells(tensor)
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
    # From the first tile with channels last on, layouts on one rank can no longer be told.
    if not tile.is_contiguous() and not sharding.mesh.channels_last:
        sharding.mesh.channels_last = memory_format_of(tile) is not torch.contiguous_format
    shell = tile.as_subclass(ShardedTensor)
    shell.sharding, shell._tile = sharding, tile
    return shell


def _detached(shell: ShardedTensor) -> ShardedTensor:
    """The same tile without a node; torch may give it one afterwards, which is looked up at its first use."""
    detached = wrap(shell._tile.detach(), shell.sharding)
    detached._copy_of = Loose(shell._copy_of)
    return detached


def unwrap(tensor: Tensor) -> Tensor:
    """The plain tile; a plain tensor is its own.

    A shell that a user's autograd Function made is detached from its tile: the two are joined, or the use is refused.
    """
    if not isinstance(tensor, ShardedTensor):
        return tensor
    node, requires_grad = autograd_state(tensor)
    # A user's autograd Function has made this shell.
    if node is not None and not isinstance(node, _ALIAS_NODES):
        from .foreign import join  # which is made of what is here

        join(tensor, node)
    if node is not None and not torch.is_grad_enabled():
        with no_torch_function():
            take_shells(tensor)
    if tensor._copy_of is not None:
        if isinstance(tensor._copy_of, Loose):
            _fasten(tensor, tensor._copy_of, requires_grad)
        else:
            tensor._copy_of.check()
    tile = tensor._tile
    if requires_grad and not tile.requires_grad:
        raise Refused(
            "requires_grad", here(), "the shell asks for a gradient and its tile does not", "use hc.from_tile"
        )
    return tile


def _fasten(shell: ShardedTensor, loose: Loose, requires_grad: bool) -> None:
    """By now torch has given the shell its node, if it was to get one."""
    from .foreign import settle

    loose.check()
    shell._copy_of = loose.mark
    if requires_grad and not shell._tile.requires_grad:
        settle(shell)
