"""Batches on their way to a GPU: copied from pinned memory on a stream of their own, beside the step that runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tensor import unwrap


class DeviceCopier:
    """The prefetcher's thread copies and waits for the copy, so that the host's buffer is free afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if self._stream is None:
            return tensor.to(self._device).to(dtype)
        with torch.cuda.stream(self._stream):  # all of it: another stream's work would not be waited for
            copy = tensor.to(self._device, non_blocking=True).to(dtype)
        self._stream.synchronize()
        return copy

    def received(self, tensor: Tensor) -> None:
        """It is used on the caller's stream from now on: no copy may take its memory before that is done with it."""
        if self._stream is not None:
            unwrap(tensor).record_stream(torch.cuda.current_stream(self._device))
