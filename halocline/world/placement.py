"""How a parameter lies on the mesh: on each axis *whole*, *cut* or each rank's *own*.

Whole (the default): every rank of the axis holds the same values, and the gradient is their mean. Cut: each rank of the
axis holds its part of one parameter. Own: each has values of its own, such as a discriminator for each group of ranks.
Gradients are averaged, first values are shared and weights are compared over the axes on which a parameter is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import MeshError
from .mesh import Mesh
from .movement import AVERAGED

KINDS = ("whole", "cut", "own")
_PLACEMENT = "_halocline_placement"


def place_parameter(parameter: Tensor | nn.Module, **axes: str) -> None:
    """Say before ``hc.distribute`` on which mesh axes a parameter, or all of a module's, is "cut" or each rank's "own".

        place_parameter(model.discriminator, data="own")   # one for each data replica, never averaged over them
        place_parameter(model.proj.weight, depth="cut")    # this rank holds its rows only

    On every other axis it is whole. All ranks build the same modules; only shapes of cut parameters may differ.

    Not public yet: no rule knows such a parameter. Work that meets it directly and is cut along its axis is refused,
    but not where a gather or another movement lies between; ``copy.deepcopy`` drops the mark; buffers of an own module
    are rank 0's.
    """
    wrong = next((kind for kind in axes.values() if kind not in KINDS), None)
    if wrong is not None:
        raise MeshError(f"place_parameter: on an axis a parameter is {', '.join(KINDS)}, not {wrong!r}")
    tensors = parameter.parameters() if isinstance(parameter, nn.Module) else [parameter]
    for tensor in tensors:
        if getattr(tensor, AVERAGED, False):
            raise MeshError("place_parameter comes before hc.distribute, which has seen this parameter already")
        mark_placement(tensor, {**placement_of(tensor), **axes})


def mark_placement(tensor: Tensor, axes: Mapping[str, str]) -> None:
    """Mark a tensor that lies on the mesh as such a parameter does: in a ``state_dict``, or a moment of an
    optimizer."""
    setattr(tensor, _PLACEMENT, {axis: kind for axis, kind in axes.items() if kind != "whole"})


def placement_of(tensor: Any) -> Mapping[str, str]:
    """The kind by axis, of axes on which a tensor is not whole. A sharded tensor is cut on those that cut it."""
    sharding = getattr(tensor, "sharding", None)
    if sharding is not None:
        return dict.fromkeys(sorted(sharding.axes), "cut")
    placement: Mapping[str, str] = getattr(tensor, _PLACEMENT, {})
    return placement


def ranks_with_same(tensor: Tensor, mesh: Mesh) -> tuple[int, ...]:
    """The ranks that hold the same values: those along the axes on which it is whole, this rank included."""
    placement = placement_of(tensor)
    for axis in placement:
        mesh.check_axis(axis)
    return mesh.ranks_along([axis for axis in mesh.names if axis not in placement])


def place_on(tensor: Tensor, mesh: Mesh) -> str:
    """Which part, or whose values, this rank holds, such as "depth=1"; empty if the tensor is whole on all axes."""
    return ",".join(f"{axis}={mesh.coordinates[axis]}" for axis in sorted(placement_of(tensor)))
