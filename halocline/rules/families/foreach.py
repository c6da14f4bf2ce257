"""torch's functions of lists of tensors, which optimizers with ``foreach=True`` and gradient clipping call.

Each becomes the function of one tensor, applied to one after another, so that a list may mix cut and plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import foreach_functions, unscale_function
from ..table import composite

_LISTS = (list, tuple)
_VALUE = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")  # their last argument goes by name alone
_OTHERS: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm,
    "maximum_": lambda tensor, other: tensor.copy_(torch.maximum(tensor, other)),
    "minimum_": lambda tensor, other: tensor.copy_(torch.minimum(tensor, other)),
}


def _register(name: str, function: Any) -> None:
    """Register a ``torch._foreach_*`` function as a loop over the function of one tensor."""
    single = _OTHERS.get(name) or getattr(Tensor, name, None)
    if single is None:
        return

    def each(*args: Any, **kwargs: Any) -> list[Any] | None:
        # Scalars and lists of scalars may stand beside the tensors.
        count = next(len(value) for value in args if isinstance(value, _LISTS))
        results = [_one(single, name, *(_nth(i, value) for value in args), **_named(i, kwargs)) for i in range(count)]
        return None if name.endswith("_") else results

    composite(function, family="foreach")(each)


def _one(single: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function of one tensor with arguments in the form that it takes."""
    if name in _VALUE and len(args) > 3:
        *args, kwargs["value"] = args  # type: ignore[assignment]
    if name == "pow" and not isinstance(args[0], Tensor):
        return torch.pow(*args, **kwargs)
    return single(*args, **kwargs)


def _nth(index: int, value: Any) -> Any:
    return value[index] if isinstance(value, _LISTS) else value


def _named(index: int, values: dict[str, Any]) -> dict[str, Any]:
    return {name: _nth(index, value) for name, value in values.items()}


for _name, _function in foreach_functions().items():
    _register(_name, _function)


@composite(unscale_function(), family="foreach")
def unscale(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``found_inf`` becomes 1 on all ranks where any rank's part of any gradient is not finite."""
    for gradient in gradients:
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(gradient)).any().to(found_inf)))
        gradient.mul_(inv_scale.to(gradient.device))
