"""How a parameter lies on the mesh: on each axis *whole*, *cut* or each rank's *own*.

Whole (the default): every rank of the axis holds the same values, and the gradient is their mean. Cut: each rank of the
axis holds its part of one parameter. Own: each has values of its own, such as a discriminator for each group of ranks.
Gradients are averaged, first values are shared and weights are compared over the axes on which a parameter is whole.
"""

from __future__ import annotations

import weakref
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

    On every other axis it is whole. All ranks build the same modules; only shapes of cut parameters may differ. Of a
    module, buffers are placed too, so that an own batch norm keeps statistics of its own. Copies by ``copy.deepcopy``
    are placed as the original is.

    No rule knows such a parameter: work that meets it directly and is cut along its axis is refused. A gather or
    another movement in between hides it from that check.
    """
    wrong = next((kind for kind in axes.values() if kind not in KINDS), None)
    if wrong is not None:
        raise MeshError(f"place_parameter: on an axis a parameter is {', '.join(KINDS)}, not {wrong!r}")
    tensors = list(parameter.parameters()) if isinstance(parameter, nn.Module) else [parameter]
    for tensor in tensors:
        if getattr(tensor, AVERAGED, False):
            raise MeshError("place_parameter comes before hc.distribute, which has seen this parameter already")
        mark_placement(tensor, {**placement_of(tensor), **axes})
        tensor.__deepcopy__ = _MarkedCopy(tensor)  # type: ignore[method-assign]
    for module in parameter.modules() if isinstance(parameter, nn.Module) else ():
        # Buffers may be replaced at any time, so the module remembers for them.
        module.__dict__[_PLACEMENT] = {**module.__dict__.get(_PLACEMENT, {}), **axes}
        place_buffers(module)


def place_buffers(model: nn.Module) -> None:
    """Mark the buffers of modules that were placed, those that have been replaced or copied since included."""
    for module in model.modules():
        for buffer in module.buffers(recurse=False) if _PLACEMENT in module.__dict__ else ():
            mark_placement(buffer, module.__dict__[_PLACEMENT])


class _MarkedCopy:
    """``__deepcopy__`` of a placed parameter: torch's own copies no attributes. Holds a weak reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __call__(self, memo: dict[int, Any]) -> Tensor:
        tensor = self._tensor()
        assert tensor is not None, "it is an attribute of this tensor"
        copy: Tensor = type(tensor).__deepcopy__(tensor, memo)
        mark_placement(copy, placement_of(tensor))
        copy.__deepcopy__ = _MarkedCopy(copy)  # type: ignore[method-assign]
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled parameter keeps its mark; without this attribute, copy.deepcopy takes the way of pickles.
        return type(None), ()


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
