"""Two ways to a tile's memory that torch does not tell its subclasses of: ``b.data = x`` and ``to_dlpack(x)``.

Both would hand out this rank's tile as if it were the tensor. They are closed in the process when the first tensor is
cut; for plain tensors they stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from ..errors import Refused
from .place import here


def _refusal(operation: str) -> Refused:
    why = "it would take this rank's tile for the whole tensor"
    return Refused(operation, here(), why, "use hc.gather(x), or b.copy_(x) to write its values into another tensor")


class GuardedData:
    """``Tensor.data`` as torch has it, except that no plain tensor takes in a cut one."""

    __name__ = "data"

    def __init__(self) -> None:
        self._own: Any = Tensor.data

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self if tensor is None else self._own.__get__(tensor, owner)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        if hasattr(value, "sharding") and getattr(tensor, "_tile", None) is value._tile:
            return  # ``Module.to``, where nothing is to be converted
        if hasattr(value, "sharding") and hasattr(tensor, "sharding"):
            why = "it would put other memory in the place of this rank's tile, which the library averages and moves"
            remedy = "convert a model (model.to, model.half) before hc.distribute; write values with x.copy_(...)"
            raise Refused("Tensor.data =", here(), why, remedy)
        if hasattr(value, "sharding"):
            raise _refusal("Tensor.data =")
        self._own.__set__(tensor, value)


DATA = GuardedData()
_own_to_dlpack: Any = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]


def _to_dlpack(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if hasattr(tensor, "sharding"):
        raise _refusal("to_dlpack")
    return _own_to_dlpack(tensor, *args, **kwargs)


def close_holes() -> None:
    """Idempotent."""
    # torch offers no hook for these, so the attribute itself is replaced.
    if vars(Tensor).get("data") is not DATA:
        Tensor.data = DATA  # type: ignore[assignment]
        for home in (torch, torch.utils.dlpack):
            vars(home)["to_dlpack"] = _to_dlpack
