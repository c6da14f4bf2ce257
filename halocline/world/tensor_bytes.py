"""The bytes of tensors, as transports send them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SENT_AS_IT_IS = (torch.float32, torch.float64)
_PLAIN = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)  # dtypes that numpy has, too


def in_host_memory(tensor: Tensor, fill: bool = False) -> Tensor:
    """A contiguous CPU tensor as it is; for any other a new one in host memory, pinned if it is for a GPU.

    With ``fill`` it holds the values, after all work of the current stream.
    """
    if tensor.device.type == "cpu":
        return tensor.resolve_conj().resolve_neg().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # torch's own copy to the host negates a strided view with the negative bit twice: resolve it on the device first
    return host.copy_(tensor.resolve_conj().resolve_neg()) if fill else host


def sendable(tensor: Tensor) -> Tensor:
    """A contiguous tensor as torch.distributed can send it: as bytes, but for the most common dtypes."""
    return tensor if tensor.dtype in _SENT_AS_IT_IS else _as_bytes(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as uint8."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)  # lazy conjugates are not in memory
    flat = flat.as_strided(flat.shape, (1,))  # one element is contiguous with any stride, and then no view
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.dtype in _PLAIN and not tensor.is_neg() and not tensor.requires_grad:
        array: Any = tensor.numpy()
    else:
        array = _as_bytes(tensor).detach().numpy()
    return memoryview(array.reshape(-1)).cast("B")
