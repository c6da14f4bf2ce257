"""In-place writes of cut values into plain tensors, as ``torch.zeros(shape).scatter_(1, labels, 1)`` does.

The value is gathered, and the tensor stays plain. A large tensor that a running module has made for itself becomes a
sharded one instead, cut as the value is: the same object, which holds this rank's tile from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch_private import running_modules, sharers, take_place
from ..tensor import ShardedTensor, Sharding
from .api import cut_like


def becomes_cut(target: Tensor, sharding: Sharding) -> bool:
    """Make ``target`` a sharded tensor if nothing but the running module can see it; say whether it was done.

    Every rank answers alike, since all run the same program.
    """
    if not _made_here(target):
        return False
    shell = cut_like(target, sharding)
    # The user's variable keeps pointing to this object, so the object itself becomes sharded.
    target.__class__ = ShardedTensor
    target.sharding, target._tile = shell.sharding, shell._tile  # type: ignore[attr-defined]
    take_place(target, shell)
    return True


def _made_here(tensor: Tensor) -> bool:
    """No other tensor or array shares its memory, and no running module keeps it: it is a local of a forward."""
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_inference() or tensor.layout != torch.strided:
        return False
    # Another holder of this memory would see the tensor change its shape.
    if sharers(tensor) > 1 or not tensor.untyped_storage().resizable():  # memory of numpy and of others is not
        return False
    modules = list(running_modules())
    return bool(modules) and not any(tensor is value for module in modules for value in _kept(module))


def _kept(module: torch.nn.Module) -> list[object]:
    return [*module.__dict__.values(), *module.buffers(recurse=False)]
