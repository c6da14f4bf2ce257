"""The model of a run on its mesh, and the optimizer that steps it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..arrangement import Arrangement
from ..distribute import distribute
from ..errors import ConfigError
from ..layout import fill_meta
from .optimizers import make_optimizer
from .settings import Settings


def distributed(model: nn.Module, settings: Settings, arrangement: Arrangement, device: torch.device) -> Any:
    """Make the model one of the mesh; returns its optimizer, made before, or of a model on meta after."""
    late = any(parameter.is_meta for parameter in model.parameters())
    if late and settings.gradients.overlap == "next-forward":
        raise ConfigError("gradients.overlap = 'next-forward' and tables of sparse lookups: leave overlap as it is")
    optimizer = None if late else make_optimizer(model, settings.optimizer)
    with device if late else nullcontext():
        if late and arrangement.ranks == 1:  # whose world moves nothing, as that of a dry run
            fill_meta(model, {})
        distribute(model, plan=arrangement, **settings.gradients.arguments(optimizer))
    return make_optimizer(model, settings.optimizer) if optimizer is None else optimizer
