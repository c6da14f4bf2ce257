"""How torch lays out what it makes: channels last where an operand suggests it."""

from __future__ import annotations

import torch
from torch import Tensor

#: The memory format with channels innermost, by the number of dims.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last_of(tensor: Tensor) -> torch.memory_format:
    """Of a tensor with four or five dims."""
    return CHANNELS_LAST[tensor.ndim]


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Channels last where the tensor is dense so and not contiguous as well; else contiguous."""
    form = CHANNELS_LAST.get(tensor.ndim)
    if form is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=form):
        return torch.contiguous_format
    return form


def channels_last(*tensors: Tensor) -> bool:
    """Does any of these make a convolution's results have channels last?"""
    return any(suggests_channels_last(tensor) for tensor in tensors)


def suggests_channels_last(tensor: Tensor) -> bool:
    """By its strides, whether dense or not; where sizes of 1 leave it open, as torch decides it.

    >>> import torch
    >>> x = torch.zeros(1, 1, 4, 4)
    >>> suggests_channels_last(x), suggests_channels_last(x.to(memory_format=torch.channels_last))
    (False, True)
    """
    dims = tensor.dim()
    if dims not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *range(dims - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(1, size)
    return True


def span(tensor: Tensor) -> int:
    """From its first element to its last in memory: some kernels count the gaps of a view.

    >>> import torch
    >>> span(torch.zeros(4, 5)), span(torch.zeros(4, 5)[:, :2])
    (20, 17)
    """
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
