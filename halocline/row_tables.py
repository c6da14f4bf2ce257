"""Tables of ``sparse=True`` lookups that a layout cuts by rows, and optimizer steps on their sparse gradients.

The owner of a row makes its step: stock optimizers (SGD, Adagrad, SparseAdam) see this rank's tile and its sparse
gradient as plain tensors while they step, and the sharded parameter before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .geometry import slices
from .tensor import ShardedTensor, Sharding, unwrap, wrap

LOOKS_UP = "_halocline_looks_up_rows"  # on modules that stand for such an embedding
_SWAPPED = "_halocline_swapped"
_handles: list[Any] = []


def row_tables(model: nn.Module, shardings: Mapping[str, Sharding]) -> set[str]:
    """Names of parameters that a layout cuts by rows and only lookups with ``sparse=True`` use."""
    users: dict[int, list[bool]] = {}
    for module in model.modules():
        sparse = looks_up_rows(module)
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(sparse)
    named = dict(model.named_parameters())
    return {name for name, s in shardings.items() if set(s.dims_by_axis()) == {0} and all(users[id(named[name])])}


def looks_up_rows(module: nn.Module) -> bool:
    """Are the module's parameters read by lookups with ``sparse=True`` alone?"""
    return bool(module.__dict__.get(LOOKS_UP)) or (isinstance(module, nn.Embedding) and module.sparse)


def step_on_tiles() -> None:
    """From now on, optimizers step on the tiles of parameters whose gradients are sparse. For the whole process."""
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        torch.sparse.check_sparse_tensor_invariants.disable()  # as before, but said: else torch's optimizers warn
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_to_tiles))
        _handles.append(register_optimizer_step_post_hook(_to_shells))


def _to_tiles(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    swapped = optimizer.__dict__.setdefault(_SWAPPED, [])
    for group, place, parameter in _cut_and_sparse(optimizer):
        tile = parameter._tile
        group["params"][place] = tile
        state = optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[tile] = {name: _tile_of(value, parameter) for name, value in state.items()}
        swapped.append((group, place, parameter, state or {}))


def _cut_and_sparse(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], int, ShardedTensor]]:
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            gradient = parameter._tile.grad if isinstance(parameter, ShardedTensor) else None
            if gradient is not None and gradient.is_sparse:
                yield group, place, parameter


def _to_shells(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    swapped = optimizer.__dict__.pop(_SWAPPED, [])
    for group, place, parameter, before in swapped:
        tile = group["params"][place]
        group["params"][place] = parameter
        state = optimizer.state.pop(tile, None)
        if state is not None:
            optimizer.state[parameter] = {
                name: _shell_of(value, before.get(name), parameter) for name, value in state.items()
            }


def _tile_of(value: Any, parameter: ShardedTensor) -> Any:
    """Also of state that was made before the parameter was cut (Adagrad's sums)."""
    if isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and value.shape == parameter.sharding.shape:
        return value[slices(parameter.sharding.box)].clone()
    return unwrap(value) if isinstance(value, ShardedTensor) else value


def _shell_of(value: Any, before: Any, parameter: ShardedTensor) -> Any:
    """State of a tile's shape is cut as the parameter; the same shell if the step has written into its tile. A sparse
    one (SGD's momentum) stays as it is, and checkpoints refuse it, as on one rank."""
    if isinstance(before, ShardedTensor) and before._tile is value:
        return before
    if isinstance(value, Tensor) and value.ndim and not value.is_sparse and value.shape == parameter._tile.shape:
        return wrap(value, parameter.sharding)
    return value
