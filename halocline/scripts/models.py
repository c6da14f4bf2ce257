"""Models of a script: distributed when an optimizer takes their parameters, and given cut inputs from then on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distribute import average_gradients, distribute
from ..reduction import is_averaged
from .batches import BatchCutter
from .patches import Patches


class Models:
    """Finds the models whose parameters an optimizer takes, and distributes them."""

    def __init__(self, cutter: BatchCutter) -> None:
        self._cutter, self._depth = cutter, 0

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of these parameters, and of all others of their models."""
        new = [p for p in parameters if p.requires_grad and p.is_leaf and not is_averaged(p)]
        for parameter in new:
            if is_averaged(parameter):  # with a model of an earlier one
                continue
            model = _model_of(parameter)
            if model is None or any(is_averaged(each) for each in model.parameters()):
                average_gradients([parameter], self._cutter.mesh)
            else:
                distribute(model, self._cutter.mesh)
            if model is not None:
                for module in (model, *model.children()):
                    self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Cut what enters a module that no other runs."""
        module.register_forward_pre_hook(EntranceHook(self.entered), with_kwargs=True, prepend=True)
        module.register_forward_hook(EntranceHook(self.left), with_kwargs=True, always_call=True)

    def entered(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before forward."""
        self._depth += 1
        # Without gradients nothing is saved by a cut but time, and what comes out is often looked at as a whole.
        if self._depth > 1 or not (torch.is_grad_enabled() or self._cutter.cuts_space):
            return None
        return self._cutter.whole((args, kwargs))

    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After forward, also where it has raised."""
        self._depth -= 1


class EntranceHook:
    """A hook that copies and pickles of a model do not have."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __deepcopy__(self, memo: object) -> EntranceHook:
        return EntranceHook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return EntranceHook, (None,)


def _model_of(parameter: Tensor) -> nn.Module | None:
    """The largest module that holds a parameter: the model as the script has built it so far."""
    gc.collect()  # unreachable modules may be freed on one rank and not on another
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    holders = [module for module in modules if any(each is parameter for each in module.parameters())]
    return max(holders, key=lambda module: sum(1 for _ in module.modules()), default=None)


def share_models(patches: Patches, cutter: BatchCutter) -> Models:
    """From now on, an optimizer distributes the models whose parameters it takes."""
    models = Models(cutter)

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            plain(optimizer, group)
            models.adopt(optimizer.param_groups[-1]["params"])

        return add_param_group

    patches.replace(Optimizer, "add_param_group", make)
    return models
