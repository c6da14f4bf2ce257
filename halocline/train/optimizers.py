"""Optimizers of torch by name, LARC, and the schedule of the learning rate.

Gradients are whole on every rank when an optimizer steps, so any optimizer of torch works; nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._torch_private import foreach_mul_, foreach_norm
from ..errors import ConfigError
from ..rules import cut_like
from ..tensor import ShardedTensor
from ..world import placement_of
from ..world.placement import mark_placement
from .imports import called, named

if TYPE_CHECKING:  # LARC and the guard serve programs that have no pydantic
    from .settings import OptimizerSettings, ScheduleSettings, Settings

#: The local rate for a weight or a gradient that is all zero, whose norms say nothing about a good step.
LARC_EPSILON = 1.0 / 16000.0


class LARC:
    """Layer-wise adaptive rate control (You et al. 2017): a step is at most ``trust`` times its weight's norm.

    Wraps the optimizer ``base``, whose gradients it scales. ``clip`` (the default) lowers the base's rate to ``trust *
    |w| / |g|`` where it is above that; ``scale`` multiplies the gradient by it. Norms of all tensors are taken at once,
    and nothing waits for the host.
    """

    one_by_one = True  # next-forward may make its step in parts

    def __init__(self, base: torch.optim.Optimizer, trust: float = 0.002, mode: str = "clip") -> None:
        self.base, self.trust, self.mode = base, trust, mode

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the base optimizer, for schedulers and clipping."""
        return self.base.param_groups

    @property
    def state(self) -> Any:
        """That of the base optimizer."""
        return self.base.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the base optimizer: LARC itself keeps nothing between steps."""
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Scale each gradient by its layer's rate, then step the base optimizer."""
        for group in self.base.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._scale(weights, [weight.grad for weight in weights], group["lr"])
        self.base.step(closure)

    def _scale(self, weights: list[Tensor], gradients: list[Any], rate: float) -> None:
        """Multiply gradients in place by ``trust * |w| / |g|``, relative to ``rate`` in the mode "clip"."""
        sizes = torch.stack([norm.double() for norm in foreach_norm(weights)])
        slopes = torch.stack([norm.double() for norm in foreach_norm(gradients)])
        silent = (sizes == 0) | (slopes == 0)
        local = torch.where(silent, LARC_EPSILON, self.trust * sizes / torch.where(silent, 1.0, slopes))
        factors = (local / rate).clamp(max=1.0) if self.mode == "clip" else local
        foreach_mul_(gradients, list(factors.unbind()))


Optimizer = torch.optim.Optimizer | LARC


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    """The optimizer that the settings name, over the parameters that require gradients. Raises ConfigError.

    For a class of the user's own (``package.module:Class``) its own defaults hold, except for the learning rate and a
    weight decay that is set. Moments of parameters that are not whole are marked for checkpoints.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    makers: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "adam": (torch.optim.Adam, {**common, "betas": settings.betas}),
        "adamw": (torch.optim.AdamW, {**common, "betas": settings.betas}),
        "sgd": (torch.optim.SGD, {**common, "momentum": settings.momentum}),
        "larc": (torch.optim.Adam, {**common, "betas": settings.betas}),
    }
    if settings.name in makers:
        maker, arguments = makers[settings.name]
    else:  # the user's own class: its defaults hold, except for what was set
        decay = {"weight_decay": settings.weight_decay} if settings.weight_decay else {}
        maker, arguments = named("optimizer.name", settings.name), {"lr": settings.lr, **decay}
    made = called("optimizer.options", maker, weights, **{**arguments, **settings.options})
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer.name = {settings.name!r} gives a {type(made).__name__}, not an Optimizer of torch"
        )
    place_optimizer_state(made)
    return LARC(made, settings.trust, settings.mode) if settings.name == "larc" else made


def place_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Mark moments in the optimizer's ``state_dict`` with the placement of their parameters (``place_parameter``).

    Call it before a checkpoint is saved of an optimizer whose parameters are not all whole.
    """
    optimizer.register_state_dict_post_hook(_mark_moments)


def _mark_moments(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook on ``state_dict``: moments of the parameter's shape lie on the mesh as the parameter does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, moments in state_dict["state"].items():
        placement = {} if isinstance(parameters[index], ShardedTensor) else placement_of(parameters[index])
        for moment in moments.values() if placement else ():
            if isinstance(moment, Tensor) and moment.shape == parameters[index].shape:
                mark_placement(moment, placement)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of each weight; learning rate and other settings stay those of this run.

    Moments of cut parameters are cut as these are. By all ranks together.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for parameter, moments in getattr(optimizer, "state", {}).items():
        for name, value in moments.items() if isinstance(parameter, ShardedTensor) else ():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = cut_like(value, parameter.sharding)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def learning_rate(step: int, settings: Settings) -> float:
    """The learning rate of a step, counted from 0."""
    factor = batch_factor(settings.batch * settings.accumulate, settings.schedule)
    return settings.optimizer.lr * factor * rate_at(step, settings.steps, settings.schedule)


def rate_at(step: int, steps: int, settings: ScheduleSettings) -> float:
    """The factor on the learning rate at a step, counted from 0.

    >>> [round(rate_at(s, 6, ScheduleSettings("linear", warmup=2)), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    gone = (step - settings.warmup) / max(1, steps - settings.warmup)
    if settings.name == "linear":
        return 1 + (settings.final - 1) * gone
    if settings.name == "exponential":
        return max(settings.final, 1e-4) ** gone
    if settings.name == "cosine":
        return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * gone))
    return 1.0


def batch_factor(samples: int, settings: ScheduleSettings) -> float:
    """The factor on the learning rate for the number of samples in a step, over all ranks.

    >>> batch_factor(256, ScheduleSettings(base=64)), batch_factor(256, ScheduleSettings(base=64, scaling="sqrt"))
    (4.0, 2.0)
    """
    if not settings.base:
        return 1.0
    return (samples / settings.base) ** (0.5 if settings.scaling == "sqrt" else 1.0)
