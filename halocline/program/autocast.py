"""Autocast on meta tensors, to which torch's own does nothing: casts as it would on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..tree import map_tensors

#: Functions that torch runs in the lower precision, on CPUs and GPUs.
LOWER = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "addbmm",
        "baddbmm",
        "scaled_dot_product_attention",
        "prelu",
    ]
)
#: Functions that torch runs in float32.
FULL = frozenset(
    [
        "softmax",
        "log_softmax",
        "softmin",
        "layer_norm",
        "group_norm",
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "cosine_similarity",
        "exp",
        "log",
        "log2",
        "log10",
        "log1p",
        "expm1",
        "pow",
        "rsqrt",
        "norm",
        "prod",
        "cumsum",
        "cumprod",
        "sum",
    ]
)


class _MetaAutocast(TorchFunctionMode):
    """Casts floating-point arguments before the functions that autocast casts for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        wanted = self._dtype if name in LOWER else torch.float32 if name in FULL else None
        if wanted is not None:
            args, kwargs = map_tensors(lambda tensor: _cast(tensor, wanted), (args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves float64 and integers as they are."""
    return tensor.to(dtype) if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) else tensor


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Inside, meta tensors are cast as the autocast that is on, on whichever device, would cast them."""
    device = next((name for name in ("cuda", "cpu") if torch.is_autocast_enabled(name)), None)
    if device is None:
        yield
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False), _MetaAutocast(dtype):
        yield
