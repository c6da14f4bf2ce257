"""An optimizer's step in parts: some parameters now, others when their gradients are there.

Only for optimizers that treat parameters one by one, so that steps in parts equal one step. The optimizer's own
``step`` runs on those parameters, with the settings of the moment at which the step was requested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import disable_dispatch_modes, no_torch_functions
from ...errors import MeshError

Settings = dict[str, Any]  # of a param_group, without its parameters

#: Classes of torch.optim that treat parameters one by one. Other classes may declare it: ``one_by_one = True``.
ONE_BY_ONE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


@dataclass(frozen=True)
class StepRequest:
    """A requested step of one parameter, with the optimizer's settings at that moment."""

    optimizer: Any
    settings: Settings
    gradient: Tensor


Stepped = list[tuple[Tensor, StepRequest]]


def _by_optimizer(parameters: Sequence[Tensor], requests: Sequence[StepRequest]) -> Iterator[tuple[Any, Stepped]]:
    optimizers = {id(request.optimizer): request.optimizer for request in requests}
    for optimizer in optimizers.values():
        pairs = zip(parameters, requests, strict=True)
        yield optimizer, [(parameter, request) for parameter, request in pairs if request.optimizer is optimizer]


def make_step(parameters: Sequence[Tensor], requests: Sequence[StepRequest]) -> None:
    """Make the optimizers' steps of these parameters alone. In the rank's own thread."""
    for optimizer, mine in _by_optimizer(parameters, requests):
        inner = inner_of(optimizer)
        kept, gradients = inner.param_groups, [parameter.grad for parameter, _ in mine]
        try:
            inner.param_groups = _as_groups(mine)
            for parameter, request in mine:
                parameter.grad = request.gradient
            type(optimizer).step(optimizer)
        finally:
            inner.param_groups = kept
            for (parameter, _), gradient in zip(mine, gradients, strict=True):
                parameter.grad = gradient


def can_step_in_thread(optimizer: Any) -> bool:
    """Does its step read nothing but what :func:`make_step_in_thread` gives it? Known of torch's own classes."""
    return optimizer is inner_of(optimizer) and _is_theirs(optimizer)


def make_step_in_thread(parameters: Sequence[Tensor], requests: Sequence[StepRequest]) -> None:
    """The same in another thread, without touching ``.grad`` or the optimizer's groups, which the rank's own thread may
    read. Aliases of the parameters are stepped, in the parameters' memory and state."""
    for optimizer, mine in _by_optimizer(parameters, requests):
        aliases = [parameter.detach() for parameter, _ in mine]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for alias, (parameter, request) in zip(aliases, mine, strict=True):
            alias.grad = request.gradient
            if parameter in optimizer.state:
                state[alias] = optimizer.state[parameter]
        stand_in = object.__new__(type(optimizer))
        stand_in.__dict__.update(vars(optimizer))  # one atomic call: another thread may add attributes meanwhile
        for name in _OURS:
            stand_in.__dict__.pop(name, None)
        stand_in.state = state
        stand_in.param_groups = _as_groups([(alias, each) for alias, (_, each) in zip(aliases, mine, strict=True)])
        stand_in.step()
        for alias, (parameter, _) in zip(aliases, mine, strict=True):
            if alias in state and parameter not in optimizer.state:
                optimizer.state[parameter] = state[alias]


_OURS = ("step", "__reduce_ex__")  # attributes that NextForwardOverlap sets on an optimizer


def _as_groups(stepped: Stepped) -> list[Settings]:
    """Param groups of these parameters, each with the settings that were requested."""
    groups: dict[int, Settings] = {}
    for parameter, request in stepped:
        groups.setdefault(id(request.settings), {**request.settings, "params": []})["params"].append(parameter)
    return list(groups.values())


def apart() -> ExitStack:
    """A context for a step in the middle of a user's forward: switches off the modes that hold there."""
    stack = ExitStack()
    for context in (no_torch_functions(), disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad()):
        stack.enter_context(context)
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def copied(group: Settings) -> Settings:
    """A param group's present settings, copied: learning-rate schedulers change it in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def inner_of(optimizer: Any) -> Any:
    """The optimizer whose param_groups count: one may wrap another as its ``base``."""
    return getattr(optimizer, "base", optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raise MeshError for an optimizer whose step cannot be made in parts."""
    name, inner = type(optimizer).__name__, inner_of(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise MeshError(f"overlap='next-forward' wants an optimizer of torch.optim, not {name}")
    if getattr(optimizer, "one_by_one", False) is not True and not (_is_theirs(inner) and optimizer is inner):
        raise MeshError(
            f"overlap='next-forward' makes the optimizer's step in parts, which {name} may not bear: it takes "
            f"{', '.join(sorted(ONE_BY_ONE))}, and classes that say `one_by_one = True`"
        )
    own = vars(optimizer).get("step")
    if own is not None and not (getattr(own, "_wrapped_by_lr_sched", False) or hasattr(own, "_halocline")):
        raise MeshError(f"overlap='next-forward': this {name}'s step was replaced, and steps in parts would bypass it")
    if any(group.get("differentiable") or group.get("capturable") for group in inner.param_groups):
        raise MeshError(f"overlap='next-forward': {name} is set to be differentiable or capturable, which it cannot be")


def _is_theirs(optimizer: Any) -> bool:
    """Is it exactly a class of torch.optim that treats parameters one by one?"""
    return type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in ONE_BY_ONE
