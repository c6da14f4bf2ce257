"""Sums over all ranks that a model takes by itself, with ``torch.distributed``, as modules written for DDP do.

On a cut input such a module's statistics are those of the whole sample already, on every rank: the sum would count them
once for each rank. On plain inputs, which are local batches, it is right.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ._torch_private import collectives_begun, run_eagerly
from .errors import Refused
from .reduction import is_dtensor
from .tensor import ShardedTensor, here
from .tree import tensors_in

#: The flag by which MONAI's vector quantizers, and others made after them, sum over all ranks.
SWITCH = "ddp_sync"
_BEFORE = "_halocline_before"


def watch_collectives(model: nn.Module) -> None:
    """Switch known sums off for the time of a forward on cut inputs; refuse the result where others were taken.

    Under DDP and FSDP2 torch itself talks to all ranks in a forward, and nothing is refused.
    """
    for module in model.modules():
        if isinstance(getattr(module, SWITCH, None), bool):
            module.register_forward_pre_hook(_switch_off, with_kwargs=True)
            module.register_forward_hook(_switch_back, with_kwargs=True, always_call=True)
    wrapped = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
    if dist.is_initialized() and not wrapped and not any(map(is_dtensor, model.parameters())):
        model.register_forward_pre_hook(_count, with_kwargs=True)
        model.register_forward_hook(_check)


def _has_cut(args: Any, kwargs: Any) -> bool:
    return any(isinstance(tensor, ShardedTensor) for tensor in tensors_in((args, kwargs)))


def _switch_off(module: nn.Module, args: Any, kwargs: Any) -> None:
    if getattr(module, SWITCH) and _has_cut(args, kwargs):
        module.__dict__[_BEFORE] = True
        setattr(module, SWITCH, False)


def _switch_back(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if module.__dict__.pop(_BEFORE, False):
        setattr(module, SWITCH, True)


def _count(module: nn.Module, args: Any, kwargs: Any) -> None:
    module.__dict__[_BEFORE] = collectives_begun() if _has_cut(args, kwargs) else None


def _check(module: nn.Module, args: Any, output: Any) -> None:
    before = module.__dict__.pop(_BEFORE, None)
    if before is not None and collectives_begun() != before:
        raise Refused(
            "torch.distributed",
            here(),
            "the model talked to all ranks by itself, and what is whole in it is that of all ranks already",
            "switch the model's own synchronisation off",
        )


for _hook in (_switch_off, _switch_back, _count, _check):
    run_eagerly(_hook)  # torch.compile cannot look into process groups
