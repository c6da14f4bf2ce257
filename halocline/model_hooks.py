"""Hooks before a distributed model's forward: parameters that are new, buffers that every rank updates, inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._torch_private import all_parameters, running_modules, transforming
from .errors import MeshError
from .reduction import GradientAverage, is_averaged, is_dtensor, same_weights, share_weights
from .rules.same_sample import check_same
from .tensor import ShardedTensor, unwrap
from .tree import tensors_in
from .world import Mesh, place_buffers, placement_of


class NewParameters:
    """A hook before forward: parameters added or unfrozen since are averaged too, beginning with rank 0's values."""

    def __init__(self, engine: GradientAverage | None) -> None:
        self._engine = engine

    def __call__(self, module: nn.Module, _: Any) -> None:
        engine = self._engine
        if engine is None or transforming():  # torch.func differentiates what it put in the parameters' places
            return
        # Whoever was put round the model after us averages too, and looks at gradients while backward runs.
        engine.patient |= any(isinstance(m, nn.parallel.DistributedDataParallel) for m in running_modules())
        if all(is_averaged(p) or not p.requires_grad for p in all_parameters(module)):
            return
        if any(type(part).__name__.startswith("FSDP") for part in module.modules()):
            return  # FSDP2 puts others in their place for the time of a forward
        self._adopt(engine, module)

    def _adopt(self, engine: GradientAverage, module: nn.Module) -> None:
        # What functional_call puts in a parameter's place may be computed from others, whose gradients are averaged.
        named = [(n, p) for n, p in module.named_parameters() if p.is_leaf and not is_averaged(p)]
        new = [(name, parameter) for name, parameter in named if parameter.requires_grad and not is_dtensor(parameter)]
        late = [name for name, parameter in new if placement_of(parameter)]
        if late:
            raise MeshError(
                f"{late[0]} is cut or each rank's own on a mesh axis, and required no gradient at hc.distribute, or "
                "was made since; let it require one before hc.distribute, and freeze it afterwards"
            )
        if new:
            same_weights([parameter.detach() for _, parameter in new], engine.world)
            engine.adopt(new)

    def __deepcopy__(self, memo: object) -> NewParameters:
        return NewParameters(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return NewParameters, (None,)


class SharedBuffers:
    """On plain inputs, which are local batches as in DDP, buffers are rank 0's before each forward, as in DDP."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh: Mesh | None = mesh

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.mesh is None or self.mesh.size == 1 or not (module.training and torch.is_grad_enabled()):
            return
        if any(isinstance(tensor, ShardedTensor) for tensor in tensors_in((args, kwargs))):
            return  # cut inputs have the same statistics on every rank already
        place_buffers(module)
        share_weights(module.buffers(), self.mesh)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A copied model belongs to no mesh."""
        return _no_hook, ()

    def __deepcopy__(self, memo: object) -> Any:
        return _no_hook()


def _no_hook() -> Any:
    return _ignore


def _ignore(module: nn.Module, args: Any, kwargs: Any) -> None:
    return None


class SameInputs:
    """Compares inputs over the axes that cut parameters: ranks that hold parts of one parameter work on one sample."""

    def __init__(self, mesh: Mesh, axes: frozenset[str]) -> None:
        self.mesh: Mesh | None = mesh
        self._axes = axes

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.mesh is None or transforming():
            return
        for tensor in tensors_in((args, kwargs)):
            cut = tensor.sharding.axes if isinstance(tensor, ShardedTensor) else frozenset[str]()
            tile = unwrap(tensor) if isinstance(tensor, ShardedTensor) else tensor
            if type(tile) is torch.Tensor:
                check_same(tile, self.mesh, self._axes - cut, None, "a model whose parameters are cut")

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A copied model belongs to no mesh."""
        return _no_hook, ()

    def __deepcopy__(self, memo: object) -> Any:
        return _no_hook()
