"""Users' hooks on parameters see true gradients: means over all ranks, as they would on one.

Hooks after accumulation (``register_post_accumulate_grad_hook``) run when backward has ended and its sums are there.
Hooks on the gradient itself (``register_hook``) run where torch runs them, on a gradient averaged just before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import gradient_hooks, post_accumulate_hooks, set_post_accumulate_hooks
from ..errors import Refused


class DeferredHooks(OrderedDict[int, Any]):
    """A parameter's hooks after accumulation. Torch calls ``own`` alone; the others are kept for :meth:`run`."""

    def __init__(self, parameter: Tensor, own: Callable[[Tensor], None]) -> None:
        super().__init__()
        super().__setitem__(-1, own)
        earlier = post_accumulate_hooks(parameter)
        #: The very dict of those registered before, by which their handles remove them.
        self.deferred: dict[int, Callable[[Tensor], None]] = {} if earlier is None else earlier
        set_post_accumulate_hooks(parameter, self)

    def __setitem__(self, number: int, hook: Callable[[Tensor], None]) -> None:
        self.deferred[number] = hook

    def __contains__(self, number: object) -> bool:
        return number in self.deferred

    def __delitem__(self, number: int) -> None:
        del self.deferred[number]

    def run(self, parameter: Tensor) -> None:
        for hook in list(self.deferred.values()):
            hook(parameter)


class ParameterHooks:
    """The hooks after accumulation of all parameters of an engine."""

    def __init__(self) -> None:
        self._of: list[DeferredHooks] = []

    def watch(self, parameter: Tensor, own: Callable[[Tensor], None]) -> DeferredHooks:
        self._of.append(DeferredHooks(parameter, own))
        return self._of[-1]

    def __bool__(self) -> bool:
        """Has anybody registered one?"""
        return any(each.deferred for each in self._of)

    def run(self, indices: Iterable[int], parameters: Sequence[Tensor], graph: bool) -> None:
        """Of these parameters, in this order, where there is a gradient; ``graph``: it can be differentiated."""
        with torch.set_grad_enabled(graph):
            for index in indices:
                if parameters[index].grad is not None:
                    self._of[index].run(parameters[index])

    def refuse_share(self, index: int, name: str) -> None:
        """Gradients pile up unaveraged: a hook would see this rank's alone."""
        if self._of[index].deferred:
            raise Refused(
                f"a hook after accumulation of {name}",
                "hc.no_sync",
                "gradients pile up on each rank, and the hook would see this rank's share of the mean",
                "leave hc.no_sync out where such hooks are registered, or do after backward what the hook does",
            )


def hook_first(parameter: Tensor, own: Callable[[Tensor], Tensor | None]) -> None:
    """Register a hook on the parameter's gradient before those that are there already."""
    others = gradient_hooks(parameter)
    before = list(others.items()) if others else []
    if others:
        others.clear()  # the same dict is filled again, since the handles of its hooks know it
    parameter.register_hook(own)
    gradient_hooks(parameter).update(before)


def others_look(parameter: Tensor) -> bool:
    """Has anybody else a hook on the parameter's gradient?"""
    return len(gradient_hooks(parameter) or ()) > 1
