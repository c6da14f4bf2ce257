"""What a run does about a step that went wrong, if it is not to end: leave it out, or go back to a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .checkpoints import Checkpoints
from .guard import TrainingError
from .optimizers import load_optimizer

_MOST = 3  # times that a run goes back to one checkpoint


class BufferCopy:
    """The buffers of a model as they were before a step: statistics of a batch that is left out do not count."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back."""
        for buffer, before in self._pairs:
            buffer.copy_(before)


class Rollback:
    """Takes a model and its optimizer back to the newest good checkpoint. By all ranks together.

    Data and step numbers go on from where they are, so that the samples which did the harm are not seen again.
    """

    def __init__(self, checkpoints: Checkpoints, model: nn.Module, optimizer: Any) -> None:
        self._checkpoints, self._model, self._optimizer = checkpoints, model, optimizer
        self._last, self._times = -1, 0

    def __call__(self, step: int) -> int:
        """Load the weights; returns the step of the checkpoint. TrainingError without one, or if it does not help."""
        template = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        found = self._checkpoints.load_latest(template)
        if found is None:
            raise TrainingError(f"step {step}: the loss is not finite, and there is no checkpoint to go back to")
        self._times = self._times + 1 if found.step == self._last else 1
        self._last = found.step
        if self._times > _MOST:
            raise TrainingError(
                f"step {step}: the loss is not finite again, after {_MOST} returns to the checkpoint of step "
                f"{found.step}; lower the learning rate, or clip"
            )
        self._model.load_state_dict(found.tensors["model"])
        load_optimizer(self._optimizer, found.tensors["optimizer"])
        return found.step
