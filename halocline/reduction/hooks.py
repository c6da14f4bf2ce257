"""Users' hooks on parameters see true gradients: means over all ranks, as they would on one.

Hooks on a parameter's gradient (``register_hook``) and after its accumulation (``register_post_accumulate_grad_hook``)
are kept from torch and called when backward has ended and its sums are there. Nothing more travels for them, so that
they may be registered on some ranks alone, for a log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import (
    gradient_hooks,
    post_accumulate_hooks,
    set_gradient_hooks,
    set_post_accumulate_hooks,
)
from ..errors import Refused

Hook = Callable[[Tensor], Any]


class DeferredHooks(OrderedDict[int, Any]):
    """In place of a parameter's dict of hooks of one kind. Torch calls ``own`` alone; the others are in ``hooks``."""

    def __init__(self, own: Hook, earlier: dict[int, Hook] | None) -> None:
        super().__init__()
        super().__setitem__(-1, own)
        #: The very dict of those registered before, by which their handles remove them.
        self.hooks: dict[int, Hook] = {} if earlier is None else earlier

    def __setitem__(self, number: int, hook: Hook) -> None:
        self.hooks[number] = hook

    def __contains__(self, number: object) -> bool:
        return number in self.hooks

    def __delitem__(self, number: int) -> None:
        del self.hooks[number]


class HooksOfOne:
    """A parameter's hooks of both kinds. ``arrives`` and ``arrived`` are called where torch calls hooks."""

    def __init__(self, parameter: Tensor, arrives: Callable[[Tensor], Tensor | None], arrived: Hook) -> None:
        self._on_gradient = DeferredHooks(arrives, gradient_hooks(parameter))
        self._after = DeferredHooks(arrived, post_accumulate_hooks(parameter))
        set_gradient_hooks(parameter, self._on_gradient)
        set_post_accumulate_hooks(parameter, self._after)
        self._before: Tensor | None = None  # of earlier passes, set aside

    def __bool__(self) -> bool:
        return bool(self._on_gradient.hooks or self._after.hooks)

    def seen(self, gradient: Tensor) -> Tensor:
        """What the hooks on the gradient make of it."""
        for hook in list(self._on_gradient.hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def set_aside(self, parameter: Tensor) -> None:
        """A hook on the gradient sees that of its pass, without what earlier ones have left."""
        if self._on_gradient.hooks and parameter.grad is not None and self._before is None:
            self._before, parameter.grad = parameter.grad, None

    def put_back(self, parameter: Tensor) -> None:
        """The pass has failed, and its gradients are dropped."""
        if self._before is not None:
            parameter.grad, self._before = self._before, None

    def after_accumulation(self, parameter: Tensor) -> None:
        for hook in list(self._after.hooks.values()):
            hook(parameter)

    def run(self, parameter: Tensor) -> None:
        """Its gradient is a mean now."""
        gradient, (before, self._before) = parameter.grad, (self._before, None)
        assert gradient is not None
        found = self.seen(gradient)
        if before is not None:
            found = before + found
        if found is not gradient:
            parameter.grad = found
        self.after_accumulation(parameter)


class ParameterHooks:
    """Those of all parameters of an engine."""

    def __init__(self) -> None:
        self._of: list[HooksOfOne] = []

    def watch(self, parameter: Tensor, arrives: Callable[[Tensor], Tensor | None], arrived: Hook) -> HooksOfOne:
        self._of.append(HooksOfOne(parameter, arrives, arrived))
        return self._of[-1]

    def __bool__(self) -> bool:
        """Has anybody registered one?"""
        return any(self._of)

    def run(self, indices: Iterable[int], parameters: Sequence[Tensor], graph: bool) -> None:
        """Of these parameters, in this order, where there is a gradient; ``graph``: it can be differentiated."""
        with torch.set_grad_enabled(graph):
            for index in indices:
                if parameters[index].grad is not None:
                    self._of[index].run(parameters[index])

    def put_back(self, parameters: Sequence[Tensor]) -> None:
        for hooks, parameter in zip(self._of, parameters, strict=True):
            hooks.put_back(parameter)

    def refuse_share(self, index: int, name: str) -> None:
        """Gradients pile up unaveraged: a hook would see this rank's alone."""
        if self._of[index]:
            raise Refused(
                f"a hook on {name}",
                "hc.no_sync",
                "gradients pile up on each rank, and the hook would see this rank's share of the mean",
                "leave hc.no_sync out where parameters have hooks, or do after backward what the hook does",
            )
