"""The number formats of a step, and the loss scaling that keeps small gradients in fp16.

Weights and optimizer state are always in fp32 or fp64; bf16 and fp16 are for computing only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of a run: ``fp64`` and ``fp32`` compute in these, ``tf32`` lets GPUs round products, ``bf16`` and
    ``fp16`` use autocast.

    ``fp16`` scales the loss. Averaged gradients have the same bits on every rank, so all ranks find the same overflow
    and choose the same scale without communication.
    """

    def __init__(self, name: str, device: torch.device, skip_not_finite: bool = False) -> None:
        """``skip_not_finite``: also in other formats, leave out a step with a gradient that is NaN or infinite."""
        self.name, self._device, self._skips = name, device, skip_not_finite
        self.dtype = torch.float64 if name == "fp64" else torch.float32  # of weights and inputs
        self._scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self.skipped = False  # whether the last step was left out because a gradient was not finite
        if name in ("fp32", "tf32"):
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = name == "tf32"

    def placed(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and convert it; complex weights become complex numbers of the same width."""
        if not any(tensor.is_meta for tensor in model.parameters()):  # else ``hc.distribute`` fills it there
            model = model.to(device=self._device)
        model = model.double() if self.dtype == torch.float64 else model.float()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_complex():
                tensor.data = tensor.data.to(self.dtype.to_complex())
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forward and loss run."""
        narrow = _NARROW.get(self.name)
        return nullcontext() if narrow is None else torch.autocast(self._device.type, narrow)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as backward should see it: times the scale of fp16."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Any) -> None:
        """Undo the scale of the loss in the gradients, before they are clipped."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> bool:
        """Make the optimizer's step, unless a gradient overflowed; returns whether it was made."""
        if not self._scaler.is_enabled():
            self.skipped = self._skips and not _finite_gradients(optimizer)
            if not self.skipped:
                optimizer.step()
            return not self.skipped
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self.skipped = self.scale < before or not before
        return not self.skipped

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The state of the loss scaling, for checkpoints; empty unless fp16."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)


def _finite_gradients(optimizer: Any) -> bool:
    """Are all gradients finite? They have the same bits on every rank, so all ranks find the same."""
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    return bool(torch.stack([each.isfinite().all() for each in gradients]).all()) if gradients else True


def this_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
