"""Which component averages a parameter's gradient: an engine of ours, DistributedDataParallel, or FSDP2.

DDP and FSDP2 (``fully_shard``) compute the mean over their own ranks. That is correct if those are all ranks, which is
checked here.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from .._torch_private import all_parameters
from ..errors import MeshError
from ..world import AVERAGED, Mesh, place_buffers, placement_of, ranks_with_same
from ..world.placement import mark_placement

Named = list[tuple[str, Tensor]]


def parameters_to_average(model: nn.Module, mesh: Mesh, averaging: str) -> tuple[Named, dict[tuple[int, ...], Named]]:
    """The parameters that our engines average: those whole on all axes, and the others by the ranks that share them.

    Where ``averaging`` is "external", none. Parameters that another component averages are marked as averaged.
    """
    owned = leave_to_owners(model, mesh.size)
    whole: Named = []
    placed: dict[tuple[int, ...], Named] = {}
    for name, parameter in model.named_parameters():
        leaf = leaf_behind(parameter)
        ranks, placement = ranks_with_same(parameter, mesh), placement_of(parameter)
        if placement and (parameter in owned or averaging == "external"):
            raise MeshError(
                f"{name} is {' and '.join(placement.values())} on {' and '.join(placement)}, and whoever else averages "
                "its gradient does so over all ranks; leave it out of DDP and FSDP2, and averaging as it is"
            )
        if placement and len(ranks) == 1:
            mark_averaged(leaf, mark=True)  # its own gradient is the true one
        elif leaf is not parameter and is_averaged(leaf):
            continue  # the copy of a cut parameter, whose mean is taken as each gradient arrives
        elif parameter.requires_grad and parameter not in owned and averaging == "own":
            (placed.setdefault(ranks, []) if placement else whole).append((name, leaf))
    if averaging == "external":
        mark(set(model.parameters()))
    if any(placement_of(leaf_behind(tensor)) for tensor in (*model.parameters(), *model.buffers())):
        model.register_state_dict_post_hook(_mark_placed)
    return whole, placed


def _mark_placed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook on ``state_dict``: its tensors get the parameters' placement, which checkpoints and guards read."""
    place_buffers(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if placement_of(leaf_behind(tensor)) and isinstance(state.get(prefix + name), Tensor):
            mark_placement(state[prefix + name], placement_of(tensor))


def leave_to_owners(model: nn.Module, ranks: int) -> set[Tensor]:
    """Find and mark the parameters that DDP or FSDP2 average; those of FSDP2 anew in each forward, which swaps them."""
    owned: set[Tensor] = set()
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise MeshError("FSDP1 hides its parameters from others; use fully_shard (FSDP2)")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            _check_ranks("DistributedDataParallel", module.process_group.size(), ranks)
            ignored = module.parameters_to_ignore
            owned |= {p for name, p in module.module.named_parameters() if name not in ignored}
        pieces = {p for p in module.parameters(recurse=False) if is_dtensor(p)}
        for parameter in pieces:
            _check_placed(parameter, ranks)
        if pieces:
            module.register_forward_pre_hook(_mark_parameters)
        owned |= pieces
    mark(owned)
    return owned


#: The attribute of averaged parameters that are not whole on all axes, in place of ``AVERAGED``: rules check more.
_PLACED = "_halocline_placed"


def leaf_behind(parameter: Tensor) -> Tensor:
    """The leaf that gradients accumulate in: of a cut parameter its tile."""
    leaf: Tensor = getattr(parameter, "_tile", parameter)
    return leaf


def is_averaged(parameter: Tensor) -> bool:
    """Is the gradient of this parameter averaged, by the library or by its owner?"""
    leaf = leaf_behind(parameter)
    return bool(getattr(leaf, AVERAGED, False) or getattr(leaf, _PLACED, False))


def mark_averaged(parameter: Tensor, mark: AveragedMark | bool) -> None:
    """Note on a parameter that its gradient is averaged, as long as ``mark`` is true."""
    setattr(parameter, _PLACED if placement_of(parameter) else AVERAGED, mark)


class AveragedMark:
    """A mark on a parameter that is true as long as the engine that averages it lives. A copy is false."""

    def __init__(self, engine: Any = None) -> None:
        self._engine = engine

    def __bool__(self) -> bool:
        return self._engine is not None and self._engine() is not None

    def __deepcopy__(self, memo: object) -> AveragedMark:
        return AveragedMark()

    def __reduce__(self) -> tuple[Any, ...]:
        return AveragedMark, ()


def mark(parameters: set[Tensor]) -> None:
    """Note that another component averages these parameters' gradients."""
    for parameter in parameters:
        setattr(parameter, AVERAGED, True)


def _mark_parameters(module: nn.Module, _: Any) -> None:
    """A forward pre-hook: FSDP2 swaps parameters in each forward. A function of its own, so that models pickle."""
    mark(set(module.parameters(recurse=False)))


def is_dtensor(tensor: Tensor) -> bool:
    """Is it a DTensor, as FSDP2 makes parameters?"""
    loaded = sys.modules.get("torch.distributed.tensor")  # not imported: no tensor is one
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def _check_placed(parameter: Any, ranks: int) -> None:
    """Check that FSDP2 shards it over all ranks, or over its mesh's second axis with copies along the first (HSDP)."""
    *copies, cut = parameter.placements
    if not cut.is_shard() or len(copies) > 1 or any(not placement.is_replicate() for placement in copies):
        raise MeshError(
            f"a parameter is a DTensor placed {parameter.placements}; of those, hc.distribute takes what "
            "fully_shard makes on a mesh of one axis, or of two (copies, then shards)"
        )
    _check_ranks("fully_shard", parameter.device_mesh.size(), ranks)


def _check_ranks(owner: str, theirs: int, ranks: int) -> None:
    if theirs != ranks:
        raise MeshError(
            f"{owner} averages gradients over {theirs} ranks; each of the {ranks} ranks holds a share of them, cut "
            f"samples included: give it all ranks (fully_shard: a mesh of one axis, or copies x shards)"
        )


def refuse_unaveraged(model: nn.Module | None) -> None:
    """Raise if a parameter has a gradient that nothing averages: ranks would diverge."""
    if model is None or all(is_averaged(p) or p.grad is None for p in all_parameters(model)):
        return
    names = [n for n, p in model.named_parameters() if p.grad is not None and not is_averaged(p)]
    raise MeshError(
        f"{names[0]} is new in the model and got a gradient that nobody averages: new parameters are found when "
        "the distributed model itself is called; call it, not its parts"
    )
