"""The hooks of a parameter: where gradients enter the library, and users' hooks, which see means over all ranks.

Users' hooks on a gradient (``register_hook``) and after its accumulation (``register_post_accumulate_grad_hook``) are
kept from torch and called when backward has ended and its sums are done. They cause no communication, so they may be
registered on some ranks only, for a log.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.hooks import unserializable_hook

from .._torch_private import (
    gradient_hooks,
    post_accumulate_hooks,
    set_gradient_hooks,
    set_post_accumulate_hooks,
)
from ..errors import Refused

if TYPE_CHECKING:
    from .average import GradientAverage

Hook = Callable[[Tensor], Any]


class DeferredHooks(OrderedDict[int, Any]):
    """Replaces a parameter's dict of hooks of one kind. Torch sees and calls ``own`` only; users' are in ``hooks``."""

    def __init__(self, own: Hook, earlier: dict[int, Hook] | None) -> None:
        super().__init__()
        super().__setitem__(-1, own)
        #: The same dict object as before, since handles of earlier hooks remove them from it.
        self.hooks: dict[int, Hook] = {} if earlier is None else earlier

    def __setitem__(self, number: int, hook: Hook) -> None:
        self.hooks[number] = hook

    def __contains__(self, number: object) -> bool:
        return number in self.hooks

    def __delitem__(self, number: int) -> None:
        del self.hooks[number]


class ParameterHooks:
    """What torch calls for one parameter: :meth:`computed`, then :meth:`accumulated`.

    Lives as long as the parameter, and holds only a weak reference to the engine.
    """

    def __init__(self, engine: GradientAverage, index: int, parameter: Tensor) -> None:
        self._engine, self._index = weakref.ref(engine), index
        self._on_gradient = DeferredHooks(self.computed, gradient_hooks(parameter))
        self._after = DeferredHooks(self.accumulated, post_accumulate_hooks(parameter))
        set_gradient_hooks(parameter, self._on_gradient)
        set_post_accumulate_hooks(parameter, self._after)
        self._before: Tensor | None = None  # the gradient of earlier passes, while users' hooks wait for this pass's

    def __bool__(self) -> bool:
        """Has a user registered a hook?"""
        return bool(self._on_gradient.hooks or self._after.hooks)

    @unserializable_hook
    def computed(self, gradient: Tensor | None) -> Tensor | None:
        """A gradient of the parameter was computed and is not yet added to ``.grad``. In autograd's thread."""
        if gradient is None:
            return None
        engine = self._engine()
        if engine is None:
            return self._changed_by_users(gradient)
        if engine.returns_gradients(self._index):
            return self._changed_by_users(engine.mean(gradient, engine.names[self._index]))
        parameter = engine.parameters[self._index]
        if self._on_gradient.hooks and parameter.grad is not None and self._before is None:
            # A hook on the gradient sees this pass's alone, without what earlier passes have left in ``.grad``.
            self._before, parameter.grad = parameter.grad, None
        return None

    def accumulated(self, parameter: Tensor) -> None:
        """The gradient was added to ``.grad``. In autograd's thread."""
        engine = self._engine()
        if engine is None:
            self._run_after(parameter)
        elif parameter.grad is not None:  # torch calls hooks too where a derivative does not depend on the parameter
            engine.accumulated(self._index)

    def run(self, parameter: Tensor) -> None:
        """Call the users' hooks, once the parameter's gradient is a mean."""
        gradient, (before, self._before) = parameter.grad, (self._before, None)
        assert gradient is not None
        changed = self._changed_by_users(gradient)
        if before is not None:
            changed = before + changed
        if changed is not gradient:
            parameter.grad = changed
        self._run_after(parameter)

    def put_back(self, parameter: Tensor) -> None:
        """Restore the gradient of earlier passes: this pass has failed, and its gradients are dropped."""
        if self._before is not None:
            parameter.grad, self._before = self._before, None

    def refuse_share(self, name: str) -> None:
        """Refuse users' hooks where gradients pile up unaveraged: they would see this rank's share alone."""
        if self:
            raise Refused(
                f"a hook on {name}",
                "hc.no_sync",
                "gradients pile up on each rank, and the hook would see this rank's share of the mean",
                "leave hc.no_sync out where parameters have hooks, or do after backward what the hook does",
            )

    def _changed_by_users(self, gradient: Tensor) -> Tensor:
        for hook in list(self._on_gradient.hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def _run_after(self, parameter: Tensor) -> None:
        for hook in list(self._after.hooks.values()):
            hook(parameter)
