"""Who averages a parameter's gradient: an engine of ours, DistributedDataParallel, or FSDP2 (``fully_shard``).

What others compute, the mean over their ranks, is law 3's last step if their ranks are all ranks. That is checked.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from .._torch_private import all_parameters
from ..errors import MeshError
from ..world import AVERAGED


def leave_to_owners(model: nn.Module, ranks: int) -> set[Tensor]:
    """The parameters that others average, each marked so; those of FSDP2 anew in each forward, where it swaps them."""
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


class AveragedMark:
    """On a parameter: true as long as the engine that averages it lives. A copy's is false."""

    def __init__(self, engine: Any = None) -> None:
        self._engine = engine

    def __bool__(self) -> bool:
        return self._engine is not None and self._engine() is not None

    def __deepcopy__(self, memo: object) -> AveragedMark:
        return AveragedMark()

    def __reduce__(self) -> tuple[Any, ...]:
        return AveragedMark, ()


def mark(parameters: set[Tensor]) -> None:
    for parameter in parameters:
        setattr(parameter, AVERAGED, True)


def _mark_parameters(module: nn.Module, _: Any) -> None:
    mark(set(module.parameters(recurse=False)))


def is_dtensor(tensor: Tensor) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")  # where it is not, nothing is one
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def _check_placed(parameter: Any, ranks: int) -> None:
    """Cut over all ranks of FSDP2's mesh, or over its second axis with copies along the first (HSDP)."""
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
    """A gradient that nobody averages is one that the ranks would not share."""
    if model is None or all(getattr(p, AVERAGED, False) or p.grad is None for p in all_parameters(model)):
        return
    names = [n for n, p in model.named_parameters() if p.grad is not None and not getattr(p, AVERAGED, False)]
    raise MeshError(
        f"{names[0]} is new in the model and got a gradient that nobody averages: new parameters are found when "
        "the distributed model itself is called; call it, not its parts"
    )
