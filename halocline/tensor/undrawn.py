"""Whole tensors made of a cut one, whose values are still to be drawn: ``x.new_empty(shape).bernoulli_()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._torch_private import TENSOR_MODULE
from ..tree import map_tensors
from ..world import Label
from .place import here
from .sharding import Sharding


class Undrawn(Tensor):
    """A plain tensor in all but this: numbers drawn into it are those of the first of the ranks that share the sample.

    torch's generators may stand elsewhere on the others. What is computed from it, and what a draw returns, is plain.
    """

    __module__ = TENSOR_MODULE
    _plain: Tensor
    _sharding: Sharding
    #: Functions that draw into their first argument.
    drawing: frozenset[Any] = frozenset()
    #: How to call them, so that the draw is not taken for one in which ranks may differ.
    explained: Callable[[Callable[[], Any]], Any] = staticmethod(lambda draw: draw())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = _stripped(args), _stripped(kwargs or {})
        if function not in cls.drawing or not isinstance(args[0], Undrawn):
            return function(*plain_args, **plain_kwargs)
        # The draw itself may differ by rank; what counts is the broadcast after it.
        result = cls.explained(lambda: function(*plain_args, **plain_kwargs))
        plain, sharding = args[0]._plain, args[0]._sharding
        label = Label(getattr(function, "__name__", str(function)), here())
        plain.copy_(sharding.mesh.world.broadcast(plain, sharding.mesh.ranks_along(sharding.axes), label))
        return result


def undrawn(tensor: Tensor, sharding: Sharding) -> Undrawn:
    """``sharding`` is that of the tensor it was made of."""
    shell = tensor.as_subclass(Undrawn)
    shell._plain, shell._sharding = tensor, sharding
    return shell


def _stripped(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor._plain if isinstance(tensor, Undrawn) else tensor, value)
