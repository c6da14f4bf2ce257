"""An optimizer's step in parts: of some parameters now, of others when their gradients are there.

Only for optimizers that treat parameters one by one, so that a step in parts is a step. What is done is what the
optimizer's own ``step`` does, on those parameters, with the settings of the moment at which the step was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import disable_dispatch_modes, no_torch_functions
from ...errors import MeshError

Settings = dict[str, Any]  # of a param_group, without its parameters

#: Those that treat parameters one by one. Others may say so: ``one_by_one = True``.
ONE_BY_ONE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


@dataclass(frozen=True)
class StepRequest:
    """A step that was asked for: of one parameter, as the optimizer was set at that moment."""

    optimizer: Any
    settings: Settings
    gradient: Tensor


def make_step(parameters: Sequence[Tensor], orders: Sequence[StepRequest]) -> None:
    """The optimizers' steps for these parameters alone."""
    for optimizer in {id(order.optimizer): order.optimizer for order in orders}.values():
        inner = inner_of(optimizer)
        mine = [(p, order) for p, order in zip(parameters, orders, strict=True) if order.optimizer is optimizer]
        kept, gradients = inner.param_groups, [parameter.grad for parameter, _ in mine]
        try:
            inner.param_groups = _as_groups(mine)
            for parameter, order in mine:
                parameter.grad = order.gradient
            type(optimizer).step(optimizer)
        finally:
            inner.param_groups = kept
            for (parameter, _), gradient in zip(mine, gradients, strict=True):
                parameter.grad = gradient


def can_step_in_thread(optimizer: Any) -> bool:
    """Is it one whose step looks at nothing but what :func:`make_step_in_thread` gives it?"""
    return optimizer is inner_of(optimizer) and _is_theirs(optimizer)


def make_step_in_thread(parameters: Sequence[Tensor], orders: Sequence[StepRequest]) -> None:
    """The same in another thread: neither the parameters' gradients nor the optimizers' groups are touched, which
    the rank's own thread may read. Aliases of the parameters are stepped, in the parameters' memory and state."""
    for optimizer in {id(order.optimizer): order.optimizer for order in orders}.values():
        mine = [(p, order) for p, order in zip(parameters, orders, strict=True) if order.optimizer is optimizer]
        aliases = [parameter.detach() for parameter, _ in mine]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for alias, (parameter, order) in zip(aliases, mine, strict=True):
            alias.grad = order.gradient
            if parameter in optimizer.state:
                state[alias] = optimizer.state[parameter]
        stand_in = object.__new__(type(optimizer))
        stand_in.__dict__.update(vars(optimizer))  # at once: another thread may add to it meanwhile
        for name in _OURS:
            stand_in.__dict__.pop(name, None)
        stand_in.state = state
        stand_in.param_groups = _as_groups([(alias, order) for alias, (_, order) in zip(aliases, mine, strict=True)])
        stand_in.step()
        for alias, (parameter, _) in zip(aliases, mine, strict=True):
            if alias in state and parameter not in optimizer.state:
                optimizer.state[parameter] = state[alias]


_OURS = ("step", "__reduce_ex__")  # what NextForwardOverlap puts on an optimizer


def _as_groups(stepped: Sequence[tuple[Tensor, StepRequest]]) -> list[Settings]:
    groups: dict[int, Settings] = {}
    for parameter, order in stepped:
        groups.setdefault(id(order.settings), {**order.settings, "params": []})["params"].append(parameter)
    return list(groups.values())


def apart() -> ExitStack:
    """For a step in the middle of a user's forward: none of the modes that hold there hold inside."""
    stack = ExitStack()
    for context in (no_torch_functions(), disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad()):
        stack.enter_context(context)
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def copied(group: Settings) -> Settings:
    """As it is set now: schedulers change it in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def inner_of(optimizer: Any) -> Any:
    """Whose param_groups count: an optimizer may be wrapped round a ``base``."""
    return getattr(optimizer, "base", optimizer)


def check_optimizer(optimizer: Any) -> None:
    name, inner = type(optimizer).__name__, inner_of(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise MeshError(f"overlap='next-forward' wants an optimizer of torch.optim, not {name}")
    if not (_says_so(optimizer) or (_is_theirs(inner) and optimizer is inner)):
        raise MeshError(
            f"overlap='next-forward' makes the optimizer's step in parts, which {name} may not bear: it takes "
            f"{', '.join(sorted(ONE_BY_ONE))}, and classes that say `one_by_one = True`"
        )
    own = vars(optimizer).get("step")
    if own is not None and not (getattr(own, "_wrapped_by_lr_sched", False) or hasattr(own, "_halocline")):
        raise MeshError(f"overlap='next-forward': this {name}'s step was replaced, and steps in parts would bypass it")
    if any(group.get("differentiable") or group.get("capturable") for group in inner.param_groups):
        raise MeshError(f"overlap='next-forward': {name} is set to be differentiable or capturable, which it cannot be")


def _says_so(optimizer: Any) -> bool:
    return getattr(optimizer, "one_by_one", False) is True


def _is_theirs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in ONE_BY_ONE
