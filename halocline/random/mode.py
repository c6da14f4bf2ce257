"""Random functions on plain tensors, drawn by the same generator: for the reference on one rank, and for whole code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import Refused
from ..tensor import current_module, here
from ..tensor.copy import WholeCopy
from ..tensor.undrawn import Undrawn
from .backward import BACKWARD, run_backward
from .categories import multinomial
from .factories import FACTORIES, normal
from .functions import KERNELS, Kernel
from .generator import GlobalBox
from .initialize import INITIALIZERS
from .state import State, current, swap


@contextmanager
def reproducible(seed: int | None = None) -> Iterator[None]:
    """Inside, random functions draw by (seed, call, global index) on plain tensors as they do on sharded ones.

    Numbers begin at ``seed`` and the state before returns at the end; without a seed they go on from where they are.
    Keep forward and backward inside together: recomputation draws too. A torch.Generator of one's own stays in use.
    """
    # The numbers of this seed, and afterwards those that would have come without this block.
    old = current() if seed is None else swap(State(seed))
    try:
        with _Replaced():
            yield
    finally:
        if seed is not None:
            swap(old)


def _gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """As torch has it, but for the scatter that makes the hard answer: a comparison does the same."""
    # In this order, as torch computes it: the same numbers for the same draws.
    gumbels = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    places = [1] * soft.ndim
    places[dim] = soft.shape[dim]
    numbers = torch.arange(soft.shape[dim], device=soft.device).view(places)
    one = (soft.argmax(dim, keepdim=True) == numbers).to(soft.dtype)
    return one - soft.detach() + soft


#: Functions of torch's made of other functions, written out, so that those are seen one by one.
WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    F.gumbel_softmax: _gumbel_softmax,
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), multinomial),
    **INITIALIZERS,
}
#: Functions made of others where the call draws; elsewhere torch's own. Filled by the rules, which have them anyway.
WHERE_DRAWN: dict[Any, Callable[..., Any]] = {}


_PLAIN = {Tensor, nn.Parameter, WholeCopy, Undrawn}


class _Replaced(TorchFunctionMode):
    """The mode behind :func:`reproducible`: sends random functions on plain tensors to the library's generator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A recomputation in backward must find this mode still on.
        if function in BACKWARD:
            return run_backward(self, function, types, args, kwargs)
        # A generator of the user's own draws as it always does; sharded tensors have rules.
        if kwargs.get("generator") is not None or not _PLAIN.issuperset(types):
            return function(*args, **kwargs)
        if function in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[function](*args, **kwargs)
        if function in FACTORIES:
            return FACTORIES[function](*args, **kwargs)
        if function in KERNELS:
            return _drawn(function, KERNELS[function], args, kwargs)
        if function in _OTHERS and _OTHERS[function](*args, **kwargs):
            if function not in WHERE_DRAWN:
                raise _refusal(function)
            with self:
                return WHERE_DRAWN[function](*args, **kwargs)
        if (
            function in _COLLECTIVES
            and kwargs.get("group") in (None, dist.group.WORLD)
            and current_module() is not None
        ):
            raise _own_collective(function)
        return function(*args, **kwargs)


def _drawn(function: Any, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run a kernel on plain tensors, each of which is its own whole."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if function is torch.normal and not tensors:
        return normal(*args, **kwargs)
    out = kwargs.pop("out", None) if "out" in kwargs else None
    shapes = [t.shape for t in tensors if t is not out]
    shape = tensors[0].shape if kernel.inplace else torch.broadcast_shapes(*shapes)
    result = kernel.run(GlobalBox.all_of(tuple(shape)), *args, **kwargs)
    return result if out is None else out.resize_(result.shape).copy_(result)


def _refusal(function: Any) -> Refused:
    """The error for functions whose random numbers cannot be replaced."""
    return Refused(
        function.__name__,
        here(),
        "it draws random numbers of torch's own, which hc.random.reproducible does not replace",
        "write it with rand_like, randn_like or dropout, give it a torch.Generator, or leave hc.random.reproducible",
    )


#: Those of torch.distributed that a mode can see.
_COLLECTIVES = frozenset((dist.all_reduce, dist.all_gather, dist.broadcast, dist.reduce, dist.gather, dist.scatter))


def _own_collective(function: Any) -> Refused:
    """The error for models that synchronise ranks by themselves."""
    return Refused(
        f"torch.distributed.{function.__name__}",
        here(),
        "the model talks to all ranks by itself, and what is whole here is that of all ranks already",
        "switch the model's own synchronisation off",
    )


def _attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> bool:
    """Does attention drop anything in this call?"""
    return dropout_p > 0


def _multi_head(*args: Any, dropout_p: float = 0.0, training: bool = True, **kwargs: Any) -> bool:
    """Does multi-head attention drop anything? Its dropout is the eleventh argument."""
    return training and (args[10] if len(args) > 10 else dropout_p) > 0


def _recurrent(*args: Any, **kwargs: Any) -> bool:
    """``(..., has_biases, num_layers, dropout, train, bidirectional[, batch_first])``, packed or not."""
    flags = [value for value in args if isinstance(value, (bool, int, float))]
    return len(flags) > 3 and flags[2] > 0 and bool(flags[3])


#: Functions that draw and are not replaced, each with whether this call draws.
_OTHERS: dict[Any, Callable[..., bool]] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys(
        [
            *(torch.poisson, torch.binomial, torch.native_dropout, torch.svd_lowrank, torch.pca_lowrank),
            *(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
            *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
        ],
        lambda *args, **kwargs: True,
    ),
}
