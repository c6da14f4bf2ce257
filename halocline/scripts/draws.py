"""Torch functions of a script whose answer needs more than this rank's tile: random numbers, and values read.

A script draws from torch's generator, which stands alike on all ranks. Numbers for a cut tensor are drawn for the whole
of it on every rank, as on one device, and each rank keeps those of its tile: they are the numbers of plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import Refused
from ..random import get_state
from ..random.backward import BACKWARD, run_backward
from ..random.functions import KERNELS
from ..reduction import is_averaged
from ..rules import gather
from ..rules.api import cut_like
from ..tensor import ShardedTensor, here, one_rank_strides
from ..tree import map_tensors, tensors_in

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout)
_ALPHA_DROPOUTS = (F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
_IN_PLACE = (torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_)
_VALUE_DEPENDENT = (torch.bernoulli, Tensor.bernoulli, torch.normal, torch.poisson, torch.binomial)
_VALUES = (
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("numpy", "__array__", "__dlpack__", "nonzero", "unique", "__format__"),
)
_READS = frozenset([getattr(Tensor, name) for name in _VALUES] + [torch.nonzero, torch.unique])
_REMEDY = "run the script with --random indexed, where each number depends on its place in the whole tensor"


class ScriptFunctions(TorchFunctionMode):
    """The mode in which a script runs on more than one rank.

    ``draws``: torch's generator gives all random numbers. ``adopt`` takes parameters that meet cut tensors although no
    optimizer has them, such as averages of weights.
    """

    def __init__(self, draws: bool, adopt: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._draws, self._adopt = draws, adopt

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in BACKWARD:  # which may recompute, and draw
            return run_backward(self, function, types, args, kwargs)
        if not any(issubclass(kind, ShardedTensor) for kind in types):
            return function(*args, **kwargs)
        if function in _READS:
            return _read(function, args, kwargs)
        if torch.is_grad_enabled() and (leaves := _unknown_leaves(args)):
            self._adopt(leaves)
        if not self._draws:
            return function(*args, **kwargs)
        if function in DRAWS:
            return DRAWS[function](function, args, kwargs)
        before = get_state()
        result = function(*args, **kwargs)
        if get_state() != before:
            name = getattr(function, "__name__", str(function))
            raise _refusal(name, "its random numbers on cut tensors are not those that torch draws on one device")
        return result


def _unknown_leaves(args: Any) -> list[Tensor]:
    """Parameters among the arguments whose gradients nobody averages."""
    plain = [tensor for tensor in tensors_in(args) if type(tensor) in (Tensor, nn.Parameter)]
    return [tensor for tensor in plain if tensor.requires_grad and tensor.is_leaf and not is_averaged(tensor)]


def _refusal(operation: str, why: str) -> Refused:
    return Refused(operation, here(), why, _REMEDY)


def _on_whole(function: Any, args: Any, kwargs: Any) -> Any:
    """The function on gathered tensors, with the same result on every rank."""
    return function(*map_tensors(gather, list(args)), **map_tensors(gather, kwargs))


def _read(function: Any, args: Any, kwargs: Any) -> Any:
    """Values of a cut tensor, gathered on every rank. An array cannot be written to: the tensor would not change."""
    result = _on_whole(function, args, kwargs)
    if function in (Tensor.numpy, Tensor.__array__):
        result.flags.writeable = False
    return result


# ---- draws: each takes the function and its arguments ----


def _first(args: Any, kwargs: Any) -> tuple[ShardedTensor, Any, Any]:
    """The cut tensor of a call whose first argument it is, and the other arguments."""
    if args:
        return args[0], args[1:], kwargs
    name = next(name for name in ("input", "self") if name in kwargs)
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


def _stand_in(tensor: ShardedTensor, fill: float = 0.0) -> Tensor:
    """A plain tensor of the global shape. torch draws in the order of memory, so the layout must be certain."""
    shape = tensor.sharding.shape
    contiguous = torch.empty(shape, device="meta").stride()
    if tensor.sharding.mesh.channels_last or one_rank_strides(tensor) != contiguous:
        raise _refusal("a random function", "the tensor is not contiguous, and torch draws in the order of its memory")
    return torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)


def _dropout(function: Any, args: Any, kwargs: Any) -> Tensor:
    """What a dropout does to ones and to zeros tells the factor and the offset of each element."""
    tensor, rest, named = _first(args, kwargs)
    training = named.get("training", named.get("train", rest[1] if len(rest) > 1 else function in _DROPOUTS))
    if not training:
        return function(*args, **kwargs)
    in_place = function in _IN_PLACE or named.get("inplace", False) or (len(rest) > 2 and rest[2])
    with torch.no_grad():
        state = torch.get_rng_state()
        factor, offset = function(_stand_in(tensor, 1.0), *rest, **named), None
        if function not in _DROPOUTS:
            torch.set_rng_state(state)  # the same numbers again
            offset = function(_stand_in(tensor), *rest, **named)
            factor = factor - offset
        factor = cut_like(factor, tensor.sharding)
    result = tensor.mul_(factor) if in_place else tensor * factor
    return result if offset is None else result.add_(cut_like(offset, tensor.sharding))


def _like(function: Any, args: Any, kwargs: Any) -> Tensor:
    """A new tensor of the same shape: values of the operand play no part."""
    tensor, rest, named = _first(args, kwargs)
    return cut_like(function(_stand_in(tensor), *rest, **named), tensor.sharding)


def _by_values(function: Any, args: Any, kwargs: Any) -> Tensor:
    """A new tensor drawn by the values of cut ones, which are gathered."""
    cut = next(value for value in (*args, *kwargs.values()) if isinstance(value, ShardedTensor))
    with torch.no_grad():
        drawn = function(*map_tensors(gather, list(args)), **map_tensors(gather, kwargs))
    return cut_like(drawn, cut.sharding) if drawn.shape == cut.shape else drawn


def _in_place(function: Any, args: Any, kwargs: Any) -> Tensor:
    """A cut tensor that is filled."""
    tensor, rest, named = _first(args, kwargs)
    whole = function(_stand_in(tensor), *map_tensors(gather, list(rest)), **map_tensors(gather, named))
    return tensor.copy_(cut_like(whole, tensor.sharding))


def _table() -> dict[Any, Callable[[Any, Any, Any], Tensor]]:
    """The functions that draw, and who answers for each."""
    return {
        **{
            function: _in_place
            for function, kernel in KERNELS.items()
            if kernel.inplace and function is not torch.rrelu_
        },
        **{function: _like for function, kernel in KERNELS.items() if kernel.new},
        **dict.fromkeys((*_DROPOUTS, *_ALPHA_DROPOUTS, *_IN_PLACE), _dropout),
        **dict.fromkeys(_VALUE_DEPENDENT, _by_values),
        **dict.fromkeys((torch.multinomial, Tensor.multinomial), _on_whole),
    }


#: Functions that draw, each with how. The library's own draws of any other function are refused.
DRAWS = _table()
